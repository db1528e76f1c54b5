"""Azurite, Microsoft's emulator of Azure Blob Storage, from npm into a cache outside the tree."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.processes import Unavailable, free_ports, program

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = "3.37.0"
ACCOUNT = "devstoreaccount1"
# Public: the same in every Azurite, from its documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def connection_string(url: str) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint={url}/{ACCOUNT};"
    )


def installed() -> Path:
    """The server's script, installed if need be."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "neuron_store-tests" / f"azurite-{VERSION}"
    script = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if script.exists():
        return script
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise Unavailable("Azurite needs node and npm")
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", f"azurite@{VERSION}"],
            cwd=staging,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        if done.returncode:
            raise Unavailable(f"npm cannot install Azurite: {done.stderr[-300:]}")
        with contextlib.suppress(OSError):  # another test run was first
            staging.rename(folder)
    except subprocess.TimeoutExpired:
        raise Unavailable("npm took too long to install Azurite") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return script


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Run it; gives its URL."""
    script, (port,) = installed(), free_ports(1)
    url = f"http://127.0.0.1:{port}"
    arguments = [
        "node",
        str(script),
        *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
        *("--inMemoryPersistence", "--extentMemoryLimit", "4096"),
        *("--skipApiVersionCheck", "--silent", "--disableTelemetry"),
    ]
    with program(arguments, url, folder / "azurite.log", cwd=folder):
        yield url

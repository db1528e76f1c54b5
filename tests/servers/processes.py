"""Server programs: started on free ports of 127.0.0.1, and always stopped."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Unavailable(Exception):
    """The server cannot be had here; the message says why, and the test skips with it."""


def free_ports(count: int, *, twin: int = 0) -> list[int]:
    """Free ports; with `twin`, each port plus that number is free too."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if twin:
                port = port % 20_000 + 20_000
            try:
                if twin:
                    two.bind(("127.0.0.1", port + twin))
            except (OSError, OverflowError):
                continue
        if port not in found:
            found.append(port)
    return found


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address at which packets are dropped: a listener whose queue is full and stays so."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(listener.getsockname())
        time.sleep(0.1)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def answers(url: str) -> bool:
    """Whether an HTTP server is there, whatever it says."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def program(
    arguments: Sequence[str], url: str, log: Path, *, cwd: Path | None = None, seconds: float = 30
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends. `Unavailable` when it does not come up."""
    if shutil.which(arguments[0]) is None:
        raise Unavailable(f"{arguments[0]} is not installed")
    with log.open("wb") as stream:
        process = subprocess.Popen(arguments, stdout=stream, stderr=stream, cwd=cwd)
        try:
            end = time.monotonic() + seconds
            while not answers(url):
                if process.poll() is not None or time.monotonic() > end:
                    told = log.read_text(errors="replace")[-500:]
                    raise Unavailable(f"{arguments[0]} did not come up: {told}")
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

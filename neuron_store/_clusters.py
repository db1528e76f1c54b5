"""Whether a cluster is there, and whether anybody in it works, within bounded time."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["Patience", "check_ray"]

_log = logging.getLogger(__name__)

_TCP_TIMEOUT = 10.0
_IMPORT_TIMEOUT = 120.0
_CONNECT_TIMEOUT = 30.0
# `host:port`, `[::1]:port` or a Ray client's `ray://host:port`; other schemes are Ray's plug-ins.
_ADDRESS = re.compile(r"(?:ray://)?(?:\[([^\]]+)\]|([^\[\]:/]+)):(\d{1,5})(?:/.*)?")
# Ray retries for minutes, and its C++ client may end the whole process when it gives up.
_TRY = """
import sys
import ray
print("imported", flush=True)
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(1)
ray.shutdown()
"""


def check_ray(address: str) -> None:
    """Connect to a Ray cluster in a process of its own, which can be given up.

    Args:
        address: as `ray.init` takes it.

    Raises:
        ConfigError: none is there, or it does not answer within about half a minute.
    """
    if address == "local":
        raise ConfigError(
            "Ray address 'local' means a cluster that would end with this process; give the "
            "address of one that runs"
        )
    if found := _ADDRESS.fullmatch(address):
        _check_port(address, found[1] or found[2], int(found[3]))
    elif address != "auto" and "://" not in address:
        raise ConfigError(f"Ray address {address!r} is none; write HOST:PORT or ray://HOST:PORT")
    if sys.executable and (reason := _try_ray(address)):
        raise _no_ray(address, reason)


def _no_ray(address: str, reason: object) -> ConfigError:
    return ConfigError(
        f"no Ray cluster at {address} ({reason}); start one (`ray start`), or give its address"
    )


def _check_port(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=_TCP_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise _no_ray(address, getattr(error, "strerror", None) or error) from error


def _try_ray(address: str) -> str | None:
    """Why a process cannot connect; None: it can."""
    process = subprocess.Popen(  # noqa: S603  (this interpreter)
        [sys.executable, "-c", _TRY, address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        # On a busy host the import alone takes long, and says nothing about the cluster.
        with _ending(process, _IMPORT_TIMEOUT):
            imported = process.stdout.readline()
        with _ending(process, _CONNECT_TIMEOUT):
            said = process.stdout.read()
            status = process.wait()
    finally:
        _end(process)
        process.stdout.close()
    if status == 0:
        return None
    if status == -signal.SIGKILL:
        limit = _CONNECT_TIMEOUT if imported else _IMPORT_TIMEOUT
        return f"no answer within {limit:g} s"
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[0][:300] if lines else f"connecting ended with status {status}"


@contextlib.contextmanager
def _ending(process: subprocess.Popen[str], seconds: float) -> Generator[None, None, None]:
    """Ends the process when the block takes longer."""
    timer = threading.Timer(seconds, _end, [process])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Patience:
    """Notices while jobs wait that a cluster has nobody to run them, and says so.

    Args:
        where: the cluster, for messages.
        workers: how many it has now.
        limit: seconds without any, after which it is given up.
    """

    first_look = 5.0
    """Seconds of silence before the cluster is asked; also between two questions."""

    def __init__(self, where: str, workers: Callable[[], float], limit: float) -> None:
        self._where = where
        self._workers = workers
        self._limit = limit
        self._asked = time.monotonic()
        self._alone_since: float | None = None
        self._told = False

    def wait(self) -> None:
        """Called again and again while no job ends.

        Raises:
            ConfigError: there has been no worker for too long.
        """
        now = time.monotonic()
        if now - self._asked < self.first_look:
            return
        since, self._asked = self._asked, now
        try:
            workers = self._workers()
        except Exception as error:  # noqa: BLE001  (any cluster's own; who cannot say has none)
            _log.debug("%s does not say how many workers it has: %s", self._where, error)
            workers = 0
        if workers > 0:
            self._alone_since, self._told = None, False
            return
        if self._alone_since is None:
            self._alone_since = since
        if not self._told:
            self._told = True
            _log.warning(
                "no workers yet at %s; waiting for one, at most %g s", self._where, self._limit
            )
        if now - self._alone_since >= self._limit:
            raise ConfigError(
                f"no workers at {self._where} within {self._limit:g} s; start workers there, or "
                "raise NEURON_LIBTORCH_COMPILATION_TIMEOUT"
            )

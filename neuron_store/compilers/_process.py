"""Runs a compiler so that nothing of it outlives us, and says how it ended."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import tempfile
import threading
from typing import TYPE_CHECKING

from neuron_store.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["disk_full", "ended", "interrupt_compiles", "plain_environment", "run_compiler", "tail"]

TAIL_LINES = 40
_TAIL_BYTES = 16 << 10
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|\bENOSPC\b", re.IGNORECASE)
# Less than a block or two: nothing that a compiler writes fits.
_LITTLE = 16 << 10

# The compiler leads a process group of its own, so that an interrupt here can end it with all its
# children. A group of its own would also survive us when we are killed: the watcher waits on a
# pipe that only we hold open, and ends the group when it closes.
_GUARD = 'exec 3<&0; { read _ <&3; kill -9 -$$; } 2>/dev/null & exec "$@" </dev/null 3<&-'

_lock = threading.Lock()
_running: dict[int, subprocess.Popen[bytes]] = {}
"""Thread to the compiler that it waits for, not yet reaped."""
_interrupted: set[int] = set()


def _after_fork() -> None:
    # The parent's compilers are the parent's, and its lock may have been held.
    global _lock  # noqa: PLW0603  (a lock cannot be made free in any other way)
    _lock = threading.Lock()
    _running.clear()
    _interrupted.clear()


os.register_at_fork(after_in_child=_after_fork)

_MEANINGS = {
    signal.SIGKILL: "killed (signal 9), most likely by the kernel for lack of memory; "
    "free memory or run fewer compiles at once",
    signal.SIGABRT: "aborted (signal 6), an assertion or an internal error of the compiler",
    signal.SIGSEGV: "crashed (signal 11), a segmentation fault of the compiler",
    signal.SIGBUS: "crashed (signal 7), most likely a full /tmp or /dev/shm",
    signal.SIGTERM: "terminated (signal 15) from outside",
    signal.SIGINT: "interrupted (signal 2) from outside",
}


def run_compiler(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    output: Path,
    key: str,
    compiler: str,
) -> int:
    """Run the compiler to its end; its exit status, or minus the signal that ended it.

    Everything it prints goes to the file `output`. Whatever interrupts us (a KeyboardInterrupt,
    our own death) ends it and its children too.

    Raises:
        CompileError: the program cannot be started.
        KeyboardInterrupt: also in a thread, when `interrupt_compiles` named it.
    """
    thread = threading.get_ident()
    if not os.access(argv[0], os.X_OK) or os.path.isdir(argv[0]):
        raise CompileError(
            key,
            f"{argv[0]} is not there or not executable; install the compiler",
            compiler=compiler,
            permanent=True,
        )
    watched, ours = os.pipe()
    try:
        with output.open("wb") as sink:
            process = subprocess.Popen(  # noqa: S603  (no shell reads the arguments)
                ["/bin/sh", "-c", _GUARD, "guard", *argv],
                cwd=cwd,
                env=dict(env),
                stdin=watched,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with _lock:
            _running[thread] = process
        try:
            # Not yet reaped, so that the group's number cannot have passed to somebody else.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            # The watcher, and what the compiler left behind, whether it ended well or not.
            with _lock:
                _kill_group(process)
                status = process.wait()
                del _running[thread]
                interrupted = thread in _interrupted
                _interrupted.discard(thread)
        if interrupted:
            raise KeyboardInterrupt
        return status
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        reason = f"disk full: {error}; free space there" if full else f"cannot be started: {error}"
        raise CompileError(key, reason, compiler=compiler, permanent=full) from error
    finally:
        os.close(watched)
        os.close(ours)


def interrupt_compiles(threads: Iterable[int]) -> None:
    """End the compilers that these threads wait for, each of which gets a KeyboardInterrupt.

    An interrupt from the keyboard reaches the main thread only.
    """
    with _lock:
        for thread in threads:
            process = _running.get(thread)
            if process is not None:
                _interrupted.add(thread)
                _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def plain_environment(keep: Sequence[str] = ()) -> dict[str, str]:
    """The environment for a compiler: what every program needs, the variables `keep`, no more.

    Variables that change what a compiler makes would be in no key.
    """
    wanted = ("PATH", "HOME", "USER", "TMPDIR", "LD_LIBRARY_PATH", *keep)
    chosen = {name: os.environ[name] for name in wanted if name in os.environ}
    return {**chosen, "LC_ALL": "C.UTF-8"}


def ended(status: int) -> str:
    """How a compiler that failed ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return _MEANINGS.get(signal.Signals(-status)) or (
            f"ended by {signal.Signals(-status).name} (signal {-status})"
        )
    except ValueError:
        return f"ended by signal {-status}"


def disk_full(workdir: Path, said: str) -> str | None:
    """Why a compiler failed, where that was a full disk: it then need not be tried again.

    Args:
        workdir: where it worked; its temporary files are below TMPDIR.
        said: the last of what it printed, which is nothing when its log had no room either.
    """
    places = [str(workdir), tempfile.gettempdir()]
    full = [place for place in places if _free_bytes(place) < _LITTLE]
    if places[0] not in full and _NO_SPACE.search(said) is None:
        return None
    return f"disk full: no space left in {' or '.join(full or places)}; free space there"


def _free_bytes(place: str) -> int:
    try:
        found = os.statvfs(place)
    except OSError:
        return _LITTLE
    return found.f_bavail * found.f_frsize


def tail(path: Path) -> str:
    """The last lines of a log, at most forty; empty when there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])

"""A file system that fails on purpose: this process's own calls below one directory.

    with FaultyFiles(root, FileFault(at=7, error=errno.ENOSPC)) as files:
        store.publish(artifact, source)
    print(files.calls, files.injected)

It stands between Python and the kernel, in the modules `os`, `io` and `fcntl`, so it needs neither
root, FUSE nor a compiler, and it is the same on every machine. What C libraries do on their own
(`ctypes`, a compiled extension) passes it by. Calls on paths outside the directory are left alone.
Threads share it; forked children inherit it.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import functools
import io
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

__all__ = ["FaultyFiles", "FileFault", "faults_for"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EROFS)
_LOST = (errno.EIO, errno.ESTALE)

ERRORS: dict[str, tuple[int, ...]] = {
    "open": (*_LOST, errno.EACCES),
    "create": (*_FULL, *_REFUSED, *_LOST),
    "read": _LOST,
    "write": (*_FULL, *_LOST),
    "copy_file_range": (*_FULL, *_LOST, errno.EXDEV),
    "sendfile": (*_FULL, *_LOST),
    "fsync": (*_FULL, *_LOST),
    "rename": (*_FULL, *_REFUSED, *_LOST, errno.EXDEV, errno.EBUSY),
    "link": (*_FULL, *_REFUSED, *_LOST, errno.EXDEV),
    "unlink": (*_REFUSED, *_LOST, errno.EBUSY),
    "mkdir": (*_FULL, *_REFUSED, *_LOST),
    "rmdir": (*_REFUSED, *_LOST, errno.ENOTEMPTY, errno.EBUSY),
    "stat": (*_LOST, errno.EACCES),
    "listdir": (*_LOST, errno.EACCES),
}
"""What each call may fail with on a disk, a full one, a read-only one, or a network mount."""

RETRANSMITTED = {
    "rename": errno.ENOENT,
    "link": errno.EEXIST,
    "unlink": errno.ENOENT,
    "mkdir": errno.EEXIST,
    "rmdir": errno.ENOENT,
}
"""What a call that worked reports when its reply was lost and NFS asked again."""


# What needs room; the rest works on a full disk, or it could never be emptied.
_GROWING = frozenset({"create", "write", "copy_file_range", "sendfile", "fsync", "mkdir"})


@attrs.frozen
class FileFault:
    """What happens to one call."""

    at: int = attrs.field()
    """The number of the call, from 1, among those below the directory."""
    error: int = errno.EIO
    done: bool = False
    """The call is carried out, and reports the error all the same."""
    short: bool = False
    """A write or copy takes one byte and succeeds; the next ones are whole again."""
    lasting: bool = False
    """Later calls that need room fail too: the disk stays full."""
    kill: bool = False
    """SIGKILL before the call (after it, with `done`); only ever in a child of the test's."""

    @at.validator
    def _can_come(self, _attribute: object, value: int) -> None:
        if value < 1:
            raise ValueError(f"at={value}: calls are counted from 1, so it would never come")

    def __str__(self) -> str:
        if self.kill:
            return f"call {self.at}: killed" + (" after it" if self.done else "")
        if self.short:
            return f"call {self.at}: short"
        what = errno.errorcode.get(self.error, str(self.error))
        how = ", though it worked" if self.done else ", from then on" if self.lasting else ""
        return f"call {self.at}: {what}{how}"


def faults_for(calls: Sequence[tuple[str, str]]) -> Iterator[FileFault]:
    """Every fault of every call that a run without faults made (`FaultyFiles.calls`)."""
    for at, (call, _path) in enumerate(calls, 1):
        for error in ERRORS[call]:
            yield FileFault(at, error)
        if call in RETRANSMITTED:
            yield FileFault(at, RETRANSMITTED[call], done=True)
            yield FileFault(at, errno.EIO, done=True)
        if call in {"write", "copy_file_range", "sendfile"}:
            yield FileFault(at, short=True)
        if call in _GROWING:
            yield FileFault(at, errno.ENOSPC, lasting=True)


class FaultyFiles:
    """The file calls of this process below `root`, counted, and made to fail.

    Args:
        root: the directory; calls on it and on all below it count.
        fault: which call fails, and how; None only counts.
        flock_excludes: False makes `flock` succeed and exclude nobody, as on NFS 3 without locks.
        remembers_misses: seconds for which a name that was looked up and not found stays "not
            there" to this process's look-ups, whoever makes it meanwhile, as on NFS. Listings see
            it, and so does what this process makes itself.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        fault: FileFault | None = None,
        *,
        flock_excludes: bool = True,
        remembers_misses: float = 0.0,
    ) -> None:
        # As descriptors name it, so that both ways to reach a file are recognised.
        self.root = os.path.realpath(root)
        self.fault = fault
        self.calls: list[tuple[str, str]] = []
        """Name and path of each call so far."""
        self.injected: list[tuple[str, str]] = []
        """Those that were made to fail."""
        self._flock_excludes = flock_excludes
        self._remembers = remembers_misses
        self._misses: dict[str, float] = {}
        self._lock = threading.RLock()
        self._real: dict[tuple[Any, str], Any] = {}
        self._inside = threading.local()

    # -- in and out -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        for name in ("write", "fsync", "copy_file_range", "sendfile", "preadv", "read"):
            self._patch(os, name, self._on_descriptor)
        for name in ("stat", "lstat", "listdir", "scandir", "mkdir", "rmdir", "unlink", "remove"):
            self._patch(os, name, self._on_path)
        for name in ("rename", "replace", "link"):
            self._patch(os, name, self._on_two_paths)
        self._patch(os, "open", self._on_open)
        self._patch(io, "open", self._on_io_open)
        self._patch(builtins, "open", self._on_io_open)
        self._patch(fcntl, "flock", self._on_flock)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for (module, name), real in self._real.items():
            setattr(module, name, real)
        self._real.clear()

    def _patch(self, module: Any, name: str, make: Callable[[str, Any], Any]) -> None:
        real = getattr(module, name, None)
        if real is not None:
            self._real[module, name] = real
            setattr(module, name, make(name, real))

    # -- the calls ------------------------------------------------------------------------------

    def _on_descriptor(self, name: str, real: Any) -> Any:
        call = "read" if name == "preadv" else name
        # The file that is written to is the one that may be full.
        place = 1 if name == "copy_file_range" else 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = self._below(args[place])
            if path is None:
                return real(*args, **kwargs)
            short = None
            if name == "write":
                short = (args[0], bytes(args[1])[:1])
            elif name in {"copy_file_range", "sendfile"}:
                where = 2 if name == "copy_file_range" else 3
                short = (*args[:where], min(1, args[where]), *args[where + 1 :])
            return self.carry_out(
                call, path, lambda: real(*args, **kwargs), short and (real, short)
            )

        return wrapped

    def _on_path(self, name: str, real: Any) -> Any:
        call = {"lstat": "stat", "scandir": "listdir", "remove": "unlink"}.get(name, name)

        def wrapped(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            where = self._below(path, kwargs.get("dir_fd"))
            if where is None:
                return real(path, *args, **kwargs)
            look = call == "stat" and not isinstance(path, int)
            return self.carry_out(
                call, where, lambda: real(path, *args, **kwargs), look=look, makes=call == "mkdir"
            )

        return wrapped

    def _on_two_paths(self, name: str, real: Any) -> Any:
        call = "link" if name == "link" else "rename"

        def wrapped(src: Any, dst: Any, **kwargs: Any) -> Any:
            where = self._below(dst, kwargs.get("dst_dir_fd"))
            where = where or self._below(src, kwargs.get("src_dir_fd"))
            if where is None:
                return real(src, dst, **kwargs)
            return self.carry_out(call, where, lambda: real(src, dst, **kwargs), makes=True)

        return wrapped

    def _on_open(self, _name: str, real: Any) -> Any:
        def wrapped(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            where = self._below(path, kwargs.get("dir_fd"))
            if where is None:
                return real(path, flags, *args, **kwargs)
            creates = bool(flags & os.O_CREAT)
            return self.carry_out(
                "create" if creates else "open",
                where,
                lambda: real(path, flags, *args, **kwargs),
                look=not creates,
                makes=creates,
            )

        return wrapped

    def _on_io_open(self, _name: str, real: Any) -> Any:
        def wrapped(
            file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any
        ) -> Any:
            where = self._below(file)
            if where is None or (isinstance(file, int) and mode != "rb"):
                return real(file, mode, buffering, *args, **kwargs)
            if isinstance(file, int):
                raw = _Reading(file, self, where)
                return raw if buffering == 0 else io.BufferedReader(raw)
            creates = any(letter in mode for letter in "wax+")
            return self.carry_out(
                "create" if creates else "open",
                where,
                lambda: real(file, mode, buffering, *args, **kwargs),
                look=not creates,
                makes=creates,
            )

        return wrapped

    def _on_flock(self, _name: str, real: Any) -> Any:
        def wrapped(file: Any, operation: int) -> Any:
            descriptor = file if isinstance(file, int) else file.fileno()
            if self._flock_excludes or self._below(descriptor) is None:
                return real(file, operation)
            return None

        return wrapped

    # -- one call -------------------------------------------------------------------------------

    def _below(self, path: Any, directory: int | None = None) -> str | None:
        """The path when it is the root or below it; None for any other."""
        if getattr(self._inside, "busy", False):
            return None  # Python's own modules call each other; what is asked for counts once
        try:
            if isinstance(path, int):
                text = os.readlink(f"/proc/self/fd/{path}")
            else:
                text = os.fsdecode(path)
                if directory is not None and not os.path.isabs(text):
                    text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
                text = os.path.abspath(text)
        except (OSError, TypeError):
            return None
        return text if text == self.root or text.startswith(self.root + os.sep) else None

    def carry_out(
        self,
        call: str,
        path: str,
        real: Callable[[], Any],
        short: tuple[Any, tuple[Any, ...]] | None = None,
        *,
        look: bool = False,
        makes: bool = False,
    ) -> Any:
        """One call, counted, and failed when its turn has come. For this module's own use."""
        fault = self._turn(call, path)
        if fault is not None and not fault.done and not fault.short:
            self._end(fault, path)
        self._inside.busy = True
        try:
            if fault is not None and fault.short and short is not None:
                answer = short[0](*short[1])
            else:
                answer = self._look_or_do(call, path, real, look=look, makes=makes)
        finally:
            self._inside.busy = False
        if fault is not None and fault.done:
            self._end(fault, path)
        return answer

    def _look_or_do(
        self, call: str, path: str, real: Callable[[], Any], *, look: bool, makes: bool
    ) -> Any:
        if look and self._missed(path):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            answer = real()
        except FileNotFoundError:
            if look and self._remembers:
                self._misses.setdefault(path, time.monotonic())
            raise
        if makes:
            self._misses.pop(path, None)
        elif call == "listdir":
            for missed in [m for m in self._misses if os.path.dirname(m) == path]:
                self._misses.pop(missed, None)
        return answer

    def _missed(self, path: str) -> bool:
        since = self._misses.get(path)
        if since is None:
            return False
        if time.monotonic() - since < self._remembers:
            return True
        self._misses.pop(path, None)
        return False

    def _turn(self, call: str, path: str) -> FileFault | None:
        with self._lock:
            self.calls.append((call, path))
            fault, number = self.fault, len(self.calls)
            if fault is None or number < fault.at:
                return None
            if (call not in _GROWING) if fault.lasting else number > fault.at:
                return None
            self.injected.append((call, path))
            return fault

    def _end(self, fault: FileFault, path: str) -> None:
        if fault.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(fault.error, os.strerror(fault.error), path)


class _Reading(io.FileIO):
    """A file opened for reading, whose reads are calls too."""

    def __init__(self, descriptor: int, files: FaultyFiles, path: str) -> None:
        super().__init__(descriptor, "rb")
        self._counted = functools.partial(files.carry_out, "read", path)

    def readinto(self, buffer: Any) -> Any:
        return self._counted(lambda: super(_Reading, self).readinto(buffer))

    def read(self, size: int | None = -1, /) -> Any:
        return self._counted(lambda: super(_Reading, self).read(-1 if size is None else size))

    def readall(self) -> Any:
        return self._counted(lambda: super(_Reading, self).readall())

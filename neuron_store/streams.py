"""Copying and digesting bytes without holding a file in memory, and without following links."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import io
import itertools
import os
import queue
import shutil
import stat
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, BinaryIO, Self, cast

import attrs

from neuron_store.errors import ArtifactCorrupt, InvalidArtifact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from neuron_store.artifact import ArtifactFile

__all__ = [
    "CHUNK",
    "copy_stream",
    "create_below",
    "create_file",
    "digest_stream",
    "empty_directory",
    "open_regular",
    "paced",
    "read_small",
    "require_empty",
    "sizes_below",
    "start_writing",
    "write_all",
    "write_file",
]

CHUNK = 4 << 20
# Below this, starting a thread costs more than hashing beside the writing saves.
_THREADED = 16 << 20
_STRIDE = 8 << 20
# Other file systems, kernels before 5.3, and files that the call does not take.
_NOT_IN_KERNEL = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A read-only descriptor of a regular file; links, devices and pipes are refused.

    Raises:
        InvalidArtifact: something else is there.
        OSError: as `os.open`.
    """
    # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if os.path.islink(path):
            raise InvalidArtifact(str(path), "a symbolic link; links are refused") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArtifact(str(path), "not a regular file; devices and pipes are refused")
    return descriptor


def read_small(path: str | os.PathLike[str], limit: int) -> bytes:
    """The first `limit` bytes of a regular file; raises as `open_regular`."""
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def create_file(path: str | os.PathLike[str]) -> int:
    """A descriptor of a new file, to write and read; never one that exists, nor through a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def create_below(directory: Path, name: str) -> int:
    """`create_file` of one file of an artifact; folders that its checked name needs are made."""
    if "/" in name:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
    return create_file(f"{directory}/{name}")


def write_file(directory: Path, name: str, data: bytes) -> None:
    """A new file of an artifact from bytes that are in memory; raises `OSError`."""
    descriptor = create_below(directory, name)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)


def require_empty(directory: Path) -> None:
    """Refuse to fetch into anything but an existing empty directory: nothing of yours is touched.

    Raises:
        InvalidArtifact: it is missing, no directory, or holds something.
    """
    try:
        with os.scandir(directory) as entries:
            if next(entries, None) is None:
                return
    except OSError as error:
        reason = f"{error.strerror}; make an empty directory to fetch into"
        raise InvalidArtifact(str(directory), reason) from error
    raise InvalidArtifact(str(directory), "not empty; fetch into an empty directory")


def empty_directory(directory: Path) -> None:
    """Remove what an attempt left in a directory that was empty before it, if that is still there.

    Where locks exclude nobody, a collector may have taken a slow attempt's directory for garbage.
    """
    try:
        found = list(directory.iterdir())
    except FileNotFoundError:
        return
    for left in found:
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def sizes_below(directory: str | os.PathLike[str]) -> tuple[int, int]:
    """Bytes of the files below a directory, by their lengths and by their blocks on the disk.

    Links count themselves. What vanishes meanwhile, or may not be looked at, does not count.
    """
    length = blocks = 0
    folders: list[str | os.PathLike[str]] = [directory]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                found = list(entries)
        except OSError:
            continue
        for entry in found:
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    status = entry.stat(follow_symlinks=False)
                    length += status.st_size
                    blocks += status.st_blocks * 512
            except OSError:
                continue
    return length, blocks


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; a short write (a full disk gives one) is gone on with."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_pace: ContextVar[Callable[[int], object] | None] = ContextVar("neuron_store_pace", default=None)


@contextmanager
def paced(pace: Callable[[int], object] | None) -> Iterator[None]:
    """In this thread, call `pace` with the bytes of each piece that `digest_stream` reads.

    It holds the reading back by taking its time. None: no pace.
    """
    token = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(token)


def digest_stream(stream: BinaryIO, limit: int | None = None) -> tuple[int, str]:
    """Bytes and sha256 (hex) of a stream; stops one chunk past `limit`."""
    buffer = memoryview(bytearray(CHUNK if limit is None else min(CHUNK, limit + 1)))
    digest, size = hashlib.sha256(), 0
    pace = _pace.get()
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # every binary stream has it
        digest.update(buffer[:count])
        size += count
        if pace is not None:
            pace(count)
        if limit is not None and size > limit:
            break
    return size, digest.hexdigest()


def copy_stream(
    stream: BinaryIO,
    into: Path,
    file: ArtifactFile,
    *,
    key: str,
    location: str,
    early: bool = False,
) -> ArtifactFile:
    """Write one file of an artifact below `into`, checking size and digest as the bytes pass.

    Args:
        stream: where the bytes come from.
        into: directory of the artifact; folders that the file's name needs are made.
        file: what the record says; a missing digest is filled in.
        key: named in errors.
        location: named in errors: where the bytes come from.
        early: the caller will flush the file, so the disk may begin on it at once.

    Raises:
        ArtifactCorrupt: the bytes are not the recorded ones.
        OSError: the disk's own trouble.
    """
    descriptor = create_below(into, file.name)
    try:
        size, digest = _pump(stream, descriptor, file.size, early=early)
    finally:
        os.close(descriptor)
    if size != file.size:
        what = "more than" if size > file.size else f"{size} of"
        raise ArtifactCorrupt(key, location, f"{file.name} has {what} {file.size} bytes")
    if file.sha256 is not None and digest != file.sha256:
        raise ArtifactCorrupt(
            key, location, f"{file.name} has sha256 {digest}, the record says {file.sha256}"
        )
    return attrs.evolve(file, sha256=digest)


def _pump(stream: BinaryIO, descriptor: int, expected: int, *, early: bool) -> tuple[int, str]:
    if expected < _THREADED:
        return _pump_small(stream, descriptor, expected)
    with _Digester(descriptor) as digester:
        size = _pump_in_kernel(stream, descriptor, expected, digester, early=early)
        if size is None:
            size = _pump_buffers(stream, descriptor, expected, digester, early=early)
    return size, digester.hexdigest()


def _pump_small(stream: BinaryIO, descriptor: int, expected: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(min(CHUNK, expected + 1)))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # every binary stream has it
        size += count
        if size > expected:
            break
        digest.update(buffer[:count])
        write_all(descriptor, buffer[:count])
    return size, digest.hexdigest()


def _pump_in_kernel(
    stream: BinaryIO, descriptor: int, expected: int, digester: _Digester, *, early: bool
) -> int | None:
    """Copy from file to file inside the kernel; None where this pair of files cannot."""
    if not isinstance(stream, io.FileIO):
        return None
    source, size = stream.fileno(), 0
    while size <= expected:
        try:
            count = os.copy_file_range(source, descriptor, _STRIDE)
        except OSError as error:
            if size == 0 and error.errno in _NOT_IN_KERNEL:
                return None
            raise
        if not count:
            break
        # What is digested is what was written, read back from the page cache.
        digester.add_range(size, count)
        if early:
            start_writing(descriptor, size, count)
        size += count
    return size


def _pump_buffers(
    stream: BinaryIO, descriptor: int, expected: int, digester: _Digester, *, early: bool
) -> int:
    size = 0
    # At most two are waiting or being digested, so a third may be filled.
    for buffer in itertools.cycle([memoryview(bytearray(CHUNK)) for _ in range(3)]):
        count: int = stream.readinto(buffer)  # type: ignore[attr-defined]  # every binary stream has it
        size += count
        if not count or size > expected:
            break
        digester.add(buffer[:count])
        write_all(descriptor, buffer[:count])
        if early:
            start_writing(descriptor, size - count, count)
    return size


class _Digester:
    """Digests on a second core while the next piece is read and written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._pieces: queue.Queue[memoryview | tuple[int, int] | None] = queue.Queue(1)
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="neuron_store-digest", daemon=True)

    def __enter__(self) -> Self:
        self._worker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pieces.put(None)
        self._worker.join()
        if error is None and self._error is not None:
            raise self._error

    def add(self, piece: memoryview) -> None:
        """Digest these bytes next; they must stay as they are for two more calls."""
        self._pieces.put(piece)

    def add_range(self, offset: int, count: int) -> None:
        """Digest these bytes of the file next."""
        self._pieces.put((offset, count))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _work(self) -> None:
        buffer = memoryview(bytearray(CHUNK))
        while (piece := self._pieces.get()) is not None:
            if self._error is not None:
                continue
            try:
                if isinstance(piece, memoryview):
                    self._digest.update(piece)
                else:
                    self._digest_range(buffer, *piece)
            except BaseException as error:  # noqa: BLE001  (raised again by the owner)
                self._error = error

    def _digest_range(self, buffer: memoryview, offset: int, count: int) -> None:
        end = offset + count
        while offset < end:
            got = os.preadv(self._descriptor, [buffer[: min(CHUNK, end - offset)]], offset)
            if not got:
                raise OSError(errno.EIO, "a file that was just written reads short")
            self._digest.update(buffer[:got])
            offset += got


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):  # not glibc on Linux
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[..., int]", call)


def start_writing(descriptor: int, offset: int, count: int) -> None:
    """Have the disk begin on these bytes now, so that the flush at the end finds less to do."""
    call = _sync_file_range()
    if call is not None:
        call(descriptor, offset, count, 2)  # SYNC_FILE_RANGE_WRITE; only a hint, so no check

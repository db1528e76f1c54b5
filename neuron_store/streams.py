"""Copying and digesting bytes without holding a file in memory, and without following links."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from typing import TYPE_CHECKING, BinaryIO

import attrs

from neuron_store.errors import ArtifactCorrupt, InvalidArtifact

if TYPE_CHECKING:
    from pathlib import Path

    from neuron_store.artifact import ArtifactFile

__all__ = ["CHUNK", "copy_stream", "create_file", "digest_stream", "open_regular", "write_all"]

CHUNK = 4 << 20
# Below this, starting a thread costs more than hashing beside the writing saves.
_THREADED = 16 << 20


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


def create_file(path: str | os.PathLike[str]) -> int:
    """A write-only descriptor of a new file; never one that exists, never through a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; a short write (a full disk gives one) is gone on with."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def digest_stream(stream: BinaryIO, limit: int | None = None) -> tuple[int, str]:
    """Bytes and sha256 (hex) of a stream; stops one chunk past `limit`."""
    buffer = memoryview(bytearray(CHUNK))
    digest, size = hashlib.sha256(), 0
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # every binary stream has it
        digest.update(buffer[:count])
        size += count
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
    sync: bool = False,
) -> ArtifactFile:
    """Write one file of an artifact below `into`, checking size and digest as the bytes pass.

    Args:
        stream: where the bytes come from.
        into: directory of the artifact; folders that the file's name needs are made.
        file: what the record says; a missing digest is filled in.
        key: named in errors.
        location: named in errors: where the bytes come from.
        sync: flush the file to the disk before returning.

    Raises:
        ArtifactCorrupt: the bytes are not the recorded ones.
        OSError: the disk's own trouble.
    """
    target = into / file.name
    if "/" in file.name:
        target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = create_file(target)
    try:
        size, digest = _pump(stream, descriptor, file.size)
        if sync:
            os.fsync(descriptor)
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


def _pump(stream: BinaryIO, descriptor: int, expected: int) -> tuple[int, str]:
    if expected >= _THREADED:
        return _pump_threaded(stream, descriptor, expected)
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(min(CHUNK, expected + 1)))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # every binary stream has it  # type: ignore[union-attr]  # BinaryIO has it too
        size += count
        if size > expected:
            break
        digest.update(buffer[:count])
        write_all(descriptor, buffer[:count])
    return size, digest.hexdigest()


def _pump_threaded(stream: BinaryIO, descriptor: int, expected: int) -> tuple[int, str]:
    """As `_pump`, hashing one chunk on a second core while the next is read and written."""
    digest, size, turn = hashlib.sha256(), 0, 0
    buffers = [memoryview(bytearray(CHUNK)) for _ in range(2)]
    todo: list[memoryview | None] = []
    ready, done = threading.Semaphore(0), threading.Semaphore(2)

    def work() -> None:
        while True:
            ready.acquire()
            piece = todo.pop(0)
            if piece is None:
                return
            digest.update(piece)
            done.release()

    worker = threading.Thread(target=work, name="neuron_store-digest", daemon=True)
    worker.start()
    try:
        while True:
            done.acquire()
            buffer = buffers[turn]
            turn ^= 1
            count = stream.readinto(buffer)  # type: ignore[attr-defined]  # every binary stream has it
            if not count:
                break
            size += count
            if size > expected:
                break
            todo.append(buffer[:count])
            ready.release()
            write_all(descriptor, buffer[:count])
    finally:
        todo.append(None)
        ready.release()
        worker.join()
    return size, digest.hexdigest()

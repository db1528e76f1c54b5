"""Bytes between a directory and an object store, in pieces, never a file as a whole in memory."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import stat
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs
import fsspec.asyn

from neuron_store.errors import ArtifactCorrupt, InvalidArtifact, TierError
from neuron_store.steps import step
from neuron_store.streams import digest_stream, open_regular
from neuron_store_backends._objects import PIECE, Objects, Pieces
from neuron_store_backends._trouble import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from neuron_store.artifact import Artifact, ArtifactFile

__all__ = [
    "IN_FLIGHT",
    "ObjectReader",
    "Vanished",
    "checked_pieces",
    "open_source",
    "read_source",
    "upload",
]

IN_FLIGHT = 8
"""Pieces in memory at once, over all files of one publish or one fetch: 64 MiB."""


def open_source(source: Path, file: ArtifactFile, key: str) -> int:
    """A descriptor of one file of the directory that is published.

    Raises:
        InvalidArtifact: a link or a device is in its place, or a folder on its way is a link.
        ArtifactCorrupt: it is missing, or of another size than the record says.
        TierError: it cannot be read.
    """
    path = source / file.name
    try:
        for folder in list(path.parents)[: file.name.count("/")]:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise InvalidArtifact(str(folder), "not a directory of its own; links are refused")
        descriptor = open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArtifactCorrupt(key, str(source), f"{file.name} is missing") from error
    except OSError as error:
        raise TierError(
            str(source), "read", f"{file.name}: {error.strerror}", key=key, code=error.errno
        ) from error
    size = os.fstat(descriptor).st_size
    if size != file.size:
        os.close(descriptor)
        raise ArtifactCorrupt(
            key, str(source), f"{file.name} has {size} bytes, the record says {file.size}"
        )
    return descriptor


def read_source(source: Path, file: ArtifactFile, key: str) -> bytes:
    """A small file of the directory that is published, whole; checked as `checked_pieces` does."""
    return b"".join(checked_pieces(source, file, key, max(file.size, 1)))


def digest_source(source: Path, file: ArtifactFile, key: str) -> ArtifactFile:
    """The file with its digest filled in; raises as `open_source` does."""
    with os.fdopen(open_source(source, file, key), "rb", buffering=0) as stream:
        size, digest = digest_stream(stream)
    if size != file.size:
        raise ArtifactCorrupt(key, str(source), f"{file.name} changed while it was read")
    return attrs.evolve(file, sha256=digest)


def checked_pieces(source: Path, file: ArtifactFile, key: str, length: int) -> Iterator[bytes]:
    """The bytes of a file that is published, `length` at a time.

    The last piece is given only when size and digest are those of the record. So an upload that
    got every piece has the right bytes, and one with wrong bytes never completes under a name
    that promises others.
    """
    with os.fdopen(open_source(source, file, key), "rb", buffering=0) as stream:
        digest, left = hashlib.sha256(), file.size
        while True:
            step("conditional.piece")
            piece = _read_full(stream, min(length, left))
            digest.update(piece)
            left -= len(piece)
            if left and len(piece) < length:
                raise ArtifactCorrupt(key, str(source), f"{file.name} became shorter while read")
            if not left:
                if stream.read(1):
                    raise ArtifactCorrupt(key, str(source), f"{file.name} grew while it was read")
                if file.sha256 is not None and digest.hexdigest() != file.sha256:
                    raise ArtifactCorrupt(
                        key,
                        str(source),
                        f"{file.name} has sha256 {digest.hexdigest()}, "
                        f"the record says {file.sha256}",
                    )
            yield piece
            if not left:
                return


def _read_full(stream: io.FileIO, length: int) -> bytes:
    parts: list[bytes] = []
    while length and (part := stream.read(length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def upload(
    objects: Objects, artifact: Artifact, source: Path, targets: list[tuple[str, ArtifactFile]]
) -> None:
    """Upload files, each to its path, several at a time in bounded memory.

    Raises what `checked_pieces` raises, and `TierError`. Files that were complete stay.
    """
    budget, slots = asyncio.Semaphore(IN_FLIGHT), asyncio.Semaphore(IN_FLIGHT)

    async def one(path: str, file: ArtifactFile) -> None:
        def make() -> Pieces:
            return Pieces(
                file.size,
                lambda length: checked_pieces(source, file, artifact.key, length),
                budget,
            )

        async with slots:
            await objects.upload(path, make, key=artifact.key)

    try:
        async with asyncio.TaskGroup() as group:
            for path, file in targets:
                group.create_task(one(path, file))
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


class Vanished(TierError):
    """An object was removed between two pieces of it."""


class ObjectReader(io.RawIOBase):
    """One object as a stream, read ahead in concurrent ranges that arrive in order.

    Args:
        objects: where it is.
        path: its full path.
        size: bytes by the record; no more than that is asked for.
        key: for messages.
        budget: bounds the pieces in memory over several readers; None: a few of its own.

    Raises:
        Missing: there is no such object (at construction).
        TierError: it cannot be read (at construction, and at each read).
    """

    def __init__(
        self,
        objects: Objects,
        path: str,
        size: int,
        *,
        key: str,
        budget: threading.Semaphore | None = None,
    ) -> None:
        super().__init__()
        self._objects = objects
        self._path = path
        self._size = size
        self._key = key
        self._budget = budget or threading.Semaphore(4)
        self._asked = 0
        self._ahead: deque[tuple[int, Future[bytes]]] = deque()
        self._piece = memoryview(b"")
        self._holding = self._ended = self._begun = False
        objects.handle()
        try:
            self._next()
        except BaseException:
            self.close()
            raise

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        if not self._piece and not self._ended:
            self._next()
        view = memoryview(target).cast("B")
        count = min(len(view), len(self._piece))
        view[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def _next(self) -> None:
        self._release()
        self._ask()
        if not self._ahead:
            self._ended = True
            return
        length, future = self._ahead.popleft()
        self._holding = True
        try:
            data = future.result()
        except Missing:
            if not self._begun:
                raise
            raise Vanished(
                self._objects.location, "read", f"{self._path} vanished while read", key=self._key
            ) from None
        self._begun = True
        # Shorter than asked for means that the object ends there: the digest check will tell.
        self._ended = len(data) < length
        self._piece = memoryview(data)

    def _ask(self) -> None:
        """Ask for pieces as far ahead as the budget allows; for one at least."""
        while self._asked < self._size:
            if not self._budget.acquire(blocking=not self._ahead):
                return
            end = min(self._asked + PIECE, self._size)
            work = self._objects.range(self._path, self._asked, end, key=self._key)
            future = asyncio.run_coroutine_threadsafe(work, fsspec.asyn.get_loop())
            self._ahead.append((end - self._asked, future))
            self._asked = end

    def _release(self) -> None:
        if self._holding:
            self._holding = False
            self._piece = memoryview(b"")
            self._budget.release()

    def close(self) -> None:
        if not self.closed:
            self._release()
            while self._ahead:
                self._ahead.popleft()[1].cancel()
                self._budget.release()
        super().close()

"""The files that a publish reads, checked as they are read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from typing import TYPE_CHECKING, Self

import attrs

from neuron_store.errors import ArtifactCorrupt, InvalidArtifact, TierError
from neuron_store.steps import step
from neuron_store.streams import digest_stream, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from neuron_store.artifact import ArtifactFile

__all__ = [
    "IN_FLIGHT",
    "InOrder",
    "Outgoing",
    "check_source",
    "checked_pieces",
    "digest_source",
    "open_source",
    "read_source",
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
    try:
        _check_folders(source, file.name)
        descriptor = open_regular(f"{source}/{file.name}")
    except OSError as error:
        raise _unreadable(source, file, key, error) from error
    size = os.fstat(descriptor).st_size
    if size != file.size:
        os.close(descriptor)
        raise _wrong_size(source, file, key, size)
    return descriptor


def check_source(source: Path, file: ArtifactFile, key: str) -> None:
    """As `open_source`, for a file that is opened later: what can be told without that."""
    path = f"{source}/{file.name}"
    try:
        _check_folders(source, file.name)
        found = os.lstat(path)
    except OSError as error:
        raise _unreadable(source, file, key, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArtifact(path, "not a regular file; links, devices and pipes are refused")
    if found.st_size != file.size:
        raise _wrong_size(source, file, key, found.st_size)


def _check_folders(source: Path, name: str) -> None:
    """Refuse a name that leads through a link."""
    path = str(source)
    for folder in name.split("/")[:-1]:
        path = f"{path}/{folder}"
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise InvalidArtifact(path, "not a directory of its own; links are refused")


def _unreadable(
    source: Path, file: ArtifactFile, key: str, error: OSError
) -> ArtifactCorrupt | TierError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ArtifactCorrupt(key, str(source), f"{file.name} is missing")
    reason = f"{file.name}: {error.strerror}"
    return TierError(str(source), "read", reason, key=key, code=error.errno)


def _wrong_size(source: Path, file: ArtifactFile, key: str, size: int) -> ArtifactCorrupt:
    reason = f"{file.name} has {size} bytes, the record says {file.size}"
    return ArtifactCorrupt(key, str(source), reason)


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
    last = max(1, -(-file.size // length)) - 1
    with Outgoing(source, file, key) as outgoing:
        for number in range(last + 1):
            piece = outgoing.piece(number, length)
            if number == last:
                outgoing.finish()
            yield piece


class InOrder:
    """A digest of pieces that are ready in any order, each added by whoever has it.

    Waiting for one's turn ends soon: those before it were begun before it.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._next = 0
        self._failed = False
        self._turn = threading.Condition()

    def add(self, number: int, chunks: Sequence[bytes]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._next == number or self._failed)
            if self._failed:
                return
        # Its turn is nobody else's, so the digest needs no lock; and others may come meanwhile.
        for chunk in chunks:
            self._digest.update(chunk)
        with self._turn:
            self._next = number + 1
            self._turn.notify_all()

    def update(self, chunk: bytes | memoryview) -> None:
        """Digest the next bytes, for one who has them all."""
        self._digest.update(chunk)

    def give_up(self) -> None:
        """A piece failed: nobody need wait any more."""
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class Outgoing:
    """One file that is uploaded, in pieces read by whoever sends them."""

    def __init__(self, source: Path, file: ArtifactFile, key: str) -> None:
        self._source = source
        self._file = file
        self._key = key
        self._digest = InOrder()
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._descriptor = open_source(self._source, self._file, self._key)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def piece(self, number: int, length: int) -> bytes:
        """Bytes of piece `number`, digested in its turn; raises `ArtifactCorrupt`, `TierError`."""
        step("conditional.piece")
        with self._reading():
            start = number * length
            data = self._read(start, min(length, self._file.size - start))
            self._digest.add(number, (data,))
        return data

    def fill(self, target: memoryview) -> None:
        """Read the whole file into `target`, of its size; digests and raises as `piece` does."""
        step("conditional.piece")
        with self._reading():
            got = 0
            while got < len(target):
                count = os.preadv(self._descriptor, [target[got:]], got)
                if not count:
                    raise self._corrupt("became shorter while read")
                got += count
            self._require_end()
            self._digest.update(target)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._digest.give_up()
            raise _unreadable(self._source, self._file, self._key, error) from error
        except BaseException:
            self._digest.give_up()
            raise

    def _read(self, start: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, start)
        while len(data) < length:
            more = os.pread(self._descriptor, length - len(data), start + len(data))
            if not more:
                raise self._corrupt("became shorter while read")
            data += more
        if start + length == self._file.size:
            self._require_end()
        return data

    def _require_end(self) -> None:
        if os.pread(self._descriptor, 1, self._file.size):
            raise self._corrupt("grew while it was read")

    def finish(self) -> str:
        """The digest of everything; raises `ArtifactCorrupt` when it is not the record's."""
        digest = self._digest.hexdigest()
        if self._file.sha256 is not None and digest != self._file.sha256:
            raise self._corrupt(f"has sha256 {digest}, the record says {self._file.sha256}")
        return digest

    def _corrupt(self, what: str) -> ArtifactCorrupt:
        return ArtifactCorrupt(self._key, str(self._source), f"{self._file.name} {what}")

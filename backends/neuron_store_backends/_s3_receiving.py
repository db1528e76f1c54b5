"""Bytes from S3: a file in concurrent ranges written in place, or an object as a stream."""

from __future__ import annotations

import io
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from neuron_store.errors import ArtifactCorrupt, TierError
from neuron_store.steps import step
from neuron_store.streams import create_below
from neuron_store_backends._attempts import Attempts
from neuron_store_backends._file_trouble import remedy
from neuron_store_backends._objects import PIECE
from neuron_store_backends._parcels import receive_parcel
from neuron_store_backends._streaming import InOrder
from neuron_store_backends._trouble import Missing, Vanished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from neuron_store.artifact import ArtifactFile
    from neuron_store_backends._objects import Objects, Parcel
    from neuron_store_backends._s3_client import S3Client
    from neuron_store_backends._s3_messages import Answer

__all__ = ["Incoming", "Reader"]

_BUFFER = 1 << 20
_MOST_SPARE = 16


class Incoming:
    """One file that is fetched, in concurrent ranges written in place."""

    def __init__(
        self, objects: Objects, path: str, file: ArtifactFile, into: Path, key: str
    ) -> None:
        self._objects = objects
        self._path = path
        self._key = key
        self._into = into
        self._digest = InOrder()
        self._descriptor: int | None = None
        self._guard = threading.Lock()
        self.file = file

    def tasks(self) -> list[Callable[[], None]]:
        """One for each piece; one at least."""
        count = max(1, -(-self.file.size // PIECE))

        def task(number: int) -> Callable[[], None]:
            def fetch() -> None:
                try:
                    self._fetch(number)
                except BaseException:
                    self._digest.give_up()
                    raise

            return fetch

        return [task(number) for number in range(count)]

    def _fetch(self, number: int) -> None:
        step("conditional.receive")
        start = number * PIECE
        stop = min(start + PIECE, self.file.size)
        descriptor = self._open()
        if stop == start:
            return
        whole = stop - start == self.file.size

        def make(client: S3Client, end: float | None) -> tuple[int, list[bytes]]:
            if whole:
                return self._receive_whole(client, end, descriptor), []
            chunks, at = list[bytes](), start
            with self._asked(client, (start, stop), end) as answer:
                while chunk := answer.read():
                    if at + len(chunk) > stop:
                        raise self._corrupt(f"more than {self.file.size}")
                    # At once: whoever watches over a slow transfer sees it by the file.
                    self._write_at(descriptor, chunk, at)
                    at += len(chunk)
                    chunks.append(chunk)
            return at, chunks

        try:
            at, chunks = self._objects.tries(
                "read", make, key=self._key, seconds=self._objects.times.stall_timeout
            )
        except Missing as error:
            raise Missing(self._path) from error
        if at != stop:
            raise self._corrupt(f"{at} of {self.file.size}")
        if not whole:
            self._digest.add(number, chunks)

    def _receive_whole(self, client: S3Client, end: float | None, descriptor: int) -> int:
        """A file of one piece: nobody to wait for, and it is digested while it is in the cache."""
        # An earlier try has digested some of it.
        self._digest = InOrder()
        at, held, since = 0, 0, time.monotonic()
        with self._asked(client, None, end) as answer, _buffer() as buffer:
            while True:
                count = answer.read_into(buffer[held:])
                held += count
                if at + held > self.file.size:
                    raise self._corrupt(f"more than {self.file.size}")
                # Each call gives Python's lock away and has to get it back: few calls, and large.
                # But whoever watches over a slow transfer sees it by the file.
                if not count or held == len(buffer) or time.monotonic() - since > _SHOWN_SECONDS:
                    self._write_at(descriptor, buffer[:held], at)
                    self._digest.update(buffer[:held])
                    at, held, since = at + held, 0, time.monotonic()
                if not count:
                    return at

    def _asked(self, client: S3Client, span: tuple[int, int] | None, end: float | None) -> Answer:
        answer = client.get(self._path, end=end, span=span)
        if span is not None and answer.status != 206 and (answer.length or 0) > span[1] - span[0]:
            with answer:
                raise TierError(
                    self._objects.location,
                    "read",
                    "the server ignores Range and sends whole objects; it cannot be used",
                    key=self._key,
                )
        return answer

    def _open(self) -> int:
        with self._guard:
            if self._descriptor is None:
                self._descriptor = create_below(self._into, self.file.name)
            return self._descriptor

    def _write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            # The disk's trouble, of which no other request helps, and no fault of the store.
            raise TierError(
                str(self._into), "write", remedy(error), key=self._key, code=error.errno
            ) from error

    def _corrupt(self, what: str) -> ArtifactCorrupt:
        return ArtifactCorrupt(
            self._key, self._objects.location, f"{self.file.name} has {what} bytes"
        )

    def finish(self) -> None:
        """Raise `ArtifactCorrupt` when its digest is not the record's."""
        digest = self._digest.hexdigest()
        if self.file.sha256 is not None and digest != self.file.sha256:
            raise ArtifactCorrupt(
                self._key,
                self._objects.location,
                f"{self.file.name} has sha256 {digest}, the record says {self.file.sha256}",
            )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class IncomingBundle:
    """Small files that are fetched in one stream."""

    def __init__(self, objects: Objects, parcel: Parcel, into: Path, key: str) -> None:
        self._objects = objects
        self._parcel = parcel
        self._into = into
        self._key = key

    def tasks(self) -> list[Callable[[], None]]:
        """One."""
        return [self._fetch]

    def _fetch(self) -> None:
        step("conditional.receive")
        path, size = self._parcel.path, self._parcel.size
        receive_parcel(
            lambda: self._objects.open(path, size, key=self._key),
            self._parcel,
            self._into,
            key=self._key,
            location=self._objects.location,
        )

    def finish(self) -> None:
        """The files were checked as they came."""

    def close(self) -> None:
        """Nothing is held."""


_SHOWN_SECONDS = 0.25
# Used again and again, the last one first: new memory costs a page fault for each 4 KiB, and what
# was used just now is in the cache.
_spare: list[memoryview] = []
os.register_at_fork(after_in_child=_spare.clear)


@contextmanager
def _buffer() -> Iterator[memoryview]:
    try:
        buffer = _spare.pop()
    except IndexError:
        buffer = memoryview(bytearray(_BUFFER))
    try:
        yield buffer
    finally:
        if len(_spare) < _MOST_SPARE:
            _spare.append(buffer)


class Reader(io.RawIOBase):
    """An object as a stream over one connection; taken up again where it broke."""

    def __init__(
        self, objects: Objects, path: str, size: int, key: str, *, start: int | None = None
    ) -> None:
        super().__init__()
        self._objects = objects
        self._path = path
        self._size = size
        self._key = key
        self._start = self._at = start or 0
        self._part = start is not None
        self._chunk = memoryview(b"")
        self._answer: Answer | None = None
        self._attempts = self._afresh()
        self._ended = size == self._at
        if not self._ended:
            self._next()

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        if not self._chunk and not self._ended:
            self._next()
        view = memoryview(target).cast("B")
        count = min(len(view), len(self._chunk))
        view[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

    def _afresh(self) -> Attempts:
        return Attempts(
            self._objects, "read", key=self._key, seconds=self._objects.times.stall_timeout
        )

    def _next(self) -> None:
        try:
            data = self._read()
        except Missing:
            if self._at == self._start:
                raise
            raise Vanished(
                self._objects.location, "read", f"{self._path} vanished while read", key=self._key
            ) from None
        # No more than the record says: the digest would not be its own.
        data = data[: self._size - self._at]
        before, self._at = self._at, self._at + len(data)
        if before // PIECE != self._at // PIECE:
            self._attempts = self._afresh()
        self._ended = not data or self._at == self._size
        self._chunk = memoryview(data)

    def _read(self) -> bytes:
        while True:
            try:
                if self._answer is None:
                    span = (self._at, self._size) if self._at or self._part else None
                    self._answer = self._objects.handle().get(
                        self._path, end=self._attempts.end, span=span
                    )
                return self._answer.read()
            except TierError:
                raise
            except Exception as error:  # noqa: BLE001  (classified)
                self._drop(error)
                pause = self._attempts.failed(error)
            time.sleep(pause)

    def _drop(self, error: BaseException | None = None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.__exit__(type(error) if error else None, error, None)

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()

"""The few requests that the conditional tiers make of an object store, with their retries.

A cloud brings its client, its precondition and its error table; deadlines, back-off, handles by
process and bounded memory are here. Every request runs on fsspec's own event loop.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import fsspec.asyn

from neuron_store.errors import NeuronStoreError, TierError
from neuron_store_backends._options import Times
from neuron_store_backends._trouble import (
    Changed,
    Exists,
    Kind,
    Missing,
    Trouble,
    backoff,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping

T = TypeVar("T")
__all__ = ["PIECE", "Blob", "Objects", "Stored"]

_log = logging.getLogger(__name__)

PIECE = 8 << 20
"""Bytes of one part or range. S3 demands 5 MiB; more only costs memory."""


@attrs.frozen
class Blob:
    """A small object, whole."""

    data: bytes
    version: str
    """ETag or generation, as the store's own precondition wants it."""


@attrs.frozen
class Stored:
    """What a listing says of an object."""

    size: int
    modified: float | None
    """Unix seconds by the store's clock."""


class Objects(abc.ABC):
    """An object store below one prefix.

    Args:
        location: for messages; never holds a secret.
        root: bucket (container) and prefix, as the fsspec file system wants it.
        times: deadlines.

    `identity` tells places apart for what was measured of them: by default the location.
    """

    def __init__(self, location: str, root: str, times: Times | None = None) -> None:
        self.location = location
        self.root = root
        self.times = times or Times()
        self.identity = location
        self._handles: dict[int, Any] = {}
        self._locks: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Under spawn a store travels to the child, which makes its own handles.
        return {**self.__dict__, "_handles": {}, "_locks": {}}

    # -- what a cloud brings --------------------------------------------------------------------

    @abc.abstractmethod
    def _connect(self) -> Any:
        """A new fsspec file system, without any cache."""

    @abc.abstractmethod
    def classify(self, error: BaseException) -> Trouble:
        """What the client's error means."""

    @abc.abstractmethod
    async def _get(self, fs: Any, path: str, limit: int) -> Blob:
        """The object, its data cut at `limit` + 1 bytes."""

    @abc.abstractmethod
    async def _create(self, fs: Any, path: str, data: bytes) -> None:
        """One request that writes only if nothing is there."""

    @abc.abstractmethod
    async def _replace(self, fs: Any, path: str, data: bytes, version: str) -> None:
        """One request that writes only if `version` is there."""

    @abc.abstractmethod
    async def _upload(self, fs: Any, path: str, pieces: Pieces) -> None:
        """Write all pieces unconditionally, nothing visible before the last one was taken.

        When `pieces` raises, nothing stays behind. Each part is tried again by `self.tries`.
        """

    async def _range(self, fs: Any, path: str, start: int, end: int) -> bytes:
        """Bytes [start, end); fewer where the object ends."""
        data: bytes = await fs._cat_file(path, start=start, end=end)  # noqa: SLF001  (fsspec's async side)
        return data

    async def _list(self, fs: Any, prefix: str) -> Mapping[str, Stored]:
        """Every object below the folder `prefix`, by full path; empty when there is none."""
        try:
            found = await fs._find(prefix, detail=True)  # noqa: SLF001  (fsspec's async side)
        except FileNotFoundError as error:
            if self.classify(error).kind is not Kind.MISSING:
                raise
            return {}
        return self.sizes(prefix, found)

    @staticmethod
    def sizes(prefix: str, found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Stored]:
        """What fsspec's `find` told, for files below `prefix`."""
        return {
            path: Stored(int(info["size"]), _modified(info))
            for path, info in found.items()
            if info.get("type") == "file" and path.startswith(prefix + "/")
        }

    async def is_there(self, fs: Any, path: str, size: int) -> bool:
        """Whether an upload ended well whose last reply was lost, or a rival's of the same bytes.

        A payload's name promises its digest, and uploads complete with the right bytes only.
        """
        found = await self._list(fs, path.rsplit("/", 1)[0])
        return path in found and found[path].size == size

    async def _remove(self, fs: Any, path: str) -> None:
        await fs._rm_file(path)  # noqa: SLF001  (fsspec's async side)

    # -- requests -------------------------------------------------------------------------------

    def read(self, path: str, limit: int, *, key: str | None = None) -> Blob | None:
        """A small object whole, None when it is not there; `TierError` when it is too large."""
        blob = self.peek(path, limit, key=key)
        if blob is not None and len(blob.data) > limit:
            raise TierError(
                self.location, "read", f"{path} is larger than {limit} bytes; not ours", key=key
            )
        return blob

    def peek(self, path: str, limit: int, *, key: str | None = None) -> Blob | None:
        """As `read`, but of an object that is too large the first `limit` + 1 bytes."""
        try:
            return self.run(lambda fs: self._get(fs, path, limit), "read", key=key)
        except Missing:
            return None
        except Changed as error:
            raise self._no_place("read", key) from error

    def create(self, path: str, data: bytes, *, key: str | None = None) -> None:
        """Write only if nothing is there.

        Raises:
            Exists: something is there; it may be our own, the reply to an earlier try being lost.
        """
        try:
            self.run(lambda fs: self._create(fs, path, data), "create", key=key)
        except Changed as error:
            raise Exists from error
        except Missing as error:
            raise self._no_place("create", key) from error

    def replace(self, path: str, data: bytes, version: str, *, key: str | None = None) -> None:
        """Write only if `version` is there.

        Raises:
            Changed: another version is there, or none; it may be our own.
        """
        try:
            self.run(lambda fs: self._replace(fs, path, data, version), "replace", key=key)
        except Missing as error:
            raise Changed from error

    def listing(self, prefix: str, *, key: str | None = None) -> Mapping[str, Stored]:
        """Every object below the folder `prefix`, by full path."""
        # A listing of a million names is many requests; each has the client's own time-out.
        try:
            return self.run(
                lambda fs: self._list(fs, prefix),
                "list",
                key=key,
                seconds=max(self.times.stall_timeout, 600.0),
            )
        except (Missing, Changed) as error:
            raise self._no_place("list", key) from error

    def remove(self, path: str, *, key: str | None = None) -> None:
        """Remove an object; nothing happens when it is not there."""
        try:
            self.run(lambda fs: self._remove(fs, path), "delete", key=key)
        except Missing:
            pass
        except Changed as error:
            raise self._no_place("delete", key) from error

    async def range(self, path: str, start: int, end: int, *, key: str | None = None) -> bytes:
        """Bytes [start, end) of an object; fewer only where the object ends there.

        Raises:
            Missing: there is no such object.
        """

        async def make(fs: Any) -> bytes:
            try:
                data = await self._range(fs, path, start, end)
            except Exception as error:
                if self.classify(error).kind is not Kind.BEYOND:
                    raise
                return b""
            if len(data) > end - start:
                raise TierError(
                    self.location,
                    "read",
                    "the server ignores Range and sends whole objects; it cannot be used",
                    key=key,
                )
            return data

        try:
            return await self.tries("read", make, key=key, seconds=self.times.stall_timeout)
        except Changed as error:
            raise self._no_place("read", key) from error

    async def upload(self, path: str, make: Callable[[], Pieces], *, key: str | None) -> None:
        """Write an object from pieces; `make` gives them anew for each try."""

        async def once(fs: Any) -> None:
            await self._upload(fs, path, make())

        # Parts have their own tries and deadlines; the whole may take as long as it is large.
        try:
            await self.tries("upload", once, key=key, seconds=None, most=2)
        except (Missing, Changed) as error:
            raise self._no_place("upload", key) from error

    def _no_place(self, operation: str, key: str | None) -> TierError:
        return TierError(
            self.location,
            operation,
            "the store answers with a refusal that has no meaning there (404 or 412); "
            "check that the bucket exists and that the endpoint is an object store's",
            key=key,
        )

    # -- tries ----------------------------------------------------------------------------------

    async def tries(
        self,
        operation: str,
        make: Callable[[Any], Awaitable[T]],
        *,
        key: str | None = None,
        seconds: float | None,
        most: int = 100,
    ) -> T:
        """Await what `make` gives, again and again while that can help.

        Args:
            operation: for messages.
            make: starts the request on a file system.
            key: for messages.
            seconds: what all tries together may take; None: no limit of its own.
            most: tries at most, whatever the trouble.

        Raises:
            Missing: the object is not there.
            Changed: the precondition did not hold.
            TierError: anything else that did not pass.
        """
        end = None if seconds is None else time.monotonic() + seconds
        tried, again, rebuilt = 0, dict.fromkeys(Kind, 0), False
        while True:
            tried += 1
            try:
                fs = self.handle()
                async with asyncio.timeout(None if end is None else end - time.monotonic()):
                    return await make(fs)
            except (NeuronStoreError, Missing, Changed):
                raise
            except Exception as error:  # noqa: BLE001  (each cloud's own; classified below)
                trouble = self.classify(error)
                cause = error
            if trouble.kind is Kind.MISSING:
                raise Missing from cause
            if trouble.kind is Kind.PRECONDITION:
                raise Changed from cause
            if trouble.kind is Kind.EXPIRED and not rebuilt:
                rebuilt = True
                await asyncio.to_thread(self.forget)
                continue
            again[trouble.kind] += 1
            pause = backoff(again[trouble.kind])
            late = end is not None and time.monotonic() + pause >= end
            if again[trouble.kind] > trouble.retries or late or tried >= most:
                raise refusal(trouble, self.location, operation, key=key, tries=tried) from cause
            _log.debug("%s at %s: %s; again in %.2f s", operation, self.location, trouble, pause)
            await asyncio.sleep(pause)

    def run(
        self,
        make: Callable[[Any], Awaitable[T]],
        operation: str,
        *,
        key: str | None = None,
        seconds: float | None = None,
    ) -> T:
        """`tries` from a thread that waits for the result."""
        self.handle()  # importing a client takes a second, which would hold up the loop
        limit = self.times.timeout if seconds is None else seconds
        return self.wait(self.tries(operation, make, key=key, seconds=limit))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop and wait; an interrupt of this thread cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, fsspec.asyn.get_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # -- handles --------------------------------------------------------------------------------

    def handle(self) -> Any:
        """The file system of this process. An inherited one hangs or refuses after fork."""
        pid = os.getpid()
        found = self._handles.get(pid)
        if found is not None:
            return found
        # One lock for each process: one that another thread held at the fork stays locked.
        with self._locks.setdefault(pid, threading.Lock()):
            found = self._handles.get(pid)
            if found is None:
                try:
                    found = self._connect()
                except NeuronStoreError:
                    raise
                except Exception as error:
                    raise refusal(
                        self.classify(error), self.location, "connect", key=None, tries=1
                    ) from error
                # A parent's handle stays in the table: dropping it would close its sockets.
                self._handles[pid] = found
            return found

    def forget(self) -> None:
        """Give up this process's handle; the next request makes a new one."""
        self._handles.pop(os.getpid(), None)


class Pieces:
    """The bytes of one upload, in order, at most `PIECE` at a time.

    Reading and hashing happen in a thread, so that the event loop goes on with the network.
    `budget` bounds the pieces that are in memory, over all uploads of one publish; whoever sent a
    piece calls `done`.
    """

    def __init__(
        self, size: int, source: Callable[[int], Iterator[bytes]], budget: asyncio.Semaphore
    ) -> None:
        self.size = size
        # S3 takes 10,000 parts at most.
        self.length = max(PIECE, -(-size // 10_000))
        self._source = source(self.length)
        self._budget = budget

    async def take(self) -> bytes | None:
        """The next piece; None after the last."""
        await self._budget.acquire()
        try:
            piece = await asyncio.to_thread(next, self._source, None)
        except BaseException:
            self._budget.release()
            raise
        if piece is None:
            self._budget.release()
        return piece

    def done(self) -> None:
        """A piece that was taken is sent."""
        self._budget.release()

    async def whole(self) -> bytes:
        """Every byte at once; only for what fits one piece."""
        data = await self.take() or b""
        try:
            if await asyncio.to_thread(next, self._source, None) is not None:
                raise AssertionError("more than one piece")
        finally:
            self.done()
        return data

    async def each(self, send: Callable[[int, bytes], Awaitable[T]], width: int = 4) -> list[T]:
        """Send each piece with its number (0, 1, ...), up to `width` at a time; results in order.

        When one fails, the rest are cancelled before the error is raised.
        """
        tasks: list[asyncio.Task[T]] = []
        slots = asyncio.Semaphore(width)

        def over(_task: asyncio.Task[T]) -> None:
            # A callback and not a `finally`: a task cancelled before it began runs neither.
            self.done()
            slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await slots.acquire()
                    piece = await self.take()
                    if piece is None:
                        break
                    task = group.create_task(_await(send(len(tasks), piece)))
                    task.add_done_callback(over)
                    tasks.append(task)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]


async def _await(what: Awaitable[T]) -> T:
    return await what


def _modified(info: Mapping[str, Any]) -> float | None:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, (int, float)):
            return float(value)
        if value is not None and hasattr(value, "timestamp"):
            return float(value.timestamp())
        if isinstance(value, str):
            from datetime import datetime  # noqa: PLC0415  (GCS alone answers with text)

            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None

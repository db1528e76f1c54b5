"""Object stores whose client fsspec drives on its event loop: Azure, GCS, and memory for tests.

Bytes travel in pieces, several at a time, never a file as a whole in memory.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import fsspec.asyn

from neuron_store.errors import NeuronStoreError, TierError
from neuron_store_backends._async_reader import ObjectReader
from neuron_store_backends._attempts import Attempts
from neuron_store_backends._objects import Blob, Objects, Parcel, Stored
from neuron_store_backends._parcels import read_parcel, receive_parcel
from neuron_store_backends._pieces import Pieces
from neuron_store_backends._streaming import IN_FLIGHT, checked_pieces
from neuron_store_backends._trouble import Changed, Kind, Missing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path


T = TypeVar("T")
__all__ = ["AsyncObjects"]


class AsyncObjects(Objects):
    """Objects through an fsspec file system with an asynchronous side."""

    # -- what a cloud brings --------------------------------------------------------------------

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

        When `pieces` raises, nothing stays behind. Each part is tried again by `attempt`.
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

    def _read(self, path: str, limit: int, key: str | None) -> Blob:
        return self._run("read", lambda fs: self._get(fs, path, limit), key)

    def _create_if_absent(self, path: str, data: bytes, key: str | None) -> None:
        self._run("create", lambda fs: self._create(fs, path, data), key)

    def _replace_if_same(self, path: str, data: bytes, version: str, key: str | None) -> None:
        self._run("replace", lambda fs: self._replace(fs, path, data, version), key)

    def _listing(self, prefix: str, key: str | None, seconds: float) -> Mapping[str, Stored]:
        return self._run("list", lambda fs: self._list(fs, prefix), key, seconds=seconds)

    def _delete(self, path: str, key: str | None) -> None:
        self._run("delete", lambda fs: self._remove(fs, path), key)

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
            return await self.attempt("read", make, key=key, seconds=self.times.stall_timeout)
        except Changed as error:
            raise self.no_place("read", key) from error

    # -- files ----------------------------------------------------------------------------------

    def open(
        self,
        path: str,
        size: int,
        *,
        key: str,
        start: int | None = None,
        budget: threading.Semaphore | None = None,
    ) -> BinaryIO:
        reader = ObjectReader(self, path, size, key=key, start=start, budget=budget)
        return cast("BinaryIO", reader)

    def receive(self, parcels: Sequence[Parcel], into: Path, *, key: str) -> None:
        budget = threading.Semaphore(IN_FLIGHT)

        def one(parcel: Parcel) -> None:
            stream = functools.partial(self.open, parcel.path, parcel.size, key=key, budget=budget)
            receive_parcel(stream, parcel, into, key=key, location=self.location)

        if not parcels:
            return
        # More threads than pieces would only wait for each other. Large ones first, so that the
        # last to arrive is not the longest.
        order = sorted(parcels, key=lambda parcel: -parcel.size)
        with ThreadPoolExecutor(min(IN_FLIGHT, len(parcels))) as pool:
            for _ in pool.map(one, order):
                pass

    def send(self, parcels: Sequence[Parcel], source: Path, *, key: str) -> None:
        if parcels:
            self.handle()
            self._wait(self._upload_all(parcels, source, key))

    async def _upload_all(self, parcels: Sequence[Parcel], source: Path, key: str) -> None:
        budget, slots = asyncio.Semaphore(IN_FLIGHT), asyncio.Semaphore(IN_FLIGHT)

        async def one(parcel: Parcel) -> None:
            def read(length: int) -> Iterator[bytes]:
                if parcel.is_bundle:
                    # The clouds' clients know what to do with bytes, and with little else.
                    yield read_parcel(source, parcel, key)[0][:]
                else:
                    yield from checked_pieces(source, parcel.files[0], key, length)

            async def once(fs: Any) -> None:
                await self._upload(fs, parcel.path, Pieces(parcel.size, read, budget))

            # Parts have their own tries and deadlines; the whole may take as long as it is large.
            async with slots:
                try:
                    await self.attempt("upload", once, key=key, seconds=None, most=2)
                except (Missing, Changed) as error:
                    raise self.no_place("upload", key) from error

        try:
            async with asyncio.TaskGroup() as group:
                for parcel in parcels:
                    group.create_task(one(parcel))
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__

    # -- tries ----------------------------------------------------------------------------------

    async def attempt(
        self,
        operation: str,
        make: Callable[[Any], Awaitable[T]],
        *,
        key: str | None = None,
        seconds: float | None,
        most: int = 100,
    ) -> T:
        """`tries` for what is awaited."""
        attempts = Attempts(self, operation, key=key, seconds=seconds, most=most)
        while True:
            try:
                fs = self.handle()
                async with asyncio.timeout(attempts.left):
                    return await make(fs)
            except (NeuronStoreError, Missing, Changed):
                raise
            except Exception as error:  # noqa: BLE001  (each cloud's own; classified there)
                if self.classify(error).kind is Kind.EXPIRED:
                    # What a client does when it is dropped must not wait for this loop.
                    pause = await asyncio.to_thread(attempts.failed, error)
                else:
                    pause = attempts.failed(error)
            await asyncio.sleep(pause)

    def _run(
        self,
        operation: str,
        make: Callable[[Any], Awaitable[T]],
        key: str | None,
        *,
        seconds: float | None = None,
    ) -> T:
        """`attempt` from a thread that waits for the result."""
        self.handle()  # importing a client takes a second, which would hold up the loop
        limit = self.times.timeout if seconds is None else seconds
        return self._wait(self.attempt(operation, make, key=key, seconds=limit))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop and wait; an interrupt of this thread cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, fsspec.asyn.get_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


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

"""`memory://name`: a tier in the memory of this process, for tests. Threads only."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fsspec.implementations.memory import MemoryFileSystem

from neuron_store.errors import ConfigError
from neuron_store_backends._async_objects import AsyncObjects
from neuron_store_backends._objects import Blob
from neuron_store_backends._options import compression
from neuron_store_backends._trouble import Kind, Trouble
from neuron_store_backends.conditional import ConditionalStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from neuron_store.tier_url import TierURL
    from neuron_store_backends._objects import Stored
    from neuron_store_backends._pieces import Pieces

__all__ = ["MemoryStore"]


class MemoryObjects(AsyncObjects):
    """Objects in fsspec's memory file system.

    Everything runs on the one event loop of the process and awaits nothing between test and
    write, which is what makes its creates exclusive.
    """

    def _connect(self) -> MemoryFileSystem:
        return MemoryFileSystem(skip_instance_cache=True)

    def classify(self, error: BaseException) -> Trouble:
        if isinstance(error, FileNotFoundError):
            return Trouble(Kind.MISSING, "not there")
        if isinstance(error, FileExistsError):
            return Trouble(Kind.PRECONDITION, "exists")
        return Trouble(Kind.FATAL, f"{type(error).__name__}")

    async def _get(self, fs: Any, path: str, limit: int) -> Blob:
        data = fs.cat_file(path)
        modified = fs.info(path)["created"].timestamp()
        return Blob(data[: limit + 1], hashlib.sha256(data).hexdigest(), modified)

    async def _create(self, fs: Any, path: str, data: bytes) -> None:
        fs.pipe_file(path, data, mode="create")

    async def _replace(self, fs: Any, path: str, data: bytes, version: str) -> None:
        if hashlib.sha256(fs.cat_file(path)).hexdigest() != version:
            raise FileExistsError(path)
        fs.pipe_file(path, data)

    async def _upload(self, fs: Any, path: str, pieces: Pieces) -> None:
        data = bytearray()

        async def collect(_number: int, piece: bytes) -> None:
            data.extend(piece)

        await pieces.each(collect, width=1)
        fs.pipe_file(path, bytes(data))

    async def _range(self, fs: Any, path: str, start: int, end: int) -> bytes:
        data: bytes = fs.cat_file(path, start=start, end=end)
        return data

    async def _list(self, fs: Any, prefix: str) -> Mapping[str, Stored]:
        return self.sizes(prefix, fs.find(prefix, detail=True))

    async def _remove(self, fs: Any, path: str) -> None:
        fs.rm_file(path)


class MemoryStore(ConditionalStore):
    """Artifacts in memory; every store of the same name in the process sees the same ones.

    A forked child has its own copy: nothing is shared between processes.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        read_only: bool = False,
        compress: str | None = None,
    ) -> None:
        address = address.strip("/")
        if not address or ".." in address.split("/"):
            raise ConfigError(f"tier memory://{address}: give it a name, as in memory://tests")
        objects = MemoryObjects(f"memory://{address}", f"/neuron_store.memory/{address}")
        super().__init__(objects, name=name, read_only=read_only, compress=compress)

    @classmethod
    def from_url(cls, url: TierURL) -> MemoryStore:
        """Open the tier of a URL; raises `ConfigError` for an option that it does not know."""
        options = url.checked_options(("compress",))
        encoding = compression(options, f"tier {url.location}")
        return cls(url.address, name=url.name, read_only=url.read_only, compress=encoding)

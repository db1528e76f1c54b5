"""A tier that may be read and not written, whatever the credentials would allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, NoReturn

from neuron_store.abc import ArtifactStore, Lease, Publication, TierReport
from neuron_store.errors import ReadOnlyTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from neuron_store.artifact import Artifact

__all__ = ["ReadOnlyStore"]


class ReadOnlyStore(ArtifactStore):
    """Passes reads to `inner`; every write raises `ReadOnlyTier`."""

    def __init__(self, inner: ArtifactStore) -> None:
        self.inner = inner

    @property
    def location(self) -> str:
        return self.inner.location

    @property
    def name(self) -> str:
        return self.inner.name

    def find(self, key: str) -> Artifact | None:
        return self.inner.find(key)

    def open_file(self, key: str, name: str) -> BinaryIO:
        return self.inner.open_file(key, name)

    def keys(self) -> Iterator[str]:
        return self.inner.keys()

    def damaged(self) -> Iterator[str]:
        return self.inner.damaged()

    def fetch(self, key: str, into: Path) -> Artifact:
        return self.inner.fetch(key, into)

    def fetch_accepted(
        self, key: str, into: Path, accept: Callable[[Artifact], object]
    ) -> Artifact:
        return self.inner.fetch_accepted(key, into, accept)

    def verify(self, key: str) -> Artifact:
        return self.inner.verify(key)

    def path_of(self, key: str) -> Path | None:
        return self.inner.path_of(key)

    def locate(self, key: str) -> tuple[Path, Artifact] | None:
        return self.inner.locate(key)

    def get(self, key: str) -> Path:
        return self.inner.get(key)

    def preload(self) -> None:
        self.inner.preload()

    def close(self) -> None:
        self.inner.close()

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        del source, consume
        self._refuse("publish", artifact.key)

    def delete(self, key: str) -> bool:
        self._refuse("delete", key)

    def endorse(self, artifact: Artifact) -> bool:
        self._refuse("endorse", artifact.key)

    def set_aside(self, key: str) -> bool:
        self._refuse("set aside", key)

    def lease(self, key: str, ttl: float) -> Lease:
        del ttl
        self._refuse("lease", key)

    def collector(self) -> NoReturn:
        raise ReadOnlyTier(self.location, "gc")

    def probe(self) -> TierReport:
        """Measures latency only: anything more would write."""
        from neuron_store.probing import probe_reading  # noqa: PLC0415  (only doctor needs it)

        return probe_reading(self)

    def _refuse(self, operation: str, key: str) -> NoReturn:
        raise ReadOnlyTier(self.location, operation, key=key)

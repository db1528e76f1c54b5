"""A directory on a mount that several nodes share: NFS, FSx for Lustre, EFS, or any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_store_backends.renaming import RenamingStore

if TYPE_CHECKING:
    from neuron_store.abc import Lease
    from neuron_store_backends._lease_renaming import DirectoryLeases

__all__ = ["PosixStore"]


class PosixStore(RenamingStore):
    """A shared directory. No locks: flock does not exclude on every mount, so nothing needs it."""

    _leases: DirectoryLeases | None = None

    def lease(self, key: str, ttl: float) -> Lease:
        if self._leases is None:
            from neuron_store_backends._lease_renaming import DirectoryLeases  # noqa: PLC0415  (few ask for one)

            self._leases = DirectoryLeases(self._root, self._trouble)
        return self._leases.take(key, ttl)

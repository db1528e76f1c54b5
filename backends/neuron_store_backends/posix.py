"""A directory on a mount that several nodes share: NFS, FSx for Lustre, EFS, or any other."""

from __future__ import annotations

from neuron_store_backends.renaming import RenamingStore

__all__ = ["PosixStore"]


class PosixStore(RenamingStore):
    """A shared directory. No locks: flock does not exclude on every mount, so nothing needs it."""

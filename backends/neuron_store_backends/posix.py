"""A directory on a mount that several nodes share: NFS, FSx for Lustre, EFS, or any other."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_store.artifact import RECORD_NAME
from neuron_store.neuron_layout import MARK_NAME, has_record
from neuron_store_backends._aside import tree_facts
from neuron_store_backends.renaming import RenamingStore

if TYPE_CHECKING:
    from neuron_store.abc import Lease
    from neuron_store_backends._lease_renaming import DirectoryLeases

__all__ = ["PosixStore"]

_ABANDONED = 24 * 3600.0
_HASH = re.compile(r"[0-9a-f]{32}")


class PosixStore(RenamingStore):
    """A shared directory. No locks: flock does not exclude on every mount, so nothing needs it."""

    _leases: DirectoryLeases | None = None

    def _fault(self, key: str) -> str | None:
        return super()._fault(key) or self._lost_record(key)

    def _lost_record(self, key: str) -> str | None:
        """A damage that only a shared tier can tell: whoever fills one stages beside the entries.

        In a node's own tier the Neuron stack compiles in place, with neither record nor mark.
        """
        if not _HASH.fullmatch(key):
            return None  # `nki`, or whatever else people keep beside the entries
        path = f"{self._root}/{key}"
        try:
            if not os.path.isdir(path) or os.path.islink(path) or has_record(Path(path)):
                return None
            if os.path.lexists(f"{path}/{MARK_NAME}"):
                return None
            facts = tree_facts(path)
        except OSError:
            return None
        # A day: some point their Neuron stack itself at the share, and NFS hides for a while what
        # is there.
        if not facts.size or time.time() - facts.changed < _ABANDONED:
            return None
        return f"{RECORD_NAME} is missing, and nothing in the directory changed for a day"

    def lease(self, key: str, ttl: float) -> Lease:
        if self._leases is None:
            from neuron_store_backends._lease_renaming import DirectoryLeases  # noqa: PLC0415  (few ask for one)

            self._leases = DirectoryLeases(self._root, self._trouble)
        return self._leases.take(key, ttl)

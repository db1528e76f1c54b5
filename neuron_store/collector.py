"""What collecting garbage needs of one tier. `ArtifactStore.collector` gives it.

Apart from the interface of a store, since those who compile, fetch and promote have no use for it.
What holds for every implementation:

* Nothing that an artifact needs is garbage, nor what may soon become part of one: that is what the
  grace time is for.
* A reader meanwhile ends in a whole artifact or in a clean miss, and a publisher in a whole
  artifact, whoever is killed when.
* What was garbage when it was listed is looked at again right before it is removed.
* Two collectors at once do work twice, and no harm.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from neuron_store.abc import Lease

__all__ = ["COLLECTOR_KEY", "NOTED_EACH", "Collector", "Garbage", "Holding"]

COLLECTOR_KEY = "neuron_store-collector"
"""The key under which tiers with locks or leases keep a second collector out."""
NOTED_EACH = 60.0
"""Seconds: a process notes its use of an artifact once in so long. A collector that spares less may
take from a local tier what a process was handed this moment."""


@attrs.frozen
class Holding:
    """An artifact, whole or damaged, as a collector sees it."""

    key: str
    size: int
    """Bytes that it takes in the tier."""
    age: float | None
    """Seconds since it was published or, where the tier itself knows, last used; by the tier's
    own clock where it has one. None: the tier cannot tell."""
    frees: int | None = None
    """Bytes that removing it frees at once, where that is less than `size`: what is too young
    to be told from a publisher's stays for a later collection."""


@attrs.frozen
class Garbage:
    """Something in a tier that no artifact needs."""

    kind: str
    """What it is, in a word: `payload`, `staging`, `quarantine`, `upload`, ..."""
    name: str
    """Where it is, below the tier's root."""
    size: int
    """Bytes that removing it frees, as far as is known."""
    age: float
    """Seconds since anything in it last changed."""
    reason: str
    """Why nothing needs it, for people."""
    key: str | None = None


class Collector(abc.ABC):
    """One tier, as whoever collects its garbage sees it."""

    @abc.abstractmethod
    def exclusive(self) -> AbstractContextManager[Lease]:
        """Keep other collectors away while the block runs.

        The one before may have died: then it is waited for as long as it takes to be sure.

        Raises:
            CollectorBusy: another collector is at work.
            TierError: the tier cannot be written.
        """

    @abc.abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """Every committed entry, damaged ones too. Raises `TierError`."""

    @abc.abstractmethod
    def garbage(self, grace: float) -> Iterator[Garbage]:
        """What no artifact needs and nothing has changed for `grace` seconds. Writes nothing.

        Raises:
            TierError: the tier could not be listed.
        """

    @abc.abstractmethod
    def sweep(self, garbage: Garbage) -> int | None:
        """Remove it if it still is garbage; bytes freed, or None when it is not, or is gone.

        Raises:
            TierError: the tier could not be written.
        """

    @abc.abstractmethod
    def evict(self, holding: Holding, unused: float) -> int | None:
        """Remove the artifact; bytes freed, or None when it is gone or was not to be removed.

        Args:
            holding: as listed; an entry that was published anew since then stays.
            unused: seconds for which it must not have been used, where the tier knows of uses.

        Raises:
            TierError: the tier could not be written.
        """

    def uses(self) -> Mapping[str, float]:
        """Seconds since this node last used an artifact, by key, whatever tier it came from.

        Only a node's own tier keeps that: a hit on a shared tier writes nothing.
        """
        return {}

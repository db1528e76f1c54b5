"""Reading everything that tiers keep, and putting damaged entries right from another tier's copy.

All tiers of one key are read before anything of it is repaired, so that the copy to repair from is
one that has just been found whole. A copy is brought to scratch space and checked byte for byte
before the damaged entry is taken from its name. Whoever is killed between the two left word of it
in the progress note, and the next run that repairs brings the copy; those that only read say so.
"""

from __future__ import annotations

import collections
import functools
import logging
import shutil
import threading
import time
from typing import TYPE_CHECKING

import attrs

from neuron_store.asking import Trouble, ask
from neuron_store.errors import ArtifactNotFound, NeuronStoreError
from neuron_store.pooling import each
from neuron_store.readonly import ReadOnlyStore
from neuron_store.signing import merge_signatures, same_statement
from neuron_store.steps import step
from neuron_store.streams import paced
from neuron_store.trust import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from neuron_store.abc import ArtifactStore
    from neuron_store.artifact import Artifact
    from neuron_store.scrub_progress import ScrubProgress
    from neuron_store.tiered import TieredStore

__all__ = ["Pace", "Scrub", "Scrubbed", "by_key"]

_log = logging.getLogger(__name__)


@attrs.frozen
class Scrubbed:
    """What became of one entry."""

    tier: str
    location: str
    key: str | None
    """None: the tier as a whole is in trouble."""
    outcome: str
    """`ok`, `repaired`, `corrupt`, `missing`, `refused` (nobody trusted signed it; it was not
    read), or `error`."""
    detail: str = ""
    artifact: Artifact | None = None


class Pace:
    """Bytes a second, over all threads together."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def __call__(self, count: int) -> None:
        """Wait for as long as `count` bytes take."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            pause = self._free_at - now
        time.sleep(pause)


class Scrub:
    """One run over some entries of some tiers of a store."""

    def __init__(
        self,
        store: TieredStore,
        work: Mapping[str, Sequence[ArtifactStore]],
        *,
        progress: ScrubProgress,
        repair: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """Args: store, whose tiers repair each other; work, key to the tiers in which to read it;
        progress, what an earlier run has done, and where this one says so; repair, exchange
        damaged entries; pace, for all reading of entries.
        """
        self._store = store
        self._work = work
        self._progress = progress
        self._repair = repair
        self._pace = pace
        self.resumed = 0
        """Entries that an earlier run found whole and this one did not read."""

    def run(self, workers: int) -> Iterator[Sequence[Scrubbed]]:
        """What became of each key's entries, key by key, `workers` keys at once."""
        return each(self._key, self._work, workers=workers)

    def _key(self, key: str) -> Sequence[Scrubbed]:
        found: list[Scrubbed | None] = []
        for tier in self._work[key]:
            if self._progress.is_done(tier.location, key):
                self.resumed += 1
                found.append(None)
                continue
            seen = self._read(tier, key)
            if seen.outcome == "ok":
                self._progress.say(tier.location, key, "ok")
            found.append(seen)
        if self._repair:
            found = [
                self._mended(tier, seen, found) if seen is not None else None
                for tier, seen in zip(self._work[key], found, strict=True)
            ]
        else:
            found = [self._told(seen) if seen is not None else None for seen in found]
        return [seen for seen in found if seen is not None]

    def _read(self, tier: ArtifactStore, key: str) -> Scrubbed:
        reader = self._reader(tier)
        with paced(self._pace):
            answer = ask(tier.location, functools.partial(reader.verify, key), seconds=None)
        if not isinstance(answer, Trouble):
            return Scrubbed(tier.name, tier.location, key, "ok", artifact=answer)
        outcome = "missing" if answer.outcome == "miss" else answer.outcome
        return Scrubbed(tier.name, tier.location, key, outcome, answer.detail)

    def _reader(self, tier: ArtifactStore) -> ArtifactStore:
        return tier if tier is self._store.local else self._store.trust.reader(tier)

    def _told(self, seen: Scrubbed) -> Scrubbed:
        if not self._was_set_aside(seen):
            return seen
        detail = "a repair set it aside and did not end; verify --repair goes on with it"
        return attrs.evolve(seen, outcome="corrupt", detail=detail)

    def _was_set_aside(self, seen: Scrubbed) -> bool:
        """Whether a run that was cut off took it from its name, and brought nothing."""
        return (
            seen.outcome == "missing"
            and seen.key is not None
            and self._progress.is_damaged(seen.location, seen.key)
        )

    # -- repair ---------------------------------------------------------------------------------

    def _mended(
        self, tier: ArtifactStore, seen: Scrubbed, found: Sequence[Scrubbed | None]
    ) -> Scrubbed:
        assert seen.key is not None
        left = self._was_set_aside(seen)
        if seen.outcome != "corrupt" and not left:
            return seen
        reason = seen.detail or "an earlier run set it aside"
        if isinstance(tier, ReadOnlyStore):
            detail = f"{reason}; not repaired: the tier is read-only"
            return attrs.evolve(seen, outcome="corrupt", detail=detail)
        bad = {s.location for s in found if s is not None and s.outcome != "ok"}
        others = [t for t in self._store.tiers if t is not tier and t.location not in bad]
        read = {s.location for s in found if s is not None}
        self._progress.say(tier.location, seen.key, "damaged")
        refused: list[str] = []
        try:
            mended = self._replace(tier, seen.key, others, read=read, refused=refused)
        except NeuronStoreError as error:
            return attrs.evolve(seen, outcome="corrupt", detail=f"{reason}; not repaired: {error}")
        if mended is None:
            # It stays under its name: set aside, this would be told once and never again.
            why = f" ({'; '.join(refused)})" if refused else ""
            where = "it is gone" if left else "it is left in place"
            detail = (
                f"{reason}; beyond repair: no other tier has a copy to use{why}; {where} until the "
                "key is published again"
            )
            if not left:
                self._progress.say(tier.location, seen.key, "left")
            return attrs.evolve(seen, outcome="corrupt", detail=detail)
        artifact, source = mended
        self._progress.say(tier.location, seen.key, "repaired")
        return attrs.evolve(
            seen, outcome="repaired", detail=f"{reason}; replaced from {source}", artifact=artifact
        )

    def _replace(
        self,
        tier: ArtifactStore,
        key: str,
        others: Sequence[ArtifactStore],
        *,
        read: Collection[str],
        refused: list[str],
    ) -> tuple[Artifact, str] | None:
        """Put another tier's copy there; None when none has one that may be used.

        Args:
            tier: where the damage is.
            key: of the entry.
            others: tiers that may have a copy.
            read: locations of tiers whose entry this run has just read.
            refused: gets a word on each copy that could not be used.
        """
        damaged = _record(tier, key)
        # Of copies that differ, one that is what was there before.
        ranked = sorted(others, key=lambda other: not _same(_record(other, key), damaged))
        for other in ranked:
            place = self._store.scratch(key)
            try:
                try:
                    if other.location not in read:
                        # A fetch that meets damage takes the entry from its name; a tier that was
                        # not asked to be repaired is only read.
                        self._reader(other).verify(key)
                    artifact = self._copy(other, key, place, damaged, to=tier)
                except ArtifactNotFound:
                    continue
                except NeuronStoreError as error:
                    refused.append(str(error))
                    _log.info("no copy of %s from %s: %s", key, other.location, error)
                    continue
                # Bytes that the damaged record names are as much our own as they were.
                origin: str | None = other.location
                if damaged is not None and same_statement(damaged, artifact):
                    origin = damaged.fetched_from
                if tier is not self._store.local:
                    origin = None
                artifact = attrs.evolve(artifact, fetched_from=origin)
                step("scrub.copied")
                tier.set_aside(key)
                step("scrub.aside")
                tier.publish(artifact, place)
                step("scrub.published")
                return tier.verify(key), other.location
            finally:
                shutil.rmtree(place, ignore_errors=True)
        return None

    def _copy(
        self,
        other: ArtifactStore,
        key: str,
        place: Path,
        damaged: Artifact | None,
        *,
        to: ArtifactStore,
    ) -> Artifact:
        trust, local = self._store.trust, self._store.local
        artifact = self._reader(other).fetch(key, place)
        if damaged is not None and same_statement(damaged, artifact):
            # The damage is in the bytes; what was signed is still what these bytes are.
            artifact = merge_signatures(artifact, *damaged.signatures)
        if to is not local:
            # What was compiled here may be used here; others want a signature.
            trust.accept(artifact, other.location)
            if damaged is not None and trust.judge(damaged).outcome == "trusted":
                # What is signed is not replaced by what is not.
                TrustPolicy(trust.keys, required=True).accept(artifact, other.location)
        return artifact


def _record(tier: ArtifactStore, key: str) -> Artifact | None:
    try:
        return tier.find(key)
    except NeuronStoreError:
        return None


def _same(one: Artifact | None, other: Artifact | None) -> bool:
    if one is None or other is None or not (one.has_digests and other.has_digests):
        return False
    return one.same_bytes(other)


def by_key(pairs: Sequence[tuple[ArtifactStore, str]]) -> Mapping[str, Sequence[ArtifactStore]]:
    """The tiers in which each key is to be read, keys in the order in which they come first."""
    work: dict[str, list[ArtifactStore]] = collections.defaultdict(list)
    for tier, key in pairs:
        work[key].append(tier)
    return work

"""The store: a local tier, and behind it the shared ones in order."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import time
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import attrs

from neuron_store._once import warn_once
from neuron_store._tier_lease import first_lease
from neuron_store.abc import ArtifactStore, KeyLock, Lease, Publication, TierAnswer, TierReport
from neuron_store.artifact import Artifact, check_file_name, check_key
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ArtifactUntrusted,
    ConfigError,
    NeuronStoreError,
    TierError,
    TiersUnavailable,
)
from neuron_store.first_load import FirstLoad
from neuron_store.keeping import publish_or_keep
from neuron_store.promoting import promote_to, promotion_targets
from neuron_store.readonly import ReadOnlyStore
from neuron_store.streams import empty_directory, open_regular, require_empty, sizes_below
from neuron_store.tier_health import TierCounters, TierHealth, is_of_this_side
from neuron_store.trust import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from neuron_store.signing import Signer

__all__ = ["TieredStore"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class TieredStore(ArtifactStore):
    """Tiers in order; the first is the node's own, where artifacts are brought to and used from.

    Raises:
        ConfigError: there is no tier, or two have the same name.
    """

    def __init__(
        self,
        tiers: Sequence[ArtifactStore],
        *,
        deadline: float = 30.0,
        lock_timeout: float = 600.0,
        trust: TrustPolicy | None = None,
        signer: Signer | None = None,
        verify: str = "size",
    ) -> None:
        """Args: tiers; deadline, seconds that shared tiers in trouble may cost a key in all;
        lock_timeout, seconds that `get` waits for another process that brings the same key;
        trust, whose signatures count on what shared tiers have; signer, signs every promotion;
        verify, when digests of local artifacts are checked (`always`, `first`, `size`).
        """
        if not tiers:
            raise ConfigError("a store needs at least one tier")
        names = [tier.name for tier in tiers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"two tiers are called {name!r}; name one of them with ?name=... in its URL"
                )
        self._deadline = deadline
        self._lock_timeout = lock_timeout
        self.trust = trust if trust is not None else TrustPolicy()
        self._signer = signer
        self._loads = FirstLoad(verify)
        self._tiers = tuple(tiers)
        self._health = {tier.name: TierHealth(tier, deadline) for tier in tiers}

    @property
    def location(self) -> str:
        return " ".join(tier.location for tier in self._tiers)

    @property
    def tiers(self) -> tuple[ArtifactStore, ...]:
        """All tiers, the local one first."""
        return self._tiers

    @property
    def local(self) -> ArtifactStore:
        """The tier in which artifacts are used."""
        return self._tiers[0]

    @property
    def shared(self) -> tuple[ArtifactStore, ...]:
        """The tiers behind the local one, in the order in which they are asked."""
        return self._tiers[1:]

    @property
    def deadline(self) -> float:
        """Seconds that shared tiers in trouble may cost a key in all."""
        return self._deadline

    def counters(self) -> Mapping[str, TierCounters]:
        """Tier name to what it did for this process."""
        return {name: health.counters for name, health in self._health.items()}

    # -- reading --------------------------------------------------------------------------------

    def find(self, key: str) -> Artifact | None:
        found = self._first(key, "find", lambda tier: tier.find(key))
        return None if found is None else found[1]

    def open_file(self, key: str, name: str) -> BinaryIO:
        if self.trust.active:
            return self._open_fetched(key, check_file_name(name))
        found = self._first(key, "open", lambda tier: _open_or_none(tier, key, name))
        if found is None:
            raise ArtifactNotFound(key, self.location)
        return found[1]

    def _open_fetched(self, key: str, name: str) -> BinaryIO:
        """A stream is not checked against the digests that were signed; a fetch is."""
        try:
            return self.local.open_file(key, name)
        except (ArtifactNotFound, ArtifactCorrupt):
            path = self.get(key)
        try:
            return os.fdopen(open_regular(path / name), "rb")
        except FileNotFoundError:
            raise ArtifactNotFound(key, f"{path} (it has no file {name})") from None

    def fetch(self, key: str, into: Path) -> Artifact:
        """As everywhere; what only a shared tier has is brought to the local one on the way."""
        check_key(key)
        require_empty(into)
        try:
            return self.local.fetch(key, into)
        except (ArtifactNotFound, ArtifactCorrupt):
            empty_directory(into)
        self.get(key)
        return self.local.fetch(key, into)

    def verify(self, key: str) -> Artifact:
        found = self._first(key, "verify", lambda tier: _verify_or_none(tier, key))
        if found is None:
            raise ArtifactNotFound(key, self.location)
        return found[1]

    def path_of(self, key: str) -> Path | None:
        """The local directory; raises `ArtifactCorrupt` when its bytes were read and differ."""
        found = self.locate(key)
        return None if found is None else found[0]

    def locate(self, key: str) -> tuple[Path, Artifact] | None:
        """In the local tier; raises as `path_of`."""
        found = self.local.locate(key)
        return found if found is None or self._loads.check(self.local, *found) else None

    def keys(self) -> Iterator[str]:
        seen: set[str] = set()
        for tier in self._tiers:
            for key in tier.keys():  # noqa: SIM118  (a store is no dict)
                if key not in seen:
                    seen.add(key)
                    yield key

    def damaged(self) -> Iterator[str]:
        seen: set[str] = set()
        for tier in self._tiers:
            seen.update(tier.damaged())
        return iter(seen)

    def get(self, key: str) -> Path:
        return self.bring(key)[0]

    def bring(self, key: str) -> tuple[Path, bool]:
        """As `get`, and whether this call fetched it: it was not local, nor did another bring it.

        Raises:
            NeuronStoreError: as `get`.
        """
        check_key(key)
        path = self._local_hit(key)
        if path is not None:
            self._health[self.local.name].count(hit=1)
            return path, False
        lock: KeyLock | None = self.local.lock(key, self._lock_timeout)
        try:
            assert lock is not None
            lock.acquire()
        except TierError as error:
            # No locks on this file system: two may fetch, and publish keeps one.
            _log.debug("fetching %s without its lock: %s", key, error)
            lock = None
        try:
            path = self._local_hit(key)
            return (self._bring(key), True) if path is None else (path, False)
        finally:
            if lock is not None:
                lock.release()

    def _local_hit(self, key: str) -> Path | None:
        try:
            return self.path_of(key)
        except ArtifactCorrupt as error:
            warn_once(_log, error)
            return None

    def _bring(self, key: str) -> Path:
        """Fetch from the first shared tier that has it, and publish it locally."""
        self._health[self.local.name].count(miss=1)
        scratches: list[Path] = []
        answers = [TierAnswer(self.local.location, "miss")]

        def scratch() -> Path:
            scratches.append(self.local.scratch(key))
            return scratches[-1]

        try:
            artifact = self._fetch_shared(key, scratch, answers)
            if artifact is None:
                raise _nowhere(key, self.location, answers)
            kept = publish_or_keep(self, artifact, scratches[-1])
            if kept.in_scratch:
                scratches.pop()
            return kept.path
        finally:
            for left in scratches:
                shutil.rmtree(left, ignore_errors=True)

    def _fetch_shared(
        self, key: str, into: Callable[[], Path], answers: list[TierAnswer]
    ) -> Artifact | None:
        budget = self._deadline
        for tier in self.shared:
            health = self._health[tier.name]
            if reason := health.resting():
                answers.append(TierAnswer(tier.location, "skipped", reason))
                continue
            if budget <= 0:
                reason = f"{self._deadline:g} s were lost to other tiers for this key"
                answers.append(TierAnswer(tier.location, "skipped", reason))
                continue
            place = into()
            began = time.monotonic()
            try:
                artifact = health.run(
                    "fetch",
                    key,
                    functools.partial(self._fetch_from, tier, key, place),
                    seconds=budget,
                    progress=functools.partial(_written, place),
                )
            except ArtifactNotFound:
                health.count(miss=1)
                answers.append(TierAnswer(tier.location, "miss"))
            except ArtifactCorrupt as error:
                health.count(error=1)
                warn_once(_log, error)
                answers.append(TierAnswer(tier.location, "corrupt", error.reason))
            except ArtifactUntrusted as error:
                answers.append(self._word_of(tier, error))
            except NeuronStoreError as error:
                budget -= time.monotonic() - began
                detail = error.reason if isinstance(error, TierError) else str(error)
                if is_of_this_side(error, tier):
                    # Another tier's copy would find no place either.
                    answers.append(TierAnswer(self.local.location, "error", detail))
                    return None
                answers.append(TierAnswer(tier.location, "error", detail))
            else:
                health.count(hit=1, size=artifact.size)
                # Whatever its record says: who signs what is local must know what others made.
                return attrs.evolve(artifact, fetched_from=tier.location)
            empty_directory(place)
        return None

    def _fetch_from(self, tier: ArtifactStore, key: str, place: Path) -> Artifact:
        if not self.trust.active:
            return tier.fetch(key, place)
        return tier.fetch_accepted(key, place, self.trust.gate(tier.location))

    def _word_of(
        self, tier: ArtifactStore, error: ArtifactCorrupt | ArtifactUntrusted | TierError
    ) -> TierAnswer:
        if not isinstance(error, ArtifactUntrusted):
            return TierAnswer(tier.location, "error", error.reason)
        self._health[tier.name].count(refused=1)
        self.trust.report(error)
        return TierAnswer(tier.location, "refused", error.reason)

    def _first(
        self, key: str, operation: str, ask: Callable[[ArtifactStore], _T | None]
    ) -> tuple[ArtifactStore, _T] | None:
        """The first tier that has something; a damaged or mute one is no miss, if none has it."""
        check_key(key)
        trouble: list[NeuronStoreError] = []
        answers: list[TierAnswer] = []
        for tier in self._tiers:
            health = self._health[tier.name]
            if reason := health.resting():
                answers.append(TierAnswer(tier.location, "skipped", reason))
                continue
            try:
                if tier is self.local:
                    value = ask(tier)
                else:
                    value = health.run(
                        operation,
                        key,
                        functools.partial(ask, self.trust.reader(tier)),
                        seconds=self._deadline,
                    )
            except (ArtifactCorrupt, ArtifactUntrusted, TierError) as error:
                trouble.append(error)
                answers.append(self._word_of(tier, error))
                continue
            if value is not None:
                return tier, value
            answers.append(TierAnswer(tier.location, "miss"))
        if len(trouble) == 1 and len(self._tiers) == 1:
            raise trouble[0]
        if corrupt := [e for e in trouble if isinstance(e, ArtifactCorrupt)]:
            raise corrupt[0]
        if any(answer.outcome not in {"miss", "refused"} for answer in answers):
            raise TiersUnavailable(key, answers)
        if trouble:
            raise trouble[0]
        return None

    # -- writing --------------------------------------------------------------------------------

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        """Publish in the local tier; `promote` is what brings it to the shared ones."""
        answer = self.local.publish(artifact, source, consume=consume)
        if answer in {Publication.CREATED, Publication.REPAIRED}:
            self._loads.published(artifact.key)
        return answer

    def promote(
        self, key: str, to: str | Sequence[str] | None = None, *, signer: Signer | None = None
    ) -> Mapping[str, Publication]:
        """Publish a local artifact into the shared tiers.

        Args:
            key: the artifact's key.
            to: names of shared tiers; None: every one that is not read-only.
            signer: signs the record; None: the store's own, if it has one. Then a tier that is left
                without that signature counts as not reached.

        Returns:
            Tier name to what became of it there.

        Raises:
            ArtifactNotFound: the local tier has no complete artifact under the key.
            ArtifactCorrupt: the local artifact is damaged.
            ArtifactUntrusted: it is to be signed, and came from a shared tier without a signature
                by a trusted key or by this one.
            PromoteError: a tier could not be written. The others were done all the same.
            ConfigError: there is no such tier, or no shared tier at all.
        """
        targets = promotion_targets(self.shared, to)
        signer = signer or self._signer
        return promote_to(self.local, targets, self._health, key, signer=signer, trust=self.trust)

    def promote_in_passing(self, key: str, to: str | None = None) -> Mapping[str, Publication]:
        """As `promote`, for one who has other things to do: a tier in trouble is left out.

        What it costs then counts against what tiers in trouble may cost, as a look-up's does.

        Raises:
            NeuronStoreError: as `promote`.
        """
        targets = promotion_targets(self.shared, to)
        return promote_to(
            self.local,
            targets,
            self._health,
            key,
            signer=self._signer,
            trust=self.trust,
            in_passing=True,
        )

    def delete(self, key: str) -> bool:
        """Remove the artifact from every tier that is not read-only."""
        removed = [tier.delete(key) for tier in self._tiers if not isinstance(tier, ReadOnlyStore)]
        return any(removed)

    # -- the rest -------------------------------------------------------------------------------

    def lock(self, key: str, timeout: float) -> KeyLock:
        return self.local.lock(key, timeout)

    def scratch(self, key: str) -> Path:
        return self.local.scratch(key)

    def lease(self, key: str, ttl: float) -> Lease:
        """A lease at the first shared tier that can give one."""
        check_key(key)
        tiers = [(tier, self._health[tier.name]) for tier in self.shared]
        return first_lease(tiers, key, ttl, self._deadline)

    def probe(self) -> TierReport:
        reports = [tier.probe() for tier in self._tiers]
        checks = tuple(
            attrs.evolve(check, name=f"{report.location}: {check.name}")
            for report in reports
            for check in report.checks
        )
        return TierReport(self.location, checks, reports[0].latency)

    def preload(self) -> None:
        for tier in self._tiers:
            tier.preload()

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


def _open_or_none(tier: ArtifactStore, key: str, name: str) -> BinaryIO | None:
    try:
        return tier.open_file(key, name)
    except ArtifactNotFound:
        return None


def _verify_or_none(tier: ArtifactStore, key: str) -> Artifact | None:
    try:
        return tier.verify(key)
    except ArtifactNotFound:
        return None


def _nowhere(key: str, location: str, answers: Sequence[TierAnswer]) -> NeuronStoreError:
    if any(answer.outcome in {"error", "skipped"} for answer in answers):
        return TiersUnavailable(key, answers)
    return ArtifactNotFound(key, location, answers)


def _written(directory: Path) -> int:
    """Changes while a fetch gets on: by new files, or into a file that has its length already."""
    return sum(sizes_below(directory))

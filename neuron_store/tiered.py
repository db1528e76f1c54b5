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
from neuron_store.abc import ArtifactStore, KeyLock, Lease, Publication, TierAnswer, TierReport
from neuron_store.artifact import Artifact, check_key
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ConfigError,
    NeuronStoreError,
    PromoteError,
    ReadOnlyTier,
    TierError,
    TiersUnavailable,
    Unsupported,
)
from neuron_store.readonly import ReadOnlyStore
from neuron_store.streams import empty_directory, require_empty
from neuron_store.tier_health import TierCounters, TierHealth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

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
    ) -> None:
        """Args: tiers; deadline, seconds that shared tiers in trouble may cost a key in all;
        lock_timeout, seconds that `get` waits for another process that brings the same key.
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

    def counters(self) -> Mapping[str, TierCounters]:
        """Tier name to what it did for this process."""
        return {name: health.counters for name, health in self._health.items()}

    # -- reading --------------------------------------------------------------------------------

    def find(self, key: str) -> Artifact | None:
        found = self._first(key, "find", lambda tier: tier.find(key))
        return None if found is None else found[1]

    def open_file(self, key: str, name: str) -> BinaryIO:
        found = self._first(key, "open", lambda tier: _open_or_none(tier, key, name))
        if found is None:
            raise ArtifactNotFound(key, self.location)
        return found[1]

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
        return self.local.path_of(key)

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
        check_key(key)
        path = self._local_hit(key)
        if path is not None:
            self._health[self.local.name].count(hit=1)
            return path
        lock: KeyLock | None = self.local.lock(key, self._lock_timeout)
        try:
            assert lock is not None
            lock.acquire()
        except TierError as error:
            # No locks on this file system: two may fetch, and publish keeps one.
            _log.debug("fetching %s without its lock: %s", key, error)
            lock = None
        try:
            return self._local_hit(key) or self._bring(key)
        finally:
            if lock is not None:
                lock.release()

    def _local_hit(self, key: str) -> Path | None:
        try:
            return self.local.path_of(key)
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
            try:
                self.local.publish(artifact, scratches[-1], consume=True)
            except TierError as error:
                # What was fetched is whole and checked; a full disk must not cost the start.
                _log.warning("%s; using the fetched copy in %s", error, scratches[-1])
                return scratches.pop()
            path = self.local.path_of(key)
            return path if path is not None else scratches.pop()
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
                    functools.partial(tier.fetch, key, place),
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
            except NeuronStoreError as error:
                budget -= time.monotonic() - began
                detail = error.reason if isinstance(error, TierError) else str(error)
                answers.append(TierAnswer(tier.location, "error", detail))
            else:
                health.count(hit=1, size=artifact.size)
                return artifact
            empty_directory(place)
        return None

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
                        functools.partial(ask, tier),
                        seconds=self._deadline,
                    )
            except (ArtifactCorrupt, TierError) as error:
                trouble.append(error)
                answers.append(TierAnswer(tier.location, "error", error.reason))
                continue
            if value is not None:
                return tier, value
            answers.append(TierAnswer(tier.location, "miss"))
        if len(trouble) == 1 and len(self._tiers) == 1:
            raise trouble[0]
        if corrupt := [e for e in trouble if isinstance(e, ArtifactCorrupt)]:
            raise corrupt[0]
        if any(answer.outcome != "miss" for answer in answers):
            raise TiersUnavailable(key, answers)
        return None

    # -- writing --------------------------------------------------------------------------------

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        """Publish in the local tier; `promote` is what brings it to the shared ones."""
        return self.local.publish(artifact, source, consume=consume)

    def promote(self, key: str, to: str | Sequence[str] | None = None) -> Mapping[str, Publication]:
        """Publish a local artifact into the shared tiers.

        Args:
            key: the artifact's key.
            to: names of shared tiers; None: every one that is not read-only.

        Returns:
            Tier name to what became of it there.

        Raises:
            ArtifactNotFound: the local tier has no complete artifact under the key.
            ArtifactCorrupt: the local artifact is damaged.
            PromoteError: a tier could not be written. The others were done all the same.
            ConfigError: there is no such tier, or no shared tier at all.
        """
        targets = self._targets(to)
        artifact, path = self.local.find(key), self.local.path_of(key)
        if artifact is None or not artifact.has_digests:
            # An entry of the Neuron stack without digests of its own: what its loader would trip
            # over is no gift to a fleet. Also says why an entry that looks complete is none.
            artifact = self.local.verify(key)
        if path is None:
            raise ArtifactNotFound(key, self.local.location)
        done: dict[str, Publication] = {}
        failures: dict[str, NeuronStoreError] = {}
        for tier in targets:
            health, began = self._health[tier.name], time.monotonic()
            try:
                done[tier.name] = tier.publish(artifact, path)
            except NeuronStoreError as error:
                health.count(error=1, seconds=time.monotonic() - began)
                failures[tier.name] = error
                continue
            written = done[tier.name] in {Publication.CREATED, Publication.REPAIRED}
            health.count(size=artifact.size if written else 0, seconds=time.monotonic() - began)
            if done[tier.name] is Publication.CONFLICT:
                _log.warning(
                    "%s: %s is there with other content than the local artifact; it stays",
                    tier.location,
                    key,
                )
        if failures:
            raise PromoteError(key, failures, done)
        return done

    def _targets(self, to: str | Sequence[str] | None) -> Sequence[ArtifactStore]:
        if not self.shared:
            raise ConfigError(
                "there is no shared tier to promote to; set NEURON_STORE_TIERS or "
                "NEURON_LIBTORCH_REMOTE_CACHE"
            )
        if to is None:
            targets = [tier for tier in self.shared if not isinstance(tier, ReadOnlyStore)]
            if not targets:
                raise ReadOnlyTier(self.shared[0].location, "promote")
            return targets
        targets = []
        for wanted in [to] if isinstance(to, str) else to:
            matching = [t for t in self.shared if wanted in {t.name, t.location}]
            if not matching:
                known = ", ".join(t.name for t in self.shared)
                raise ConfigError(f"no shared tier is called {wanted!r}; there are: {known}")
            targets += matching
        return targets

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
        """A lease at the first shared tier that has leases."""
        for tier in self.shared:
            try:
                return tier.lease(key, ttl)
            except (Unsupported, ReadOnlyTier):
                continue
        raise Unsupported("lease", type(self).__name__, "no shared tier has leases")

    def probe(self) -> TierReport:
        reports = [tier.probe() for tier in self._tiers]
        checks = tuple(
            attrs.evolve(check, name=f"{report.location}: {check.name}")
            for report in reports
            for check in report.checks
        )
        return TierReport(self.location, checks, reports[0].latency)

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
    """Bytes on the disk below a directory; changes while a fetch gets on."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            total += found.st_size + found.st_blocks * 512
    return total

"""Freeing space in a tier: what nothing needs, and, where asked for, what is old or too much.

    from neuron_store.collecting import collect

    found = collect(tier, max_size=200 << 30, pinned=keys, dry_run=True)

Sees of a tier only the `Collector` that it gives. docs/gc.md says what is collected where, and
why a fetch or a publish at the same time is safe.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import attrs

from neuron_store.abc import Lease
from neuron_store.byte_sizes import human_bytes
from neuron_store.durations import human_duration
from neuron_store.errors import CollectorBusy, ConfigError, TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.collector import Collector, Garbage, Holding

__all__ = ["GRACE", "MIN_AGE", "Collected", "Removal", "collect", "freed_by"]

_log = logging.getLogger(__name__)

GRACE = 86400.0
"""Seconds without change after which leftovers are garbage. A compile writes more often."""
MIN_AGE = 3600.0
"""Seconds for which an artifact stays after its last use, or its publish, whatever is asked."""


@attrs.frozen
class Removal:
    """One thing that went, would go, or could not."""

    kind: str
    """`artifact`, or the kind of garbage."""
    name: str
    """The artifact's key, or where the garbage is below the tier's root."""
    size: int
    """Bytes freed (in a dry run: that would be)."""
    age: float | None
    """Seconds since its last use or change, as far as is known."""
    reason: str
    outcome: str
    """`removed`, `would go` (a dry run), `kept` (it was used or changed meanwhile, or was gone
    already) or `error`."""
    detail: str = ""
    key: str | None = None


@attrs.frozen
class Collected:
    """What one collection did in one tier."""

    location: str
    removals: tuple[Removal, ...]
    artifacts: int
    """Artifacts that stay."""
    size: int
    """Bytes of the artifacts that stay."""
    over: int = 0
    """Bytes that are still more than asked for: pinned, used too recently, or not removable."""

    @property
    def freed(self) -> int:
        """Bytes freed, or that would be."""
        return freed_by(self.removals)

    @property
    def complete(self) -> bool:
        """Whether all that was asked for could be done."""
        return not self.over and all(r.outcome != "error" for r in self.removals)


def freed_by(removals: Iterable[Removal]) -> int:
    """Bytes freed, or that would be."""
    return sum(r.size for r in removals if r.outcome in {"removed", "would go"})


def collect(
    store: ArtifactStore,
    *,
    older_than: float | None = None,
    max_size: int | None = None,
    pinned: Collection[str] = (),
    uses: Mapping[str, float] | None = None,
    grace: float = GRACE,
    min_age: float = MIN_AGE,
    dry_run: bool = False,
    progress: Callable[[str], None] | None = None,
    told: Callable[[Removal], object] | None = None,
) -> Collected:
    """Collect one tier's garbage, and its artifacts where a criterion asks for that.

    Args:
        store: one tier.
        older_than: artifacts go that nobody is known to have used for so many seconds. The last
            use of an artifact is the latest of its publish in this tier and what `uses` says.
        max_size: bytes; the least recently used artifacts go until the rest is no more than that.
        pinned: keys that stay whatever the criteria say.
        uses: seconds since the last use by key, as `Collector.uses` of the node's own tier tells;
            None: what this tier itself knows.
        grace: garbage goes that nothing has changed for so many seconds; tiers have a floor of
            their own for what a publisher may be about to need.
        min_age: artifacts stay for so many seconds after their last use or publish; on a local
            tier in use no less than `collector.NOTED_EACH`.
        dry_run: remove nothing and write nothing, only tell.
        progress: called with the name of each thing that is about to go.
        told: called with what became of each, at once: for whoever may be interrupted.

    Raises:
        CollectorBusy: another process collects this tier; or took it over from this one, which
            was stopped for too long. What was removed until then stays removed.
        ReadOnlyTier: the tier may not be written.
        Unsupported: the tier has no garbage collection.
        TierError: the tier could not be listed.
        ConfigError: a number makes no sense.
    """
    for name, number in (("older_than", older_than), ("grace", grace), ("min_age", min_age)):
        if number is not None and not 0 <= number < float("inf"):
            raise ConfigError(f"{name}={number!r} is not a number of seconds; give 0 or more")
    if max_size is not None and max_size < 0:
        raise ConfigError(f"max_size={max_size!r} is not a number of bytes; give 0 or more")
    collector = store.collector()
    guard = contextlib.nullcontext(_DryLease(store.location)) if dry_run else collector.exclusive()
    with guard as lease:
        run = _Run(store.location, collector, lease, dry_run=dry_run, progress=progress, told=told)
        for garbage in collector.garbage(grace):
            run.sweep(garbage)
        known = dict(collector.uses() if uses is None else uses)
        holdings = [_used(holding, known) for holding in collector.holdings()]
        stay = {h.key: h for h in holdings}
        doomed = _choose(holdings, older_than, max_size, frozenset(pinned), min_age)
        for holding, reason in doomed:
            if run.evict(holding, reason, min_age):
                del stay[holding.key]
    size = sum(h.size for h in stay.values())
    over = max(0, size - max_size) if max_size is not None else 0
    return Collected(store.location, tuple(run.done), len(stay), size, over)


def _used(holding: Holding, uses: Mapping[str, float]) -> Holding:
    ages = [age for age in (holding.age, uses.get(holding.key)) if age is not None]
    return attrs.evolve(holding, age=min(ages, default=None))


def _choose(
    holdings: Sequence[Holding],
    older_than: float | None,
    max_size: int | None,
    pinned: Collection[str],
    min_age: float,
) -> Iterator[tuple[Holding, str]]:
    """What goes, least recently used first, and why."""
    # Of what no age is known, none can be said to be old; it counts towards the size all the same.
    free = [
        (h.age, h)
        for h in holdings
        if h.key not in pinned and h.age is not None and h.age >= min_age
    ]
    left = sum(h.size for h in holdings)
    for age, holding in sorted(free, key=lambda pair: (-pair[0], pair[1].key)):
        last = f"last used or published {human_duration(age)} ago"
        if older_than is not None and age >= older_than:
            yield holding, f"{last}; older than {human_duration(older_than)}"
        elif max_size is not None and left > max_size:
            yield holding, f"{last}; {human_bytes(left)} are more than {human_bytes(max_size)}"
        else:
            break
        left -= holding.size


class _DryLease(Lease):
    def __init__(self, location: str) -> None:
        self._location = location

    @property
    def location(self) -> str:
        return self._location

    def held(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing was claimed."""


class _Run:
    """Removes one thing after the other while the tier is ours, and notes what became of each."""

    def __init__(
        self,
        location: str,
        collector: Collector,
        lease: Lease,
        *,
        dry_run: bool,
        progress: Callable[[str], None] | None,
        told: Callable[[Removal], object] | None,
    ) -> None:
        self._location = location
        self._collector = collector
        self._lease = lease
        self._dry_run = dry_run
        self._progress = progress
        self._told = told
        self.done: list[Removal] = []

    def sweep(self, garbage: Garbage) -> None:
        planned = Removal(
            garbage.kind,
            garbage.name,
            garbage.size,
            garbage.age,
            garbage.reason,
            "would go",
            key=garbage.key,
        )
        self._do(planned, lambda: self._collector.sweep(garbage))

    def evict(self, holding: Holding, reason: str, min_age: float) -> bool:
        """Whether it went, or would."""
        planned = Removal(
            "artifact",
            holding.key,
            holding.size if holding.frees is None else holding.frees,
            holding.age,
            reason,
            "would go",
            key=holding.key,
        )
        done = self._do(planned, lambda: self._collector.evict(holding, min_age))
        return done.outcome in {"would go", "removed"}

    def _do(self, planned: Removal, remove: Callable[[], int | None]) -> Removal:
        if self._progress is not None:
            self._progress(planned.name)
        done = planned if self._dry_run else self._done(planned, remove)
        self.done.append(done)
        if self._told is not None:
            self._told(done)
        return done

    def _done(self, planned: Removal, remove: Callable[[], int | None]) -> Removal:
        if not self._lease.held():
            raise CollectorBusy(self._location, "it took over from this one, which had stopped")
        try:
            freed = remove()
        except TierError as error:
            # The rest may still be removable; the tier as a whole failing shows in every line.
            _log.debug("%s", error)
            return attrs.evolve(planned, size=0, outcome="error", detail=error.reason)
        outcome = "kept" if freed is None else "removed"
        return attrs.evolve(planned, size=freed or 0, outcome=outcome)

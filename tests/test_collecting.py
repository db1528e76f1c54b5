"""What is chosen to go, seen through the interface alone."""

from __future__ import annotations

import attrs
import pytest

from neuron_store.abc import ArtifactStore, Lease
from neuron_store.collecting import collect
from neuron_store.collector import Collector, Garbage, Holding
from neuron_store.errors import (
    CollectorBusy,
    ConfigError,
    ReadOnlyTier,
    TierError,
    Unsupported,
)
from neuron_store.readonly import ReadOnlyStore
from neuron_store.tiered import TieredStore
from neuron_store_backends.memory import MemoryStore

DAY = 86400.0


class Held(Lease):
    def __init__(self) -> None:
        self.good = True
        self.released = False

    @property
    def location(self):
        return "recorded"

    def held(self):
        return self.good

    def release(self):
        self.released = True


@attrs.define
class Recorded(Collector):
    """A collector of made-up findings that records what it was told to remove."""

    found: list = attrs.field(factory=list)
    rubbish: list = attrs.field(factory=list)
    failing: set = attrs.field(factory=set)
    used: set = attrs.field(factory=set)
    known: dict = attrs.field(factory=dict)
    removed: list = attrs.field(factory=list)
    lease: Held = attrs.field(factory=Held)
    entered: int = 0

    def exclusive(self):
        self.entered += 1
        return self.lease

    def holdings(self):
        yield from self.found

    def garbage(self, grace):
        yield from (g for g in self.rubbish if g.age >= grace)

    def sweep(self, garbage):
        return self._remove(garbage.name, garbage.size)

    def evict(self, holding, unused):
        return self._remove(holding.key, holding.size)

    def _remove(self, name, size):
        if name in self.failing:
            raise TierError("there", "gc", "no right to remove it")
        if name in self.used:
            return None
        self.removed.append(name)
        return size

    def uses(self):
        return self.known


class Tier(ArtifactStore):
    location = "there"

    def __init__(self, collector):
        self._collector = collector

    def collector(self):
        return self._collector

    find = open_file = publish = keys = delete = None


def held(**ages):
    return [Holding(key, 100, None if days is None else days * DAY) for key, days in ages.items()]


def run(collector, **how):
    return collect(Tier(collector), **how)


def gone(found, outcome="removed"):
    return [r.name for r in found.removals if r.outcome == outcome]


def test_without_a_criterion_only_garbage_goes():
    garbage = Garbage("staging", ".staging/x", 7, 2 * DAY, "left")
    collector = Recorded(held(a=900), [garbage, attrs.evolve(garbage, name="young", age=60.0)])
    found = run(collector)
    assert collector.removed == [".staging/x"]
    assert (found.freed, found.artifacts, found.size) == (7, 1, 100)
    assert collector.lease.released


def test_by_age_the_last_use_counts_wherever_it_is_known_from():
    collector = Recorded(held(a=40, b=40, c=10, unknown=None), known={"b": 3 * DAY})
    found = run(collector, older_than=30 * DAY)
    assert collector.removed == ["a"]
    assert "older than 30 d" in found.removals[0].reason
    collector = Recorded(held(a=40, b=40))
    run(collector, older_than=30 * DAY, uses={"a": 60.0})
    assert collector.removed == ["b"]


def test_by_size_the_least_recently_used_go_first_until_it_fits():
    collector = Recorded(held(new=1, old=30, middle=10, oldest=90))
    found = run(collector, max_size=200)
    assert collector.removed == ["oldest", "old"]
    assert (found.size, found.over, found.complete) == (200, 0, True)


def test_size_counts_what_age_takes_already():
    collector = Recorded(held(a=100, b=20, c=10))
    run(collector, older_than=50 * DAY, max_size=200)
    assert collector.removed == ["a"]


def test_pinned_and_recently_used_artifacts_stay_and_the_rest_is_told():
    """Pitfall 40: pinned keys are kept, whatever the criteria say."""
    collector = Recorded([*held(pinned=100, old=50), Holding("fresh", 100, 60.0)])
    found = run(collector, older_than=0, max_size=0, pinned=["pinned"])
    assert collector.removed == ["old"]
    assert (found.artifacts, found.over, found.complete) == (2, 200, False)


def test_a_dry_run_tells_and_claims_nothing():
    """Pitfall 40: dry run first."""
    collector = Recorded(held(a=40), [Garbage("probe", "probe/1", 3, DAY, "left")])
    found = run(collector, older_than=DAY, dry_run=True)
    assert gone(found, "would go") == ["probe/1", "a"]
    assert found.freed == 103
    assert (collector.removed, collector.entered) == ([], 0)


def test_one_that_cannot_be_removed_does_not_stop_the_others():
    collector = Recorded(held(a=40, b=41, c=42), failing={"b"}, used={"c"})
    found = run(collector, older_than=DAY)
    assert gone(found) == ["a"]
    assert gone(found, "kept") == ["c"]
    assert gone(found, "error") == ["b"]
    assert (found.artifacts, found.freed, found.complete) == (2, 100, False)


def test_a_collector_that_lost_its_claim_stops():
    collector = Recorded(held(a=40, b=41))
    collector.lease.good = False
    with pytest.raises(CollectorBusy, match="took over"):
        run(collector, older_than=DAY)
    assert collector.removed == []


@pytest.mark.parametrize(
    "how", [{"older_than": -1}, {"grace": float("nan")}, {"min_age": -0.1}, {"max_size": -1}]
)
def test_numbers_without_a_meaning_are_refused(how):
    with pytest.raises(ConfigError, match=next(iter(how))):
        run(Recorded(), **how)


def test_a_read_only_tier_refuses_and_one_that_knows_no_collection_says_so():
    with pytest.raises(ReadOnlyTier):
        collect(ReadOnlyStore(MemoryStore("gc-ro")))
    with pytest.raises(Unsupported, match="gc"):
        collect(TieredStore([MemoryStore("gc-tiered")]))

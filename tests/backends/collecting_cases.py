"""Collecting garbage on every conditional-create tier, beside readers and publishers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pytest

from neuron_store import steps
from neuron_store.abc import Publication
from neuron_store.collecting import collect
from neuron_store.collector import COLLECTOR_KEY
from neuron_store.errors import ArtifactNotFound, CollectorBusy, Unsupported
from neuron_store_backends import _guarding, _honesty, _sweeping
from neuron_store_backends._lease_record import LeaseRecord, dump_lease
from neuron_store_backends.conditional import ConditionalStore
from tests.backends.cases import CONTENTS, Place, contents_of, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from neuron_store_backends._objects import Stored

T = TypeVar("T")

ORPHAN = f"payload/orphan/{'0' * 64}/f"
PUBLISHER = (
    "conditional.begin",
    "conditional.look",
    "conditional.list",
    "conditional.upload",
    "conditional.commit",
    "conditional.committed",
    "conditional.keep",
)
SWEEPER = ("sweep.mark", "sweep.look", "sweep.list", "sweep.remove", "sweep.unmark")


def eager(place: Place) -> Any:
    """A store for which everything that no record names counts as left behind long ago."""
    store = place.store()
    store.grace = -60.0
    return store


def sweep(place: Place, **how: Any) -> Any:
    return collect(eager(place), **{"grace": 0, "min_age": 0, **how})


def once_free(attempt: Callable[[], T]) -> T:
    """`attempt`, again while the last holder's heartbeat still reaches the tier.

    A holder that was killed or stopped had perhaps sent one, which makes it look alive once.
    """
    give_up = time.monotonic() + 60
    while True:
        try:
            return attempt()
        except CollectorBusy:
            if time.monotonic() > give_up:
                raise


@contextlib.contextmanager
def overtaking(store: Any) -> Iterator[Any]:
    """The collector's lease, taken from one who no longer renews it."""
    lease = once_free(store.collector().exclusive().__enter__)
    try:
        yield lease
    finally:
        lease.release()


def gone(found: Any) -> list[tuple[str, str]]:
    return sorted((r.kind, r.name) for r in found.removals if r.outcome == "removed")


class CollectingCases:
    """Subclass with a fixture `place`."""

    @pytest.fixture(autouse=True)
    def quick(self, place, monkeypatch):
        # Before, since these collectors would sweep what the measurement has just written.
        _honesty.require_create(place.store().objects)
        _honesty.replace_fault(place.store().objects)
        monkeypatch.setattr(_guarding, "TTL", 1.5)
        monkeypatch.setattr(_sweeping, "_PAUSE", 0.02)

    def test_only_garbage_goes_and_nothing_of_ours_stays_behind(self, place, artifact, source):
        """Pitfall 40: the shared store is cleaned up, dry run first."""
        place.store().publish(artifact, source)
        kept = place.paths()
        place.put(ORPHAN, b"12345")
        place.put(f"payload/k/{'1' * 64}/f", b"123")
        place.put("payload/gone/damaged", b"")
        place.put("probe/left", b"1")
        place.put("lease/left.json", b"{}")
        before = place.paths()
        planned = sweep(place, dry_run=True)
        assert place.paths() == before
        assert planned.freed == 11
        found = sweep(place)
        assert gone(found) == [
            ("lease", "lease/left.json"),
            ("payload", "payload/gone"),
            ("payload", "payload/k"),
            ("payload", "payload/orphan"),
            ("probe", "probe/left"),
        ]
        assert found.freed == planned.freed
        assert place.paths() == kept
        place.store().verify("k")

    @pytest.mark.parametrize("young", [True, False], ids=["young", "old"])
    def test_a_dry_run_tells_what_the_real_one_frees(self, place, artifact, source, young):
        """Payload may be another publisher's for an hour, though its record goes."""
        store = place.store() if young else eager(place)
        store.publish(artifact, source)
        place.put(f"payload/k/{'1' * 64}/f", b"123")
        how = {"grace": 0, "min_age": 0, "max_size": 0}
        planned, found = collect(store, dry_run=True, **how), collect(store, **how)
        expected = [(r.kind, r.name, r.size) for r in found.removals]
        assert [(r.kind, r.name, r.size) for r in planned.removals] == expected
        assert [kind for kind, *_ in expected] == (
            ["artifact"] if young else ["payload", "artifact"]
        )
        assert (planned.freed, planned.size, planned.over) == (found.freed, found.size, found.over)
        assert bool([p for p in place.paths() if p.startswith("payload/k/")]) is young

    def test_young_leftovers_stay_whatever_grace_is_asked_for(self, place, artifact, source):
        """The tier's own floor: a publisher may be about to name them."""
        place.put(ORPHAN, b"1")
        place.put("probe/now", b"1")
        assert collect(place.store(), grace=0).removals == ()
        assert ORPHAN in place.paths()

    def test_payload_of_a_record_that_cannot_be_judged_stays(self, place):
        place.put("index/torn.json", b"{")
        place.put(f"payload/torn/{'2' * 64}/f", b"1")
        before = place.paths()
        assert sweep(place).removals == ()
        assert place.paths() == before

    def test_artifacts_go_by_age_and_size_but_not_the_pinned(self, place, other, tmp_path):
        """Pitfall 40."""
        for key in ("a", "b", "pinned"):
            (tmp_path / key).mkdir()
            place.store().publish(
                fill(tmp_path / key, {"f": key.encode() * 9000}, key), tmp_path / key
            )
        uses = {"a": 500.0, "b": 100.0, "pinned": 900.0}
        with pytest.MonkeyPatch.context() as patch:
            _age_by(patch, 1000.0)
            found = sweep(place, max_size=65_000, pinned=["pinned"], uses=uses)
            assert gone(found) == [("artifact", "a")]
            assert found.over == 0
            found = sweep(place, older_than=50, pinned=["pinned"], uses=uses)
        assert gone(found) == [("artifact", "b")]
        assert list(place.store().keys()) == ["pinned"]
        place.store().verify("pinned")
        assert all("/pinned" in path for path in place.paths())

    def test_an_artifact_that_was_published_anew_stays(self, place, artifact, source):
        """It was old when it was listed; what is there now is not."""
        place.store().publish(artifact, source)
        collector = eager(place).collector()
        (listed,) = collector.holdings()
        assert collector.evict(attrs.evolve(listed, age=listed.age + 3600), 0) is None
        assert place.store().find("k") is not None

    # -- beside a publisher ---------------------------------------------------------------------

    @pytest.mark.parametrize("step", PUBLISHER)
    @pytest.mark.parametrize("there", [False, True], ids=["fresh", "payload was there"])
    def test_a_sweep_at_each_step_of_a_publish_leaves_it_whole(
        self, place, artifact, source, into, step, there
    ):
        if there:
            place.put(self.payload(artifact), CONTENTS["graph_k.neff"])
        reached = []

        def hook(name: str) -> None:
            if name == step and not reached:
                reached.append(name)
                sweep(place)

        steps.set_hook(hook)
        assert eager(place).publish(artifact, source) is Publication.CREATED
        steps.set_hook(None)
        assert reached == [step]
        self.assert_whole(place, into)

    @pytest.mark.parametrize("step", SWEEPER)
    @pytest.mark.parametrize("back", ["at once", "after a wait"])
    def test_a_publish_at_each_step_of_a_sweep_ends_whole(
        self, place, artifact, source, into, step, back
    ):
        """At each step the publisher runs as far as it gets; then the sweeper goes on."""
        place.put(self.payload(artifact), CONTENTS["graph_k.neff"])
        told: list[Any] = []
        waiting, reached = threading.Event(), []

        def publish() -> None:
            told.append(eager(place).publish(artifact, source))
            waiting.set()

        publisher = threading.Thread(target=publish)

        def hook(name: str) -> None:
            if threading.current_thread() is publisher:
                if name == ("conditional.wait" if back == "at once" else "conditional.commit"):
                    waiting.set()
                return
            if name == step and not reached:
                reached.append(name)
                publisher.start()
                assert waiting.wait(60)

        steps.set_hook(hook)
        sweep(place)
        publisher.join(60)
        steps.set_hook(None)
        assert (reached, told) == ([step], [Publication.CREATED])
        self.assert_whole(place, into)
        assert not [path for path in place.paths() if path.endswith("sweeping")]

    def test_a_publisher_does_not_wait_for_a_dead_sweeper_for_ever(
        self, place, artifact, source, into, monkeypatch
    ):
        monkeypatch.setattr(_sweeping, "DEAD_SECONDS", 0.3)
        place.put("payload/k/sweeping", b"somebody who was killed")
        place.put(self.payload(artifact), CONTENTS["graph_k.neff"])
        assert place.store().publish(artifact, source) is Publication.CREATED
        self.assert_whole(place, into)
        assert "payload/k/sweeping" not in place.paths()

    def test_a_sweeper_that_was_stopped_gives_up_and_looks_again(
        self, place, artifact, source, into, monkeypatch
    ):
        """What it saw before the stop is nothing to act upon."""
        monkeypatch.setattr(_sweeping, "SWEEP_SECONDS", 0.2)
        monkeypatch.setattr(_sweeping, "DEAD_SECONDS", 0.3)
        place.put(self.payload(artifact), CONTENTS["graph_k.neff"])
        reached = []

        def hook(name: str) -> None:
            if name == "sweep.remove" and not reached:
                reached.append(name)
                # Far longer than anybody waits for a live one.
                assert eager(place).publish(artifact, source) is Publication.CREATED

        steps.set_hook(hook)
        sweep(place)
        steps.set_hook(None)
        assert reached
        self.assert_whole(place, into)

    def test_a_second_sweeper_of_a_key_leaves_it_to_the_first(self, place):
        place.put(ORPHAN, b"1")
        told = []

        def hook(name: str) -> None:
            if name == "sweep.remove":
                steps.set_hook(None)
                told.append(_sweeping.sweep_payload(eager(place), "orphan"))
                told.append(ORPHAN in place.paths())

        steps.set_hook(hook)
        assert gone(sweep(place)) == [("payload", "payload/orphan")]
        assert told == [None, True]
        assert place.paths() == []

    def test_an_upload_that_took_long_is_looked_at_again(self, place, artifact, source, into):
        """Nothing was there before it, but by now it is as old as what is left behind."""
        store = place.store()
        store.grace = 0.4

        def hook(name: str) -> None:
            if name == "conditional.commit":
                steps.set_hook(None)
                time.sleep(0.15)
                sweep(place)

        steps.set_hook(hook)
        assert store.publish(artifact, source) is Publication.CREATED
        self.assert_whole(place, into)

    def test_one_whose_record_was_replaced_before_its_payload_was_back_does_not_say_created(
        self, place, artifact, source, other
    ):
        """Without its payload the record looked damaged to a publisher of other bytes."""
        theirs = fill(other, {**CONTENTS, "graph_k.neff": os.urandom(300_000)}, "k")
        answers = []

        def hook(name: str) -> None:
            if name == "conditional.keep":
                steps.set_hook(None)
                place.remove(self.payload(artifact))
                answers.append(place.store().publish(theirs, other))

        steps.set_hook(hook)
        assert eager(place).publish(artifact, source) is Publication.CONFLICT
        assert answers == [Publication.REPAIRED]
        assert place.store().verify("k").same_bytes(theirs)

    def test_one_who_saw_it_damaged_cannot_replace_it_once_it_is_whole(
        self, place, artifact, source, other, into
    ):
        """A CREATED that was returned stays, however long the other one took to upload."""
        theirs = fill(other, {**CONTENTS, "graph_k.neff": os.urandom(300_000)}, "k")
        answers: list[Any] = []
        saw, go_on = threading.Event(), threading.Event()
        rival = threading.Thread(
            target=lambda: answers.append(place.store().publish(theirs, other))
        )

        def hook(name: str) -> None:
            if threading.current_thread() is rival:
                if name == "conditional.replace" and not saw.is_set():
                    saw.set()
                    assert go_on.wait(60)
            elif name == "conditional.keep" and not saw.is_set():
                place.remove(self.payload(artifact))
                rival.start()
                assert saw.wait(60)

        steps.set_hook(hook)
        assert eager(place).publish(artifact, source) is Publication.CREATED
        go_on.set()
        rival.join(60)
        assert answers == [Publication.CONFLICT]
        self.assert_whole(place, into)

    # -- beside a reader ------------------------------------------------------------------------

    def test_a_fetch_under_which_the_artifact_is_collected_is_a_clean_miss(
        self, place, artifact, source, into, monkeypatch
    ):
        """No word of damage is left, and nothing is quarantined."""
        place.store().publish(artifact, source)
        store = place.store()
        real = store.objects.receive

        def receive(*args: Any, **more: Any) -> Any:
            assert eager(place).collector().evict(*_evictable(place)) is not False
            return real(*args, **more)

        monkeypatch.setattr(store.objects, "receive", receive)
        with pytest.raises(ArtifactNotFound):
            store.fetch("k", into)
        assert place.paths() == []

    def test_a_fetch_under_which_it_is_collected_and_published_again_is_whole(
        self, place, artifact, source, into, monkeypatch
    ):
        place.store().publish(artifact, source)
        store = place.store()
        real, done = store.objects.receive, []

        def receive(*args: Any, **more: Any) -> Any:
            if not done:
                done.append(1)
                eager(place).delete("k")
                store.publish(artifact, source)
                place.remove(self.payload(artifact))
                eager(place).delete("k")
                store.publish(artifact, source)
            return real(*args, **more)

        monkeypatch.setattr(store.objects, "receive", receive)
        self.assert_whole(place, into, store)
        assert "payload/k/damaged" not in place.paths()

    # -- one collector --------------------------------------------------------------------------

    def test_a_second_collector_is_told_who_is_at_work(self, place):
        """Pitfall 41: one cleans, not all at once."""
        place.put(ORPHAN, b"1")
        with eager(place).collector().exclusive() as lease:
            with pytest.raises(CollectorBusy, match=f"pid {os.getpid()} on "):
                sweep(place)
            assert lease.held()
            assert ORPHAN in place.paths()
        assert gone(sweep(place)) == [("payload", "payload/orphan")]
        assert place.paths() == []

    def test_a_dead_collector_is_taken_over_after_its_ttl(self, place):
        """Its guard did not change for a whole ttl of the newcomer's own clock."""
        dead = LeaseRecord("d" * 32, 7, 1.0, 1, "gone")
        place.put(f"lease/{COLLECTOR_KEY}.json", dump_lease(dead))
        place.put(ORPHAN, b"1")
        assert gone(sweep(place)) == [("payload", "payload/orphan")]
        assert place.paths() == []

    def test_a_collector_that_was_overtaken_finds_out(self, place):
        with eager(place).collector().exclusive() as lease:
            lease._lease._stop.set()
            with overtaking(eager(place)) as other:
                assert not lease.held()
                assert other.held()
            assert not lease.held()

    def test_a_tier_without_leases_is_collected_after_one_warning(self, place, monkeypatch, caplog):
        """A store that ignores If-Match: exclusion only saves work."""

        def refuse(self, key, ttl):
            raise Unsupported("lease", self.location, "If-Match is ignored")

        monkeypatch.setattr(ConditionalStore, "lease", refuse)
        monkeypatch.setattr(_guarding, "_said", set())
        for _ in range(2):
            place.put(ORPHAN, b"1")
            assert gone(sweep(place)) == [("payload", "payload/orphan")]
            assert place.paths() == []
        assert caplog.text.count("If-Match is ignored") == 1

    # -- helpers --------------------------------------------------------------------------------

    def payload(self, artifact: Any) -> str:
        file = artifact.file("graph_k.neff")
        digest = file.sha256 or hashlib.sha256(CONTENTS[file.name]).hexdigest()
        return f"payload/k/{digest}/{file.name}"

    def assert_whole(self, place: Place, into: Path, store: Any = None) -> None:
        (store or place.store()).fetch("k", into)
        assert contents_of(into) == CONTENTS
        place.store().verify("k")


def _evictable(place: Place) -> tuple[Any, float]:
    from neuron_store.collector import Holding

    return Holding("k", 1, None), 0.0


def _age_by(patch: Any, seconds: float) -> None:
    """Objects look so much older than they are."""
    from neuron_store_backends._collecting_objects import ObjectCollector

    real = ObjectCollector._age

    def age(self: Any, stored: Stored) -> float:
        return real(self, stored) + seconds

    patch.setattr(ObjectCollector, "_age", age)
    patch.setattr(ObjectCollector, "evict", _evict_unchecked)


def _evict_unchecked(self: Any, holding: Any, unused: float) -> int | None:
    del unused
    taken: int | None = self.store.take_away(holding.key)
    return taken

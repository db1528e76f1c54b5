"""The store of tiers: who is asked, who is skipped, what is counted, what is told."""

from __future__ import annotations

import threading
import time

import pytest

from neuron_store import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ConfigError,
    PromoteError,
    Publication,
    ReadOnlyTier,
    TieredStore,
    TierError,
    TiersUnavailable,
)
from neuron_store.readonly import ReadOnlyStore
from neuron_store.testing import make_source
from neuron_store_backends.local import LocalStore
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore

KEY = "0123456789abcdef0123456789abcdef"
FILES = {"graph.bin": b"payload" * 50}


class Broken(PosixStore):
    """Answers every question with trouble, and counts them."""

    asked = 0

    def find(self, key):
        self.asked += 1
        raise TierError(self.location, "find", "connection refused", key=key)

    def fetch(self, key, into):
        return self.find(key)

    def publish(self, artifact, source, *, consume=False):
        return self.find(artifact.key)


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source", KEY, FILES)


@pytest.fixture
def tiers(tmp_path):
    return LocalStore(tmp_path / "local"), PosixStore(tmp_path / "a"), PosixStore(tmp_path / "b")


def test_get_brings_an_artifact_from_the_first_tier_that_has_it(tiers, source):
    local, a, b = tiers
    b.publish(*source)
    store = TieredStore(tiers)
    assert store.get(KEY) == local.root / KEY
    assert (local.root / KEY / "graph.bin").read_bytes() == FILES["graph.bin"]
    assert a.find(KEY) is None
    counters = store.counters()
    assert (counters[a.name].misses, counters[b.name].hits) == (1, 1)
    assert counters[b.name].bytes == source[0].size
    assert counters[b.name].seconds > 0
    assert store.get(KEY) == local.root / KEY
    assert store.counters()[local.name].hits == 1


def test_a_miss_says_what_each_tier_answered(tiers):
    with pytest.raises(ArtifactNotFound) as caught:
        TieredStore(tiers).get(KEY)
    assert [(a.location, a.outcome) for a in caught.value.answers] == [
        (t.location, "miss") for t in tiers
    ]


def test_a_miss_is_never_remembered(tiers, source):
    """Pitfall 39."""
    store = TieredStore(tiers)
    with pytest.raises(ArtifactNotFound):
        store.get(KEY)
    tiers[2].publish(*source)
    assert store.get(KEY)


def test_trouble_is_no_miss_unless_another_tier_has_it(tiers, source, tmp_path):
    """Pitfall 24."""
    local, a, _ = tiers
    broken = Broken(tmp_path / "broken")
    store = TieredStore([local, broken, a])
    with pytest.raises(TiersUnavailable, match="connection refused"):
        store.get(KEY)
    with pytest.raises(TierError):
        store.find(KEY)
    a.publish(*source)
    assert store.find(KEY) is not None
    assert store.get(KEY)
    assert store.counters()[broken.name].errors >= 2
    assert store.counters()[broken.name].misses == 0


def test_a_scratch_directory_swept_away_meanwhile_costs_one_answer(tiers, source):
    """Found by the soak with locks that exclude nobody: gc took the fetch's directory."""
    local, a, b = tiers

    class Swept(PosixStore):
        def fetch(self, key, into):
            into.rmdir()
            return super().fetch(key, into)

    b.publish(*source)
    store = TieredStore([local, Swept(a.root), b])
    assert store.get(KEY) == local.root / KEY


def test_a_damaged_copy_is_passed_over_for_the_next_tier(tiers, source, caplog):
    """Pitfalls 5 and 27."""
    local, a, b = tiers
    a.publish(*source)
    b.publish(*source)
    (a.root / KEY / "graph.bin").write_bytes(b"x" * source[0].size)
    assert TieredStore(tiers).get(KEY) == local.root / KEY
    assert "damaged" in caplog.text
    assert local.verify(KEY)


def test_when_every_copy_is_damaged_it_is_a_miss_that_says_so(tiers, source):
    _, a, _ = tiers
    a.publish(*source)
    (a.root / KEY / "graph.bin").write_bytes(b"")
    with pytest.raises(ArtifactNotFound) as caught:
        TieredStore(tiers).get(KEY)
    assert [answer.outcome for answer in caught.value.answers] == ["miss", "corrupt", "miss"]


def test_a_tier_that_keeps_failing_is_left_alone_and_comes_back(
    tiers, source, tmp_path, monkeypatch
):
    local, a, _ = tiers
    broken = Broken(tmp_path / "broken")
    store = TieredStore([local, broken, a])
    for n in range(20):
        with pytest.raises(TiersUnavailable):
            store.get(f"{n:032x}")
    assert broken.asked == 3
    monkeypatch.setattr("neuron_store.tier_health._FIRST_REST", 0.0)
    store._health[broken.name]._rest = 0.0
    monkeypatch.setattr(Broken, "find", PosixStore.find)
    monkeypatch.setattr(Broken, "fetch", PosixStore.fetch)
    PosixStore(broken.root).publish(*source)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            assert store.get(KEY)
            break
        except (TiersUnavailable, ArtifactNotFound):
            time.sleep(0.05)
    assert store.counters()[broken.name].hits == 1


def test_a_slow_fetch_that_gets_on_is_not_cut_off(tiers, tmp_path):
    class Slow(PosixStore):
        def fetch(self, key, into):
            artifact = super().fetch(key, into)
            for n in range(10):
                time.sleep(0.1)
                (into / f"part{n}").write_bytes(b"x" * 100)
            for n in range(10):
                (into / f"part{n}").unlink()
            return artifact

    slow = Slow(tmp_path / "slow")
    slow.publish(*make_source(tmp_path / "s", KEY, FILES))
    store = TieredStore([tiers[0], slow], deadline=0.4)
    assert store.get(KEY)


def test_a_tier_that_is_slow_to_fail_costs_one_deadline_and_not_three(tiers, tmp_path):
    """Pitfall 25: an endpoint that drops packets fails by itself, after a while, each time."""
    asked = []

    class SlowToFail(PosixStore):
        def find(self, key):
            asked.append(key)
            time.sleep(0.3)
            raise TierError(self.location, "find", "no connection in time", key=key)

        def fetch_accepted(self, key, into, accept):
            return self.find(key)

    dead = SlowToFail(tmp_path / "dead")
    store = TieredStore([tiers[0], dead], deadline=0.5)
    for n in range(20):
        with pytest.raises(TiersUnavailable):
            store.get(f"{n:032x}")
    assert len(asked) == 2


def test_one_process_fetches_for_all_that_ask(tiers, source):
    local, a, _ = tiers
    a.publish(*source)
    stores = [TieredStore([LocalStore(local.root), PosixStore(a.root)]) for _ in range(8)]
    paths = []
    threads = [threading.Thread(target=lambda s=s: paths.append(s.get(KEY))) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert paths == [local.root / KEY] * 8
    assert sum(s.counters()[a.name].hits for s in stores) == 1


class TestPromote:
    def test_a_local_artifact_reaches_every_shared_tier(self, tiers, source):
        local, a, b = tiers
        local.publish(*source)
        store = TieredStore(tiers)
        assert store.promote(KEY) == {
            a.name: Publication.CREATED,
            b.name: Publication.CREATED,
        }
        assert store.promote(KEY, to=b.name) == {b.name: Publication.PRESENT}
        assert a.verify(KEY) == b.verify(KEY)

    def test_a_tier_that_fails_is_named_and_the_others_are_done(self, tiers, source, tmp_path):
        """Pitfall 15."""
        local, a, _ = tiers
        local.publish(*source)
        broken = Broken(tmp_path / "broken")
        with pytest.raises(PromoteError, match="connection refused") as caught:
            TieredStore([local, broken, a]).promote(KEY)
        assert set(caught.value.failures) == {broken.name}
        assert caught.value.done == {a.name: Publication.CREATED}
        assert KEY in str(caught.value)

    def test_a_read_only_tier_is_left_out_and_refuses_when_named(self, tiers, source):
        local, a, b = tiers
        local.publish(*source)
        store = TieredStore([local, ReadOnlyStore(a), b])
        assert set(store.promote(KEY)) == {b.name}
        with pytest.raises(PromoteError, match="read-only"):
            store.promote(KEY, to=[a.name])
        with pytest.raises(ReadOnlyTier):
            TieredStore([local, ReadOnlyStore(a)]).promote(KEY)
        assert a.find(KEY) is None

    def test_what_is_not_there_or_damaged_is_not_promoted(self, tiers, source):
        local, a, b = tiers
        store = TieredStore(tiers)
        with pytest.raises(ArtifactNotFound):
            store.promote(KEY)
        local.publish(*source)
        (local.root / KEY / "graph.bin").write_bytes(b"y" * source[0].size)
        with pytest.raises(PromoteError, match="damaged"):
            store.promote(KEY)
        (local.root / KEY / "graph.bin").write_bytes(b"")
        with pytest.raises(ArtifactCorrupt):
            store.promote(KEY)
        assert a.find(KEY) is None
        assert b.find(KEY) is None

    def test_an_unknown_tier_or_none_at_all_is_a_usage_error(self, tiers, source):
        tiers[0].publish(*source)
        with pytest.raises(ConfigError, match="no shared tier is called"):
            TieredStore(tiers).promote(KEY, to="elsewhere")
        with pytest.raises(ConfigError, match="NEURON_STORE_TIERS"):
            TieredStore(tiers[:1]).promote(KEY)


def test_read_only_reads_and_never_writes(tiers, source, tmp_path):
    _, a, _ = tiers
    a.publish(*source)
    store = ReadOnlyStore(a)
    assert store.find(KEY) is not None
    assert list(store.keys()) == [KEY]
    for write in (
        lambda: store.publish(*source),
        lambda: store.delete(KEY),
        lambda: store.lease(KEY, 1),
    ):
        with pytest.raises(ReadOnlyTier):
            write()
    assert store.probe().refused is None


def test_tiers_of_every_kind_work_together(tmp_path, source):
    store = TieredStore(
        [LocalStore(tmp_path / "l"), MemoryStore("tiered-test"), PosixStore(tmp_path / "p")]
    )
    assert store.publish(*source) is Publication.CREATED
    store.promote(KEY)
    assert store.local.delete(KEY)
    assert store.get(KEY)
    assert store.counters()["memory://tiered-test"].hits == 1
    assert store.delete(KEY)
    assert store.find(KEY) is None

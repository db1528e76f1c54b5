"""What stands on top of a tier, on one that misbehaves."""

from __future__ import annotations

import uuid

import pytest

from neuron_store import ArtifactCorrupt, Publication, TieredStore, TierError
from neuron_store.testing import Fault, FaultyStore, make_source
from neuron_store_backends.local import LocalStore
from neuron_store_backends.memory import MemoryStore

KEY = "5" * 32
FILES = {"f": b"bytes" * 2000}


@pytest.fixture
def inner():
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source", KEY, FILES)


def test_without_faults_it_is_the_tier_itself(inner, source, tmp_path):
    store = FaultyStore(inner)
    assert store.publish(*source) is Publication.CREATED
    (tmp_path / "into").mkdir()
    assert store.fetch(KEY, tmp_path / "into") == inner.find(KEY)
    assert store.calls == ["publish", "find", "open_file"]
    assert store.injected == []


def test_the_nth_call_raises_and_nothing_was_done(inner, source):
    store = FaultyStore(inner, [Fault("raise", "publish", at=2)])
    assert store.publish(*source) is Publication.CREATED
    store.delete(KEY)
    with pytest.raises(TierError):
        store.publish(*source)
    assert inner.find(KEY) is None
    assert store.publish(*source) is Publication.CREATED
    assert store.injected == ["raise publish"]


def test_a_lost_reply_is_an_error_after_the_write(inner, source):
    store = FaultyStore(inner, [Fault("lose reply", "publish")])
    with pytest.raises(TierError, match="reply"):
        store.publish(*source)
    assert store.publish(*source) is Publication.PRESENT


def test_a_torn_write_is_read_short_until_it_is_published_again(inner, source, tmp_path):
    store = FaultyStore(inner, [Fault("tear")])
    assert store.publish(*source) is Publication.CREATED
    with pytest.raises(ArtifactCorrupt):
        store.verify(KEY)
    assert store.publish(*source) is Publication.REPAIRED
    assert store.verify(KEY).size == len(FILES["f"])


def test_what_was_just_written_stays_hidden_for_some_looks(inner, source):
    store = FaultyStore(inner, [Fault("hide", calls=2)])
    store.publish(*source)
    assert [store.find(KEY) is None for _ in range(4)] == [True, True, False, False]
    assert list(store.keys()) == [KEY]


def test_a_stale_listing_is_the_one_before(inner, source):
    store = FaultyStore(inner, [Fault("stale", at=2)])
    assert list(store.keys()) == []
    store.publish(*source)
    assert list(store.keys()) == []
    assert list(store.keys()) == [KEY]


def test_the_same_seed_gives_the_same_faults(source):
    def run(seed):
        store = FaultyStore(MemoryStore(uuid.uuid4().hex), rate=0.5, seed=seed)
        for _ in range(20):
            try:
                store.publish(*source)
                store.find(KEY)
                list(store.keys())
                store.delete(KEY)
            except TierError:
                pass
        return store.injected

    assert run(3) == run(3) != run(4)


def test_an_unknown_kind_is_refused(inner):
    with pytest.raises(ValueError, match="kind") as caught:
        Fault("explode")
    assert str(caught.value).count("lose reply") == 1, "each kind is named once"
    with pytest.raises(ValueError, match="kind"):
        FaultyStore(inner, rate=0.5, kinds=("explode",))


@pytest.mark.parametrize("at", [0, -1])
def test_a_fault_that_would_never_come_is_refused(at):
    with pytest.raises(ValueError, match=f"at={at}: calls are counted from 1"):
        Fault("raise", at=at)


@pytest.mark.parametrize("seed", range(20))
def test_a_store_over_a_tier_of_random_faults_gives_whole_artifacts_or_an_error(
    inner, source, tmp_path, seed
):
    """Whatever a shared tier does, what comes out of the store is right or is an error."""
    local = LocalStore(tmp_path / "local")
    faulty = FaultyStore(
        inner, rate=0.5, seed=seed, kinds=("raise", "tear", "hide", "lose reply", "stale")
    )
    came = 0
    with TieredStore([local, faulty]) as store:
        for number in range(10):
            try:
                faulty.publish(*source)
            except TierError:
                pass
            try:
                path = store.get(KEY)
            except (TierError, ArtifactCorrupt, LookupError):
                continue
            came += 1
            assert (path / "f").read_bytes() == FILES["f"], number
            local.delete(KEY)
    assert local.find(KEY) is None or local.verify(KEY)
    print(f"seed {seed}: {came} of 10 came through {len(faulty.injected)} faults")

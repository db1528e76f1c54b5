"""Adding a signature to a record that is there: on S3 under faults, and beside other writers."""

from __future__ import annotations

import json
import threading

import attrs
import pytest

from neuron_store.artifact import Signature
from neuron_store.errors import ArtifactCorrupt, TierError, TierUnfit, Unsupported
from neuron_store.readonly import ReadOnlyStore
from neuron_store.signing import SCHEME, merge_signatures
from neuron_store_backends import _honesty
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.manifest.entries import InterfaceOnly


@pytest.fixture
def faults(moto, s3_place):
    return moto.faults


def signed(artifact, *names):
    """With signatures whose worth nobody asks here."""
    made = [Signature(f"{name:0>32}", "eA==", SCHEME) for name in names]
    return merge_signatures(artifact, *made)


def test_the_record_carries_the_signature_and_says_the_same_as_before(s3_place, artifact, source):
    store = s3_place.store()
    store.publish(artifact, source)
    before, paths = json.loads(s3_place.read("index/k.json")), s3_place.paths()
    assert store.endorse(signed(store.find("k"), "a"))
    after = json.loads(s3_place.read("index/k.json"))
    assert [s["key_id"] for s in after.pop("signatures")] == [f"{'a':0>32}"]
    assert after == before
    assert s3_place.paths() == paths
    store.verify("k")


def test_a_lost_reply_is_recognised_as_done(s3_place, faults, artifact, source):
    store = s3_place.store()
    store.publish(artifact, source)
    _honesty.require_replace(store.objects, "k")
    fault = faults.add("lose_reply", method="PUT", path="/index/k.json")
    assert store.endorse(signed(store.find("k"), "a"))
    assert fault.reached.is_set()
    assert len(store.find("k").signatures) == 1


def test_many_at_once_lose_no_signature(s3_place, artifact, source):
    store = s3_place.store()
    store.publish(artifact, source)
    found, barrier, answers = store.find("k"), threading.Barrier(4), []

    def endorse(name):
        barrier.wait()
        answers.append(s3_place.store().endorse(signed(found, name)))

    threads = [threading.Thread(target=endorse, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4
    assert {s.key_id[-1] for s in store.find("k").signatures} == set("abcd")


def test_a_store_that_ignores_the_condition_is_not_written_to(s3_place, faults, artifact, source):
    store = s3_place.store()
    store.publish(artifact, source)
    before = s3_place.read("index/k.json")
    _honesty._honest_replace.clear()
    faults.add("strip", method="PUT", header="HTTP_IF_MATCH", times=10**6)
    with pytest.raises(TierUnfit, match="the record is to be signed"):
        store.endorse(signed(store.find("k"), "a"))
    assert s3_place.read("index/k.json") == before


def test_trouble_is_a_tier_error_and_leaves_the_record(s3_place, faults, artifact, source):
    store = s3_place.store()
    store.publish(artifact, source)
    before = s3_place.read("index/k.json")
    _honesty.require_replace(store.objects, "k")
    faults.add("answer", method="PUT", path="/index/", status="403 Forbidden", code="AccessDenied")
    with pytest.raises(TierError):
        store.endorse(signed(store.find("k"), "a"))
    faults.clear()
    assert s3_place.read("index/k.json") == before


class TestEveryKind:
    @pytest.fixture(params=["s3", "posix", "local"])
    def store(self, request, tmp_path):
        if request.param == "s3":
            return request.getfixturevalue("s3_place").store()
        return {"posix": PosixStore, "local": LocalStore}[request.param](tmp_path / "tier")

    def test_another_record_or_none_is_not_endorsed(self, store, artifact, source):
        store.publish(artifact, source)
        found = store.find("k")
        assert not store.endorse(signed(attrs.evolve(found, created="2020-01-01"), "a"))
        assert not store.endorse(signed(attrs.evolve(found, key="other"), "a"))
        assert store.find("k").signatures == ()

    def test_no_more_than_sixteen_fit_and_the_first_make_way(self, store, artifact, source):
        store.publish(artifact, source)
        assert store.endorse(signed(store.find("k"), *"abcdefghijklmnop"))
        before = store.find("k").signatures
        assert store.endorse(signed(store.find("k"), "q"))
        after = store.find("k").signatures
        assert len(after) == 16
        assert after[:15] == before[1:]

    def test_one_key_signs_once(self, store, artifact, source):
        store.publish(artifact, source)
        for _ in range(3):
            assert store.endorse(signed(store.find("k"), "a"))
        assert len(store.find("k").signatures) == 1

    def test_a_read_only_tier_refuses(self, store, artifact, source):
        store.publish(artifact, source)
        with pytest.raises(TierError, match="read-only"):
            ReadOnlyStore(store).endorse(signed(store.find("k"), "a"))
        with pytest.raises(TierError, match="read-only"):
            ReadOnlyStore(store).set_aside("k")

    def test_what_it_accepts_is_what_it_fetches(self, store, artifact, source, tmp_path):
        store.publish(artifact, source)
        into, seen = tmp_path / "into", []
        into.mkdir()
        found = store.fetch_accepted("k", into, seen.append)
        assert found == seen[0] == store.find("k")

        def refuse(artifact):
            assert not any(other.iterdir())
            raise Unsupported("reading", "the test")

        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(Unsupported):
            store.fetch_accepted("k", other, refuse)
        assert not any(other.iterdir())
        assert store.find("k") is not None


def test_a_damaged_record_is_told(s3_place, artifact, source):
    store = s3_place.store()
    store.publish(artifact, source)
    found = store.find("k")
    s3_place.put("index/k.json", b"torn")
    with pytest.raises(ArtifactCorrupt):
        store.endorse(signed(found, "a"))


def test_a_tier_that_has_the_interface_and_no_more_says_that_it_cannot(tmp_path, artifact, source):
    store = InterfaceOnly(tmp_path / "tier")
    store.publish(artifact, source)
    with pytest.raises(Unsupported, match="endorse"):
        store.endorse(signed(store.find("k"), "a"))
    assert not store.set_aside("k")
    into = tmp_path / "into"
    into.mkdir()
    assert store.fetch_accepted("k", into, lambda _: None).key == "k"

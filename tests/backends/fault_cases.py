"""Every fault of an object store, on each kind of request, for clouds behind the fault proxy.

Each ends in success, a miss, or one typed error within its deadline: never a hang, never a wrong
artifact, never an "exists" that is not so.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from neuron_store.abc import Publication
from neuron_store.errors import ArtifactCorrupt, TierError, TierUnfit
from neuron_store_backends import _honesty
from neuron_store_backends._options import Times
from tests.backends.cases import CONTENTS, contents_of, fill

REQUESTS = ("look", "probe", "list", "upload", "commit")
PASSING = ("throttled", "too many", "stumble", "conflict", "reset", "lost reply")
ACTIONS = {"reset": "drop", "lost reply": "lose_reply"}


class FaultCases:
    """Subclass with the fixtures `place` and `faults`, and the cloud's dialect."""

    where: dict[str, dict[str, str]]
    """For each of REQUESTS and `fetch`, `part`, `finish`: method and part of the URL."""
    says: dict[str, dict[str, Any]]
    """How the cloud says it: status, headers, body."""
    ignore_create: dict[str, Any]
    ignore_replace: dict[str, Any]
    """The fault that makes a server of those that ignore a condition."""
    denied: str
    """Part of the remedy for a 403."""

    @pytest.fixture
    def large(self, source):
        return fill(source, {"graph_k.neff": os.urandom(1000) * 20_000}, "k")

    def inject(self, faults, fault, request, times=1):
        facts = {**self.says.get(fault, {}), **self.where[request]}
        return faults.add(ACTIONS.get(fault, "answer"), times=times, **facts)

    @pytest.mark.parametrize("request_", REQUESTS)
    @pytest.mark.parametrize("fault", PASSING)
    def test_a_publish_outlives_a_passing_fault(
        self, place, faults, artifact, source, into, request_, fault
    ):
        _honesty._honest_create.clear()
        rule = self.inject(faults, fault, request_, times=2)
        assert place.store().publish(artifact, source) is Publication.CREATED
        assert rule.times == 0
        place.store().fetch("k", into)
        assert contents_of(into) == CONTENTS

    @pytest.mark.parametrize("part", ["part", "finish"])
    @pytest.mark.parametrize("fault", ["throttled", "stumble", "reset", "lost reply"])
    def test_an_upload_in_parts_outlives_a_passing_fault(
        self, place, faults, large, source, into, fault, part
    ):
        rule = self.inject(faults, fault, part)
        assert place.store().publish(large, source) is Publication.CREATED
        assert rule.times == 0
        place.store().fetch("k", into)
        assert contents_of(into) == contents_of(source)

    @pytest.mark.parametrize("request_", REQUESTS)
    def test_denied_is_an_error_with_the_remedy_and_never_a_miss(
        self, place, faults, artifact, source, request_
    ):
        _honesty._honest_create.clear()
        self.inject(faults, "denied", request_, times=99)
        store = place.store()
        with pytest.raises(TierError, match=self.denied):
            store.publish(artifact, source)
        if request_ == "look":
            with pytest.raises(TierError):
                store.find("k")
        faults.clear()
        assert store.find("k") is None

    @pytest.mark.parametrize("fault", ["truncate", "reset", "throttled", "stumble"])
    @pytest.mark.parametrize("request_", ["look", "fetch"])
    def test_a_fetch_outlives_a_passing_fault(
        self, place, faults, artifact, source, into, request_, fault
    ):
        place.store().publish(artifact, source)
        if fault == "truncate":
            rule = faults.add("truncate", times=2, **self.where[request_])
        else:
            rule = self.inject(faults, fault, request_, times=2)
        place.store().fetch("k", into)
        assert rule.times == 0
        assert contents_of(into) == CONTENTS

    def test_a_conflict_that_never_ends_is_an_error(self, place, faults, artifact, source):
        """Pitfall 18: it is retried for a while, and is never taken for "exists"."""
        place.store().publish(artifact, source)
        _honesty._honest_create.clear()
        store = place.store(times=Times(timeout=3))
        place_key = fill(source, CONTENTS, "k2")
        self.inject(faults, "conflict", "probe", times=10**6)
        began = time.monotonic()
        with pytest.raises(TierError, match="409"):
            store.publish(place_key, source)
        assert time.monotonic() - began < 60
        faults.clear()
        assert list(store.keys()) == ["k"]

    def test_a_body_always_cut_short_is_an_error(self, place, faults, artifact, source, into):
        place.store().publish(artifact, source)
        faults.add("truncate", times=10**6, **self.where["fetch"])
        with pytest.raises(TierError, match="broke|cut short"):
            place.store().fetch("k", into)

    def test_a_wrong_body_is_corrupt_and_not_used(self, place, faults, artifact, source, into):
        place.store().publish(artifact, source)
        faults.add("corrupt", **self.where["fetch"])
        with pytest.raises(ArtifactCorrupt, match="sha256"):
            place.store().fetch("k", into)

    def test_a_slow_trickle_ends_in_its_deadline(self, place, faults, artifact, source, into):
        place.store().publish(artifact, source)
        faults.add("trickle", times=99, **self.where["fetch"])
        with pytest.raises(TierError, match="too slowly"):
            place.store(times=Times(stall_timeout=1.5)).fetch("k", into)

    def test_expired_credentials_get_a_new_client_once(self, place, faults):
        self.inject(faults, "expired", "look")
        store = place.store()
        first = store.objects.handle()
        assert store.find("k") is None
        assert store.objects.handle() is not first

    def test_credentials_that_stay_expired_are_a_clear_error(self, place, faults):
        rule = self.inject(faults, "expired", "look", times=99)
        with pytest.raises(TierError, match="expired"):
            place.store().find("k")
        assert rule.times == 97

    def test_a_missing_bucket_is_an_error_and_not_a_miss(self, place, artifact, source):
        store = place.store()
        store.objects.root = store.objects.root.replace(place.bucket, "no-such-bucket-here")
        for call in (
            lambda: store.find("k"),
            lambda: list(store.keys()),
            lambda: store.publish(artifact, source),
        ):
            with pytest.raises(TierError, match="does not exist"):
                call()

    def test_a_server_that_ignores_the_condition_is_refused(self, place, faults, artifact, source):
        faults.add(times=10**6, **self.ignore_create)
        _honesty._honest_create.clear()
        with pytest.raises(TierUnfit, match="ignores the condition"):
            place.store().publish(artifact, source)
        # Payload that was sent meanwhile may be there, and no reader sees it.
        assert all(path.startswith("payload/k/") for path in place.paths())

    def test_where_replace_is_not_honest_a_damaged_record_is_left_and_told(
        self, place, faults, artifact, source
    ):
        place.put("index/k.json", b"torn")
        faults.add(times=10**6, **self.ignore_replace)
        _honesty._honest_replace.clear()
        with pytest.raises(TierUnfit, match="delete the entry, and promote it again"):
            place.store().publish(artifact, source)
        assert place.read("index/k.json") == b"torn"

"""The conditional-create way to publish under faults, on moto with faults injected.

Each ends in success, a miss, or one typed error within its deadline: never a hang, never a wrong
artifact, never an "exists" that is not so.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from neuron_store import steps
from neuron_store.abc import Publication
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    NeuronStoreError,
    TierError,
    TierUnfit,
)
from neuron_store_backends import _honesty, _publishing
from neuron_store_backends._options import Times
from tests.backends.cases import CONTENTS, contents_of, fill


@pytest.fixture
def faults(moto, s3_place):
    return moto.faults


# -- the commit's own reply ---------------------------------------------------------------------


def test_a_lost_reply_to_our_commit_is_recognised_as_our_own(s3_place, faults, artifact, source):
    """Pitfalls 16 and 17."""
    fault = faults.add("lose_reply", method="PUT", path="/index/k.json")
    assert s3_place.store().publish(artifact, source) is Publication.CREATED
    assert fault.reached.is_set()
    assert len([m for m, p in faults.log if m == "PUT" and "/index/" in p]) == 2


def test_a_lost_reply_and_another_winner_is_not_taken_for_our_own(
    s3_place, faults, artifact, source, tmp_path
):
    """Pitfall 16: a 412 is judged by reading back.

    The first try never arrived; somebody else's record is found by the second.
    """
    (tmp_path / "other").mkdir()
    theirs = fill(tmp_path / "other", {"f": b"theirs"}, "k")
    faults.add("drop", method="PUT", path="/index/k.json")
    other = s3_place.store()

    def hook(name):
        if name == "conditional.commit":
            steps.set_hook(None)
            # Before our commit, so that our first try is the one that is dropped.
            faults.rules[0].skip = 1
            assert other.publish(theirs, tmp_path / "other") is Publication.CREATED

    steps.set_hook(hook)
    assert s3_place.store().publish(artifact, source) is Publication.CONFLICT


def test_a_lost_reply_to_a_repair_is_recognised_as_our_own(s3_place, faults, artifact, source):
    s3_place.put("index/k.json", b"torn")
    store = s3_place.store()
    _honesty.require_replace(store.objects, "k")
    fault = faults.add("lose_reply", method="PUT", path="/index/k.json")
    assert store.publish(artifact, source) is Publication.REPAIRED
    assert fault.reached.is_set()


def test_the_same_artifact_object_published_by_two_has_one_creator(s3_place, artifact, source):
    """Every node that fetched an artifact holds the same write id; that is nobody's claim."""
    assert s3_place.store().publish(artifact, source) is Publication.CREATED
    assert s3_place.store().publish(artifact, source) is Publication.PRESENT


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_409_is_tried_again_and_is_not_exists(s3_place, faults, artifact, source, code):
    """Pitfalls 16 and 18."""
    fault = faults.add(
        "answer", method="PUT", path="/index/k.json", status="409 Conflict", code=code, times=3
    )
    assert s3_place.store().publish(artifact, source) is Publication.CREATED
    assert fault.times == 0


def test_a_conflict_that_never_ends_is_an_error_and_nothing_is_visible(
    s3_place, faults, artifact, source
):
    faults.add(
        "answer", method="PUT", path="/index/k.json", status="409 Conflict", code="X", times=10**6
    )
    store = s3_place.store(times=Times(timeout=20))
    began = time.monotonic()
    with pytest.raises(TierError, match="409"):
        store.publish(artifact, source)
    assert time.monotonic() - began < 300
    faults.clear()
    assert list(store.keys()) == []


# -- every other fault, on every kind of request ------------------------------------------------

REQUESTS = {
    "look": ("GET", "/index/k.json"),
    "probe": ("PUT", "/probe/"),
    "list": ("GET", "list-type=2"),
    "upload": ("PUT", "/payload/"),
    "commit": ("PUT", "/index/k.json"),
}
PASSING = {
    "throttled": {"action": "answer", "status": "503 Slow Down", "code": "SlowDown"},
    "too many": {"action": "answer", "status": "429 Too Many Requests", "code": "TooMany"},
    "stumble": {"action": "answer", "status": "500 Oops", "code": "InternalError"},
    "gateway": {"action": "answer", "status": "502 Bad Gateway", "code": "x"},
    "reset": {"action": "drop"},
    "lost reply": {"action": "lose_reply"},
}


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("fault", PASSING)
def test_a_publish_outlives_a_passing_fault(
    s3_place, faults, artifact, source, into, request_, fault
):
    method, path = REQUESTS[request_]
    _honesty._honest_create.clear()
    rule = faults.add(method=method, path=path, times=2, **PASSING[fault])
    assert s3_place.store().publish(artifact, source) is Publication.CREATED
    assert rule.times == 0
    s3_place.store().fetch("k", into)
    assert contents_of(into) == CONTENTS


@pytest.mark.parametrize("request_", REQUESTS)
def test_denied_is_an_error_with_the_remedy_and_never_a_miss(
    s3_place, faults, artifact, source, request_
):
    method, path = REQUESTS[request_]
    _honesty._honest_create.clear()
    faults.add(
        "answer", method=method, path=path, status="403 Forbidden", code="AccessDenied", times=99
    )
    store = s3_place.store()
    with pytest.raises(TierError, match="s3:ListBucket"):
        store.publish(artifact, source)
    if request_ == "look":
        with pytest.raises(TierError):
            store.find("k")
    faults.clear()
    assert store.find("k") is None


@pytest.mark.parametrize("fault", ["truncate", "reset", "throttled", "stumble"])
@pytest.mark.parametrize("where", ["/index/k.json", "/payload/"])
def test_a_fetch_outlives_a_passing_fault(s3_place, faults, artifact, source, into, fault, where):
    s3_place.store().publish(artifact, source)
    facts = PASSING.get(fault, {"action": "truncate"})
    rule = faults.add(method="GET", path=where, times=2, **facts)
    s3_place.store().fetch("k", into)
    assert rule.times == 0
    assert contents_of(into) == CONTENTS


def test_a_body_that_is_always_cut_short_is_an_error(s3_place, faults, artifact, source, into):
    s3_place.store().publish(artifact, source)
    faults.add("truncate", method="GET", path="/payload/", times=10**6)
    with pytest.raises(TierError, match="broke|cut short"):
        s3_place.store().fetch("k", into)


def test_a_wrong_body_is_corrupt_and_not_used(s3_place, faults, artifact, source, into):
    s3_place.store().publish(artifact, source)
    faults.add("corrupt", method="GET", path="graph_k.neff")
    with pytest.raises(ArtifactCorrupt, match="sha256"):
        s3_place.store().fetch("k", into)


def test_a_slow_trickle_ends_in_its_deadline(s3_place, faults, artifact, source, into):
    s3_place.store().publish(artifact, source)
    faults.add("trickle", method="GET", path="graph_k.neff", times=99)
    with pytest.raises(TierError, match="too slowly"):
        s3_place.store(times=Times(stall_timeout=1.5)).fetch("k", into)


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_expired_credentials_get_a_new_client_once(s3_place, faults, artifact, source, code):
    faults.add("answer", path="/index/", status="403 Forbidden", code=code)
    store = s3_place.store()
    first = store.objects.handle()
    assert store.find("k") is None
    assert store.objects.handle() is not first


def test_credentials_that_stay_expired_are_a_clear_error(s3_place, faults):
    faults.add("answer", status="400 Bad Request", code="ExpiredToken", times=99)
    store = s3_place.store()
    with pytest.raises(TierError, match="expired; renew"):
        store.find("k")
    assert len([path for _, path in faults.log if "/index/" in path]) == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [("301 Moved Permanently", "PermanentRedirect"), ("400 Bad", "AuthorizationHeaderMalformed")],
)
def test_a_wrong_region_is_told_with_the_remedy(s3_place, faults, status, code):
    faults.add("answer", method="GET", status=status, code=code, times=99)
    with pytest.raises(TierError, match="region="):
        s3_place.store().find("k")


# -- uploads in parts ---------------------------------------------------------------------------


@pytest.fixture
def large(source):
    return fill(source, {"graph_k.neff": os.urandom(1000) * 20_000}, "k")


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("part", ["uploads", "partNumber=2", "complete"])
def test_an_upload_in_parts_outlives_a_passing_fault(
    s3_place, faults, large, source, into, fault, part
):
    method, path = ("POST", "?uploadId=") if part == "complete" else ("P", part)
    rule = faults.add(method=method, path=path, **PASSING[fault])
    assert s3_place.store().publish(large, source) is Publication.CREATED
    assert rule.times == 0
    s3_place.store().fetch("k", into)
    assert contents_of(into) == contents_of(source)


def test_an_upload_that_fails_leaves_no_parts_behind(s3_place, faults, large, source):
    faults.add("answer", path="partNumber=3", status="403 Forbidden", code="AccessDenied", times=99)
    with pytest.raises(TierError, match="access denied"):
        s3_place.store().publish(large, source)
    assert s3_place.dangling() == []
    assert s3_place.paths() == []


# An interrupt comes between any two instructions: what was opened in the one before is left to the
# garbage collector, which warns of the socket or not, by the order in which it goes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_cancels_the_upload_and_leaves_no_parts_behind(
    s3_place, faults, large, source
):
    held = faults.add("hold", path="partNumber=1")

    def hook(name):
        if name == "conditional.upload":
            threading.Thread(target=interrupt, daemon=True).start()

    def interrupt():
        assert held.reached.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    steps.set_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        s3_place.store().publish(large, source)
    held.released.set()
    end = time.monotonic() + 30
    while s3_place.dangling() and time.monotonic() < end:
        time.sleep(0.05)
    assert s3_place.dangling() == []
    assert s3_place.store().find("k") is None


# -- a dishonest store --------------------------------------------------------------------------


def test_a_server_that_ignores_the_condition_is_refused(s3_place, faults, artifact, source):
    """The negative control: the same server, with the condition taken out of every request."""
    faults.add("strip", header="HTTP_IF_NONE_MATCH", times=10**6)
    store = s3_place.store()
    with pytest.raises(TierUnfit, match="ignores the condition"):
        store.publish(artifact, source)
    # What was sent beside the measurement has the right bytes, and no record.
    assert all(path.startswith("payload/k/") for path in s3_place.paths())
    report = store.probe()
    assert "create-if-absent" in (report.refused or "")
    # Reading from it is as safe as ever.
    assert store.find("k") is None


def test_honesty_is_measured_once_for_a_place(s3_place, faults, artifact, source):
    from attrs import evolve

    store = s3_place.store()
    store.publish(artifact, source)
    s3_place.store().publish(evolve(artifact, key="k2"), source)
    assert len([m for m, p in faults.log if "/probe/" in p]) == 3


def test_payload_travels_while_honesty_is_measured_and_the_record_waits_for_the_verdict(
    s3_place, faults, artifact, source
):
    held = faults.add("hold", method="PUT", path="/probe/")
    store = s3_place.store()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(store.publish, artifact, source)
        assert held.reached.wait(30)
        end = time.monotonic() + 30
        while len(sent(faults, "/payload/")) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(sent(faults, "/payload/")) == 2
        assert sent(faults, "/index/") == []
        held.released.set()
        assert done.result(30) is Publication.CREATED


def sent(faults, path):
    return [p for m, p in faults.log if m == "PUT" and path in p]


def test_a_large_payload_waits_for_the_verdict(s3_place, faults, artifact, source, monkeypatch):
    monkeypatch.setattr(_publishing, "BESIDE", 300_000)
    faults.add("strip", header="HTTP_IF_NONE_MATCH", times=10**6)
    with pytest.raises(TierUnfit):
        s3_place.store().publish(artifact, source)
    assert sent(faults, "/payload/") == []
    assert s3_place.paths() == []


def test_an_upload_that_fails_is_told_once_the_measurement_has_ended(
    s3_place, faults, artifact, source
):
    """Neither hides the other's trouble: without the upload's, the verdict is told."""
    held = faults.add("hold", method="PUT", path="/probe/")
    faults.add("strip", path="/probe/", header="HTTP_IF_NONE_MATCH", times=10**6)
    denied = faults.add(
        "answer", method="PUT", path="/payload/", status="403 No", code="AccessDenied", times=99
    )

    def release():
        denied.reached.wait(30)
        held.released.set()

    threading.Thread(target=release, daemon=True).start()
    store = s3_place.store()
    with pytest.raises(TierError, match="access denied") as caught:
        store.publish(artifact, source)
    assert caught.value.operation == "upload"
    assert "neuron_store-honesty" not in {thread.name for thread in threading.enumerate()}
    # It tidied up, too.
    assert s3_place.paths() == []
    faults.rules.remove(denied)
    with pytest.raises(TierUnfit):
        store.publish(artifact, source)


def test_a_verdict_that_is_known_needs_no_thread(s3_place, artifact, source, monkeypatch):
    store = s3_place.store()
    _honesty.require_create(store.objects)
    monkeypatch.setattr(threading, "Thread", None)
    with _honesty.requiring_create(store.objects):
        pass


@pytest.mark.parametrize("write", ["create", "replace"])
@pytest.mark.parametrize("times", [1, 2], ids=["it goes once", "each goes"])
def test_an_honest_store_is_not_blamed_for_a_scratch_object_that_went(
    s3_place, monkeypatch, write, times
):
    """A collector of others, or an operator who empties the prefix, came in between."""
    objects = s3_place.store().objects
    real, went, seen = getattr(objects, write), [], []

    def removing(path, *args, **more):
        seen.append(path)
        # A second create of the same object, or a first replace of it, finds nothing there.
        if seen.count(path) == (2 if write == "create" else 1) and len(went) < times:
            objects.remove(path)
            went.append(path)
        return real(path, *args, **more)

    monkeypatch.setattr(objects, write, removing)
    # Twice in a row is held to be the store's: to publish there would be the worse mistake.
    with contextlib.nullcontext() if times == 1 else pytest.raises(TierUnfit):
        if write == "create":
            _honesty.require_create(objects)
        else:
            _honesty.require_replace(objects, "k")
    assert len(went) == times
    assert s3_place.paths() == []


def test_a_place_that_was_mended_is_measured_again(s3_place, faults, artifact, source):
    store = s3_place.store()
    faults.add("strip", method="PUT", path="/probe/", header="HTTP_IF_NONE_MATCH", times=4)
    with pytest.raises(TierUnfit):
        store.publish(artifact, source)
    assert store.publish(artifact, source) is Publication.CREATED


def test_credentials_that_may_not_delete_can_publish(s3_place, faults, artifact, source):
    faults.add("answer", method="DELETE", status="403 Forbidden", code="AccessDenied", times=99)
    assert s3_place.store().publish(artifact, source) is Publication.CREATED


def test_where_replace_is_not_honest_a_damaged_record_is_left_and_told(
    s3_place, faults, artifact, source
):
    """Replacing it all the same could displace the record of another repairer."""
    s3_place.put("index/k.json", b"torn")
    faults.add("strip", header="HTTP_IF_MATCH", times=10**6)
    store = s3_place.store()
    with pytest.raises(TierUnfit, match="delete the entry, and promote it again"):
        store.publish(artifact, source)
    assert s3_place.read("index/k.json") == b"torn"
    report = store.probe()
    assert report.refused is None
    assert [c.name for c in report.checks if not c.passed] == ["replace-if-unchanged"]
    # What the message says works.
    assert store.delete("k")
    assert store.publish(artifact, source) is Publication.CREATED


def test_where_replace_is_not_honest_lost_payload_is_still_repaired(
    s3_place, faults, artifact, source, into
):
    store = s3_place.store()
    store.publish(artifact, source)
    faults.add("strip", header="HTTP_IF_MATCH", times=10**6)
    s3_place.remove(f"payload/k/{artifact.file('graph.hlo').sha256}/graph.hlo")
    assert store.publish(artifact, source) is Publication.REPAIRED
    store.fetch("k", into)
    assert contents_of(into) == CONTENTS


# -- readers beside writers ---------------------------------------------------------------------


@pytest.mark.parametrize("where", _publishing.REPAIR_STEPS)
def test_a_repairer_that_dies_blocks_nobody(s3_place, artifact, source, into, where):
    store = s3_place.store()
    if where == "conditional.heal":
        store.publish(artifact, source)
        s3_place.remove(f"payload/k/{artifact.file('graph.hlo').sha256}/graph.hlo")
    else:
        s3_place.put("index/k.json", b"torn")

    class Died(BaseException):
        pass

    def hook(name):
        if name == where:
            raise Died

    steps.set_hook(hook)
    with pytest.raises(Died):
        store.publish(artifact, source)
    steps.set_hook(None)
    expected = Publication.PRESENT if where == "conditional.replaced" else Publication.REPAIRED
    assert s3_place.store().publish(artifact, source) is expected
    store.fetch("k", into)
    assert contents_of(into) == CONTENTS


def test_an_artifact_deleted_in_mid_fetch_is_not_found(s3_place, faults, artifact, source, into):
    store = s3_place.store()
    store.publish(artifact, source)
    held = faults.add("hold", method="GET", path="/index/k.json")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(store.fetch, "k", into)
        assert held.reached.wait(30)
        for path in s3_place.paths():
            s3_place.remove(path)
        held.released.set()
        with pytest.raises(ArtifactNotFound):
            future.result(60)


def test_a_reader_beside_writers_and_deleters_sees_whole_artifacts_or_none(
    s3_place, artifact, source, other, tmp_path
):
    """Pitfall 33: an artifact's files come from one publish, or there is none.

    Two write other bytes under one key, file for file of the same names and sizes.
    """
    stop = threading.Event()
    inverted = {name: bytes(255 - b for b in data) for name, data in CONTENTS.items()}
    theirs = fill(other, inverted, "k")
    whole = {"ours": CONTENTS, "theirs": inverted}
    stores = [s3_place.store() for _ in range(3)]
    for store in stores:
        store.grace = -60.0  # payload is freed at once: the worst case

    def churn(store, artifact, source):
        while not stop.is_set():
            try:
                store.publish(artifact, source)
                # As long as a fetch takes, or hardly one would come through.
                stop.wait(0.05)
                store.delete("k")
            except NeuronStoreError:
                pass

    seen = collections.Counter()
    enough = time.monotonic() + 90
    with ThreadPoolExecutor(2) as pool:
        pool.submit(churn, stores[0], artifact, source)
        pool.submit(churn, stores[1], theirs, other)
        try:
            for number in itertools.count():
                if min(seen[name] for name in whole) >= 10 or time.monotonic() > enough:
                    break
                directory = tmp_path / f"read{number}"
                directory.mkdir()
                try:
                    stores[2].fetch("k", directory)
                except (ArtifactNotFound, ArtifactCorrupt, TierError) as error:
                    seen[type(error).__name__] += 1
                else:
                    found = contents_of(directory)
                    (name,) = (name for name, each in whole.items() if found == each)
                    seen[name] += 1
        finally:
            stop.set()
    assert min(seen[name] for name in whole) >= 10, seen

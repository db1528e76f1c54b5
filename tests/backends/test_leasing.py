"""Leases under faults: what is found in their place, lost replies, stores that cannot keep them."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
import uuid

import attrs
import pytest

from neuron_store import steps
from neuron_store.abc import MAX_LEASE_TTL
from neuron_store.errors import LeaseHeld, TierError, Unsupported
from neuron_store.readonly import ReadOnlyStore
from neuron_store_backends import _heartbeat, _honesty, _leasing
from neuron_store_backends._heartbeat import Watch
from neuron_store_backends._lease_record import (
    MAX_LEASE_BYTES,
    LeaseRecord,
    dump_lease,
    lease_name,
    load_lease,
    read_name,
)
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore

TTL = 1.0
RECORD = LeaseRecord("0" * 32, 7, 2.5, 4711, "node-7.example")


def wait_for_lease(store, key, ttl=TTL, seconds=60):
    end = time.monotonic() + seconds
    while True:
        try:
            return store.lease(key, ttl)
        except LeaseHeld:
            assert time.monotonic() < end, "it never came free"
            time.sleep(ttl / 10)


def beats():
    return [t for t in threading.enumerate() if t.name == "neuron_store-lease"]


# -- records ------------------------------------------------------------------------------------


def test_a_record_reads_back_from_content_and_from_a_name():
    assert load_lease(dump_lease(RECORD)) == RECORD
    assert read_name(lease_name(RECORD)) == RECORD
    fresh = LeaseRecord.new(1 / 3)
    assert load_lease(dump_lease(fresh)) == fresh
    assert read_name(lease_name(fresh)) == fresh
    assert load_lease(dump_lease(fresh.renewed())) == attrs.evolve(fresh, counter=2)


def test_a_record_tells_host_and_pid_and_no_secret(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "odd host/../,name" * 20)
    record = LeaseRecord.new(30)
    assert record.pid == os.getpid()
    assert set(json.loads(dump_lease(record))) == {
        "version",
        "token",
        "counter",
        "ttl",
        "pid",
        "host",
        "released",
    }
    assert len(dump_lease(record)) < MAX_LEASE_BYTES
    assert len(lease_name(record)) < 255
    assert read_name(lease_name(record)) == record


HOSTILE = {
    "empty": b"",
    "no JSON": b"\xff\xfe\0garbage",
    "a list": b"[]",
    "null": b"null",
    "deep": b"[" * 4000,
    "newer": dump_lease(RECORD).replace(b'"version": 1', b'"version": 2'),
    "endless ttl": dump_lease(attrs.evolve(RECORD, ttl=1e12)),
    "ttl NaN": dump_lease(attrs.evolve(RECORD, ttl=float("nan"))),
    "ttl a boolean": dump_lease(attrs.evolve(RECORD, ttl=True)),
    "counter negative": dump_lease(attrs.evolve(RECORD, counter=-1)),
    "counter a boolean": dump_lease(attrs.evolve(RECORD, counter=True)),
    "counter endless": dump_lease(attrs.evolve(RECORD, counter=10**40)),
    "token short": dump_lease(attrs.evolve(RECORD, token="ab")),
    "host with escapes": dump_lease(attrs.evolve(RECORD, host="\x1b[31mred")),
    "host a number": dump_lease(attrs.evolve(RECORD, host=7)),
    "too long": dump_lease(RECORD) + b" " * MAX_LEASE_BYTES,
    "released no boolean": dump_lease(attrs.evolve(RECORD, released="yes")),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_bytes_that_are_no_lease_are_none(data):
    assert load_lease(data) is None


@pytest.mark.parametrize(
    "name",
    ["", "1", "2" + lease_name(RECORD)[1:], lease_name(RECORD) + "\n", "1,x,1,1,1,h", ".nfs0001"]
    + [lease_name(attrs.evolve(RECORD, ttl=ttl)) for ttl in (0, 901, 5000.25)],
)
def test_a_name_that_is_no_lease_is_none(name):
    assert read_name(name) is None


# -- what stands in a lease's place -------------------------------------------------------------


@pytest.mark.parametrize("data", [HOSTILE["no JSON"], HOSTILE["endless ttl"], b"x" * 200_000])
def test_garbage_in_an_object_blocks_for_one_ttl_and_not_for_ever(data):
    store = MemoryStore(uuid.uuid4().hex)
    store.objects.create(_leasing.lease_path(store.objects.root, "k"), data)
    with pytest.raises(LeaseHeld, match="unknown"):
        store.lease("k", TTL)
    with wait_for_lease(store, "k") as lease:
        assert lease.held()
    assert store.objects.listing(store.objects.root + "/lease") == {}


def _file(place):
    place.parent.mkdir(parents=True)
    place.write_text("in the way")


def _junk(place):
    place.mkdir(parents=True)
    (place / "junk").write_text("x")
    (place / "more").mkdir()
    (place / "more" / "junk").write_text("x")


def _newer(place):
    place.mkdir(parents=True)
    (place / ("2" + lease_name(RECORD)[1:])).write_text("")


def _two(place):
    place.mkdir(parents=True)
    for counter in (7, 8):
        name = lease_name(attrs.evolve(RECORD, counter=counter, ttl=TTL))
        (place / name).write_text("")


@pytest.mark.parametrize("make", [_file, _junk, _newer, _two])
def test_garbage_in_a_directory_blocks_for_a_ttl_and_not_for_ever(tmp_path, make):
    store = PosixStore(tmp_path)
    make(tmp_path / ".leases" / "k")
    with pytest.raises(LeaseHeld):
        store.lease("k", TTL)
    with wait_for_lease(store, "k") as lease:
        assert lease.held()
        with pytest.raises(LeaseHeld):
            PosixStore(tmp_path).lease("k", TTL)
    wait_for_lease(PosixStore(tmp_path), "k").release()


def test_a_link_in_a_leases_place_is_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    (tmp_path / "tier" / ".leases").mkdir(parents=True)
    (tmp_path / "tier" / ".leases" / "k").symlink_to(tmp_path / "precious")
    store = PosixStore(tmp_path / "tier")
    with pytest.raises(LeaseHeld):
        store.lease("k", TTL)
    wait_for_lease(store, "k").release()
    assert (tmp_path / "precious" / "file").read_text() == "precious"


def test_a_file_in_place_of_the_directory_of_leases_is_an_error(tmp_path):
    (tmp_path / ".leases").write_text("in the way")
    with pytest.raises(TierError, match="not a directory"):
        PosixStore(tmp_path).lease("k", TTL)
    assert os.listdir(tmp_path) == [".leases"]


def test_an_empty_directory_that_was_left_behind_is_in_nobodys_way(tmp_path):
    (tmp_path / ".leases" / "k").mkdir(parents=True)
    with PosixStore(tmp_path).lease("k", TTL) as lease:
        assert lease.held()


# -- holding and giving back --------------------------------------------------------------------


def test_a_released_lease_leaves_nothing_behind_on_a_file_system(tmp_path):
    store = PosixStore(tmp_path)
    before = set(beats())
    with store.lease("k", TTL):
        (name,) = os.listdir(tmp_path / ".leases" / "k")
        assert read_name(name).pid == os.getpid()
        time.sleep(TTL / 2)
        (renewed,) = os.listdir(tmp_path / ".leases" / "k")
        assert read_name(renewed).counter > read_name(name).counter
    assert [p for p in tmp_path.rglob("*") if p.name not in {".leases", ".staging"}] == []
    for thread in set(beats()) - before:
        thread.join(30)  # it ends by itself, which may take a moment
    assert set(beats()) <= before


def test_a_released_lease_leaves_nothing_behind_in_a_bucket(s3_place):
    store = s3_place.store()
    with store.lease("k", 30):
        assert s3_place.paths() == ["lease/k.json"]
        assert load_lease(s3_place.read("lease/k.json")).pid == os.getpid()
    assert s3_place.paths() == []


def test_who_was_overtaken_finds_out_and_takes_nothing_away_from_its_successor(s3_place, caplog):
    lease = s3_place.store().lease("k", TTL)
    s3_place.put("lease/k.json", dump_lease(RECORD))
    time.sleep(TTL / 2)
    assert not lease.held()
    assert "was lost" in caplog.text
    lease.release()
    assert load_lease(s3_place.read("lease/k.json")) == RECORD


def test_who_was_overtaken_on_a_file_system_finds_out(tmp_path, caplog):
    lease = PosixStore(tmp_path).lease("k", TTL)
    folder = tmp_path / ".leases" / "k"
    for name in os.listdir(folder):
        (folder / name).rename(folder / lease_name(RECORD))
    time.sleep(TTL / 2)
    assert not lease.held()
    lease.release()
    assert os.listdir(folder) == [lease_name(RECORD)]
    assert "was lost" in caplog.text


def test_who_waits_longer_than_its_own_ttl_for_a_holder_with_a_longer_one(tmp_path):
    """Nodes with different settings: a holder renews within its own ttl, not within ours."""
    with PosixStore(tmp_path).lease("k", 6.0):
        hasty = PosixStore(tmp_path)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            with pytest.raises(LeaseHeld):
                hasty.lease("k", 0.2)
            time.sleep(0.05)


def test_no_wall_clock_is_asked(tmp_path, monkeypatch):
    def asked():
        raise AssertionError("somebody asked what time it is")

    store = PosixStore(tmp_path)
    (tmp_path / ".leases" / "k").mkdir(parents=True)
    (tmp_path / ".leases" / "k" / lease_name(attrs.evolve(RECORD, ttl=TTL))).write_text("")
    os.utime(tmp_path / ".leases" / "k", (0, 0))
    monkeypatch.setattr(time, "time", asked)
    with pytest.raises(LeaseHeld, match=r"pid 4711 on node-7\.example"):
        store.lease("k", TTL)
    with wait_for_lease(store, "k") as lease:
        assert lease.held()


def test_what_a_process_saw_does_not_travel_to_another_machine():
    watch = Watch()
    assert watch.unchanged("k", "v", time.monotonic()) == 0
    assert watch.unchanged("k", "v", time.monotonic() + 5) >= 5
    travelled = pickle.loads(pickle.dumps(watch))
    assert travelled.unchanged("k", "v", time.monotonic() + 5) == 0


def test_a_store_with_leases_travels_to_a_spawned_process(tmp_path):
    for store in (PosixStore(tmp_path), MemoryStore("travel")):
        with store.lease("k", TTL):
            assert pickle.loads(pickle.dumps(store)).location == store.location


def test_a_read_only_tier_has_no_leases(tmp_path):
    with pytest.raises(TierError, match="read-only"):
        ReadOnlyStore(PosixStore(tmp_path)).lease("k", TTL)
    assert list(tmp_path.iterdir()) == []


# -- faults -------------------------------------------------------------------------------------


@pytest.fixture
def faults(moto, s3_place):
    _honesty._honest_create.clear()
    _honesty._honest_replace.clear()
    return moto.faults


def test_a_lost_reply_to_the_create_is_recognised_as_our_own(s3_place, faults):
    fault = faults.add("lose_reply", method="PUT", path="/lease/k.json")
    with s3_place.store().lease("k", 30) as lease:
        assert lease.held()
    assert fault.reached.is_set()
    assert s3_place.paths() == []


def test_a_lost_reply_to_a_takeover_is_recognised_as_our_own(s3_place, faults):
    store = s3_place.store()
    store.lease("other", 30).release()
    s3_place.put("lease/k.json", b"garbage")
    with pytest.raises(LeaseHeld):
        store.lease("k", TTL)
    time.sleep(TTL)
    fault = faults.add("lose_reply", method="PUT", path="/lease/k.json")
    with store.lease("k", TTL) as lease:
        assert lease.held()
    assert fault.reached.is_set()


def test_a_lost_reply_to_a_heartbeat_does_not_lose_the_lease(s3_place, faults):
    with s3_place.store().lease("k", 3) as lease:
        fault = faults.add("lose_reply", method="PUT", path="/lease/k.json")
        assert fault.reached.wait(30)
        end = time.monotonic() + 3.5
        while time.monotonic() < end:
            assert lease.held()
            time.sleep(0.2)
    assert s3_place.paths() == []


def test_of_two_who_take_a_dead_holders_lease_the_loser_is_told_who_has_it(s3_place, faults):
    one, two = s3_place.store(), s3_place.store()
    s3_place.put("lease/k.json", b"garbage")
    for store in (one, two):
        store.lease("other", 30).release()
        with pytest.raises(LeaseHeld, match="unknown"):
            store.lease("k", TTL)
    time.sleep(TTL)
    got = []

    def hook(name):
        if name == "lease.take":
            steps.set_hook(None)
            got.append(one.lease("k", TTL))

    steps.set_hook(hook)
    with pytest.raises(LeaseHeld, match=f"pid {os.getpid()}"):
        two.lease("k", TTL)
    assert got[0].held()
    got[0].release()


def test_a_store_that_ignores_the_condition_of_a_replace_is_refused_with_the_reason(
    s3_place, faults, artifact, source
):
    """Every node would hold every lease. Publishing does not need it, and goes on."""
    faults.add("strip", method="PUT", header="HTTP_IF_MATCH", times=10**6)
    store = s3_place.store()
    with pytest.raises(Unsupported, match=r"If-Match is ignored.*posix"):
        store.lease("k", TTL)
    asked = len(faults.log)
    with pytest.raises(Unsupported, match="If-Match is ignored"):
        store.lease("k", TTL)
    assert len(faults.log) == asked + 1, "measured again, though nothing can have changed"
    assert s3_place.paths() == []
    assert store.publish(artifact, source)


def test_a_store_that_ignores_the_condition_of_a_create_is_refused(s3_place, faults):
    faults.add("strip", method="PUT", header="HTTP_IF_NONE_MATCH", times=10**6)
    with pytest.raises(Unsupported, match="ignores the condition of a create"):
        s3_place.store().lease("k", TTL)


def test_credentials_that_may_not_delete_still_give_a_lease_back_at_once(s3_place, faults):
    store = s3_place.store()
    lease = store.lease("k", 30)
    faults.add("answer", method="DELETE", status="403 Forbidden", code="AccessDenied", times=10**6)
    lease.release()
    assert load_lease(s3_place.read("lease/k.json")).released
    second = s3_place.store().lease("k", 30)
    assert second.held()
    faults.clear()
    second.release()
    assert s3_place.paths() == []


def test_a_store_that_does_not_answer_is_an_error_and_the_lease_is_in_doubt_only_after_its_ttl(
    s3_place, faults, monkeypatch
):
    late, clock = 0.0, _heartbeat.own_clock
    monkeypatch.setattr(_heartbeat, "own_clock", lambda: clock() + late)
    lease = s3_place.store().lease("k", MAX_LEASE_TTL)
    faults.add("answer", path="/lease/", status="403 Forbidden", code="AccessDenied", times=10**6)
    with pytest.raises(TierError, match="access denied"):
        s3_place.store().lease("k", 2)
    late = MAX_LEASE_TTL * 0.6
    assert lease.held()
    late = MAX_LEASE_TTL * 1.1
    assert not lease.held()
    faults.clear()
    assert lease.held(), "nobody took it, and the store says so"
    lease.release()
    assert s3_place.paths() == []


def test_a_look_at_a_held_lease_is_one_request_and_a_free_one_two(s3_place, faults):
    store, other = s3_place.store(), s3_place.store()
    other.lease("warm-up", 30).release()
    with store.lease("k", MAX_LEASE_TTL):
        faults.log.clear()
        for _ in range(5):
            with pytest.raises(LeaseHeld):
                other.lease("k", 30)
        assert len(faults.log) == 5
    faults.log.clear()
    other.lease("k", 30).release()
    assert [method for method, _ in faults.log] == ["GET", "PUT", "DELETE"]


class TestRclone:
    """The negative control: a real server that answers 200 to conditions that it ignored."""

    def test_it_gives_no_leases_and_says_why(self, rclone_url, aws):
        from tests.backends.places import S3Place
        from tests.servers.seaweed import client

        place = S3Place(client(rclone_url), rclone_url)
        with pytest.raises(Unsupported, match="ignores the condition"):
            place.store().lease("k", TTL)
        assert place.paths() == []

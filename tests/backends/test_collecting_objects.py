"""Garbage collection on the object tiers: each cloud, many processes, and what S3 leaves behind."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from neuron_store.abc import Publication
from neuron_store.collecting import collect
from neuron_store.errors import ArtifactNotFound, NeuronStoreError
from neuron_store.testing import run_killed_at
from neuron_store_backends import _guarding, _honesty, _sweeping
from tests.backends.cases import CONTENTS, contents_of, fill
from tests.backends.collecting_cases import (
    ORPHAN,
    CollectingCases,
    eager,
    gone,
    once_free,
    overtaking,
    sweep,
)


class TestMemory(CollectingCases):
    @pytest.fixture
    def place(self):
        from tests.backends.test_memory import MemoryPlace

        return MemoryPlace()


class TestS3(CollectingCases):
    @pytest.fixture
    def place(self, s3_place):
        return s3_place


@pytest.mark.slow
class TestSeaweed(CollectingCases):
    @pytest.fixture
    def place(self, seaweed_url, aws):
        from tests.backends.places import S3Place
        from tests.servers.seaweed import client

        return S3Place(client(seaweed_url), seaweed_url, bucket="warm-up")


@pytest.mark.slow
class TestAzure(CollectingCases):
    @pytest.fixture
    def place(self, azure_place):
        return azure_place


@pytest.mark.slow
class TestGcs(CollectingCases):
    @pytest.fixture
    def place(self, gcs_place):
        return gcs_place


# -- what S3 alone leaves behind ----------------------------------------------------------------


def test_dangling_uploads_below_our_prefix_are_ended_and_no_others(s3_place):
    """Pitfall 40, and what other clients' refused conditional completes leave."""
    client, bucket = s3_place.client, s3_place.bucket
    names = [f"{s3_place.prefix}/payload/k/f", f"{s3_place.prefix}-other/f", "elsewhere"]
    for name in names:
        started = client.create_multipart_upload(Bucket=bucket, Key=name)
        client.upload_part(
            Bucket=bucket, Key=name, UploadId=started["UploadId"], PartNumber=1, Body=b"x" * 1000
        )
    # moto says of each that it is from 2010.
    young = collect(s3_place.store(), grace=90 * 366 * 86400)
    assert (gone(young), len(s3_place.dangling())) == ([], 3)
    planned = sweep(s3_place, dry_run=True)
    assert (planned.freed, len(s3_place.dangling())) == (1000, 3)
    assert [kind for kind, _ in gone(sweep(s3_place))] == ["upload"]
    assert sorted(s3_place.dangling()) == sorted(names[1:])


def test_credentials_that_may_not_list_uploads_collect_the_rest(s3_place, moto, caplog):
    s3_place.put(ORPHAN, b"1")
    moto.faults.add(
        "answer", method="GET", path="uploads", status="403 Forbidden", code="AccessDenied", times=9
    )
    assert gone(sweep(s3_place)) == [("payload", "payload/orphan")]
    assert "unfinished uploads were not looked for" in caplog.text


def test_a_hit_and_a_miss_write_nothing_to_the_shared_tier(s3_place, moto, artifact, source, into):
    """Pitfall 35: recency is kept by each node for itself."""
    s3_place.store().publish(artifact, source)
    store = s3_place.store()
    moto.faults.log.clear()
    store.find("k")
    store.find("absent")
    store.fetch("k", into)
    assert {method for method, _ in moto.faults.log} == {"GET"}


# -- processes ----------------------------------------------------------------------------------


def _publish_and_verify(store, number, rounds, answers, meeting):
    _sweeping._PAUSE = 0.02
    # Now, since these collectors would sweep what the measurement has just written.
    _honesty.require_create(store.objects)
    _honesty.require_replace(store.objects, "k0")
    meeting.wait(100)
    store.grace = -60.0
    with tempfile.TemporaryDirectory() as folder:
        artifact = fill(Path(folder), CONTENTS, f"k{number % 2}")
        for _ in range(rounds):
            try:
                told = store.publish(artifact, Path(folder))
                answers.put(("publish", told.name))
                if told is Publication.CREATED:
                    store.verify(artifact.key)
                    store.delete(artifact.key)
            except ArtifactNotFound:
                answers.put(("verify", "deleted by another"))
            except NeuronStoreError as error:
                answers.put(("error", f"{type(error).__name__}: {error}"))
    answers.put(("end", ""))


def _collect_for_ever(store, meeting):
    meeting.wait(100)
    _sweeping._PAUSE = 0.02
    _guarding.TTL = 2.0
    store.grace = -60.0
    while True:
        try:
            collect(store, grace=0)
        except NeuronStoreError:
            time.sleep(0.05)


def _fetch_for_ever(store, stop, answers):
    # Each publisher has bytes of its own: whole is what has the digests of its record.
    while not stop.is_set():
        with tempfile.TemporaryDirectory() as folder:
            for key in ("k0", "k1"):
                into = Path(folder, key)
                into.mkdir()
                try:
                    store.fetch(key, into)
                    answers.put("whole" if contents_of(into).keys() == CONTENTS.keys() else "torn")
                except ArtifactNotFound:
                    answers.put("none")
                except NeuronStoreError as error:
                    answers.put(f"{type(error).__name__}: {error}")


@pytest.mark.slow
def test_publishers_and_readers_beside_collectors_in_processes(s3_place):
    """Everything counts as old here, so the sweeps hit what publishers are about to name."""
    context = multiprocessing.get_context("spawn")
    told, read, stop = context.Queue(), context.Queue(), context.Event()
    meeting = context.Barrier(6)
    publishers = [
        context.Process(target=_publish_and_verify, args=(s3_place.store(), n, 6, told, meeting))
        for n in range(4)
    ]
    collectors = [
        context.Process(target=_collect_for_ever, args=(s3_place.store(), meeting))
        for _ in range(2)
    ]
    reader = context.Process(target=_fetch_for_ever, args=(s3_place.store(), stop, read))
    for process in (*publishers, *collectors, reader):
        process.start()
    try:
        ended, answers = 0, []
        while ended < len(publishers):
            answers.append(told.get(timeout=200))
            ended += answers[-1][0] == "end"
    finally:
        stop.set()
        for process in collectors:
            process.kill()
        seen = set()
        while reader.is_alive() or not read.empty():
            while not read.empty():
                seen.add(read.get())
            reader.join(0.1)
        for process in (*publishers, *collectors):
            process.join(60)
    assert [text for kind, text in answers if kind == "error"] == []
    assert ("publish", "CREATED") in answers
    assert seen <= {"whole", "none"}


def _sweep_all(place_store):
    place_store.grace = -60.0
    once_free(functools.partial(collect, place_store, grace=0, min_age=0, older_than=0))


@pytest.mark.slow
def test_a_collector_killed_at_each_step_leaves_a_tier_that_works(
    s3_place, artifact, source, tmp_path, monkeypatch
):
    monkeypatch.setattr(_guarding, "TTL", 0.5)
    monkeypatch.setattr(_sweeping, "DEAD_SECONDS", 0.3)
    monkeypatch.setattr(_sweeping, "_PAUSE", 0.02)

    def kill(number, name=None):
        s3_place.put(ORPHAN, b"1")
        s3_place.store().publish(artifact, source)
        sweep_all = functools.partial(_sweep_all, s3_place.store())
        ended = run_killed_at(sweep_all, number, name=name)
        assert ended.error is None
        # Whatever it left: a reader sees all or nothing, a publisher succeeds, all is whole.
        into = tmp_path / f"{number}-{name}"
        into.mkdir()
        store = eager(s3_place)
        try:
            store.fetch("k", into)
        except ArtifactNotFound:
            pass
        store.publish(artifact, source)
        assert store.verify("k").key == "k"
        return ended.step

    number = 1
    while kill(number) is not None:
        number += 1
    # Heartbeats count as steps too, and come when they come: by number alone one may be missed.
    for name in ("gc.claimed", "gc.sweep", "sweep.remove", "gc.evict", "conditional.free"):
        assert kill(1, name) == name
    # What the killed ones left goes, as soon as their marks are old enough to be a dead one's.
    give_up = time.monotonic() + 60
    while s3_place.paths() and time.monotonic() < give_up:
        sweep(s3_place, older_than=0)
        time.sleep(0.2)
    assert s3_place.paths() == []


def test_a_stopped_collector_is_overtaken_and_stops(s3_place, artifact, source):
    """SIGSTOP for longer than the ttl: it finds out before its next removal."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child():
        _guarding.TTL = 1.0
        with eager(s3_place).collector().exclusive() as lease:
            there.send(lease.held())
            there.recv()
            time.sleep(0.1)
            there.send(lease.held())

    process = context.Process(target=child)
    process.start()
    try:
        assert here.poll(30)
        assert here.recv() is True
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_guarding, "TTL", 1.0)
            with overtaking(eager(s3_place)) as other:
                os.kill(process.pid, signal.SIGCONT)
                here.send("go on")
                assert here.poll(30)
                assert here.recv() is False
                assert other.held()
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.join(30)

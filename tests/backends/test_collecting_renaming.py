"""Garbage collection on the local and the POSIX tier."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from neuron_store import CompileCoordinator, steps
from neuron_store.abc import Publication
from neuron_store.collecting import collect
from neuron_store.errors import ArtifactNotFound, CollectorBusy, NeuronStoreError
from neuron_store.policy import CompilePolicy
from neuron_store.testing import make_source, run_killed_at
from neuron_store_backends import _aside, _collecting_local, _guarding, _uses
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.backends.collecting_cases import overtaking
from tests.fakes import FakeCompile, write_entry

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32
OLD = 40 * 86400


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_guarding, "TTL", 1.0)
    monkeypatch.setattr(_collecting_local, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(_uses, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(_aside, "CLAIM_SECONDS", 0.3)
    yield
    steps.set_hook(None)


@pytest.fixture(params=[LocalStore, PosixStore], ids=["local", "posix"])
def store(request, tmp_path):
    return request.param(tmp_path / "tier")


@pytest.fixture
def local(tmp_path):
    return LocalStore(tmp_path / "tier")


@pytest.fixture
def put(tmp_path):
    def publish(store, key=KEY, *, age=0.0, files=None):
        folder = tmp_path / f"source-{time.monotonic_ns()}"
        artifact, source = make_source(folder, key, files or {"f": b"x" * 1000})
        answer = store.publish(artifact, source)
        past(store.root / key / ".neuron_store.json", age)
        return answer

    return publish


def past(path, age):
    moment = time.time() - age
    os.utime(path, (moment, moment))


def leave(store, name, *, age=OLD, size=10):
    """Something that a killed process left, changed last so long ago."""
    path = store.root / name
    path.mkdir(parents=True)
    (path / "half").write_bytes(b"x" * size)
    past(path / "half", age)
    past(path, age)
    return path


def gone(found):
    return sorted((r.kind, r.name) for r in found.removals if r.outcome == "removed")


class TestGarbage:
    def test_what_killed_processes_left_goes_after_the_grace_and_artifacts_stay(self, store, put):
        """Pitfall 40: `.staging`, `.quarantine`, `.failed` and leases, dry run first."""
        put(store, age=OLD)
        leave(store, f".staging/{KEY}.abc")
        leave(store, ".staging/probe.abc")
        leave(store, f".staging/{OTHER}.young", age=3600)
        leave(store, f".quarantine/{KEY}.abc", size=500)
        leave(store, f"{OTHER}.tmp.host-7.example.4711")
        for name in (".failed", ".leases"):
            (store.root / name).mkdir()
            (store.root / name / f"{KEY}.json").write_bytes(b"{}")
            past(store.root / name / f"{KEY}.json", OLD)
        before = sorted(store.root.rglob("*"))
        planned = collect(store, dry_run=True)
        assert sorted(store.root.rglob("*")) == before
        found = collect(store)
        assert gone(found) == [
            ("failure", f".failed/{KEY}.json"),
            ("lease", f".leases/{KEY}.json"),
            ("quarantine", f".quarantine/{KEY}.abc"),
            ("staging", f".staging/{KEY}.abc"),
            ("staging", ".staging/probe.abc"),
            ("staging", f"{OTHER}.tmp.host-7.example.4711"),
        ]
        assert planned.freed == found.freed == 534
        assert [p.name for p in (store.root / ".staging").iterdir()] == [f"{OTHER}.young"]
        store.verify(KEY)

    def test_one_file_that_changed_lately_keeps_the_whole(self, store):
        path = leave(store, f".staging/{KEY}.abc")
        (path / "deep").mkdir()
        (path / "deep" / "log").write_bytes(b"at work")
        past(path / "deep", OLD)
        past(path, OLD)
        assert gone(collect(store)) == []
        assert (path / "half").exists()

    def test_a_publisher_that_was_only_stopped_finds_its_staging_whole_or_gone(self, store, put):
        """It must never rename a half-emptied directory into place."""
        swept = []

        def hook(name):
            if name == "publish.rename":
                steps.set_hook(None)
                for path in (store.root / ".staging").iterdir():
                    for each in (*path.rglob("*"), path):
                        past(each, OLD)
                # A process of its own: this one holds the key's lock on the local tier.
                code = (
                    "import sys\nfrom neuron_store_backends.posix import PosixStore\n"
                    "from neuron_store.collecting import collect\n"
                    "print(len(collect(PosixStore(sys.argv[1])).removals))"
                )
                command = [sys.executable, "-c", code, str(store.root)]
                swept.append(subprocess.check_output(command, text=True, timeout=60).strip())

        steps.set_hook(hook)
        with pytest.raises(NeuronStoreError):
            put(store)
        assert swept == ["1"]
        assert store.find(KEY) is None
        assert not (store.root / KEY).exists()
        assert put(store) is Publication.CREATED

    def test_a_compile_that_writes_nothing_for_days_keeps_its_scratch(self, local):
        """It holds its key's lock all the time."""
        scratch = local.scratch(KEY)
        past(scratch, OLD)
        with local.lock(KEY, 1):
            assert gone(collect(local)) == []
            assert scratch.exists()
        assert gone(collect(local)) == [("staging", f".staging/{scratch.name}")]

    def test_locks_notes_incomplete_compiles_and_strangers_are_left_alone(self, local):
        local.root.mkdir()
        for name in (f".{KEY}.compilation_metadata.lock", f".{KEY}.compilation_metadata", "x y"):
            (local.root / name).write_bytes(b"1")
            past(local.root / name, OLD)
        leave(local, OTHER)
        before = sorted(p for p in local.root.rglob("*"))
        assert collect(local, older_than=0, min_age=0, grace=0).removals == ()
        assert set(before) <= set(local.root.rglob("*"))

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's directory")
    def test_what_may_not_be_removed_is_told_and_the_rest_goes(self, store):
        path = leave(store, f".quarantine/{KEY}.abc")
        leave(store, f".staging/{KEY}.abc")
        subprocess.run(["chattr", "+i", path / "half"], check=False)
        try:
            if (path / "half").exists() and os.access(path / "half", os.W_OK):
                try:
                    (path / "half").write_bytes(b"1")
                except OSError:
                    pass
                else:
                    pytest.skip("no immutable files on this file system")
            found = collect(store)
        finally:
            for each in store.root.rglob("half"):
                subprocess.run(["chattr", "-i", each], check=False)
        assert [r.outcome for r in found.removals if r.kind == "quarantine"] == ["error"]
        assert ("staging", f".staging/{KEY}.abc") in gone(found)


class TestArtifacts:
    def test_old_ones_go_and_those_that_were_used_stay(self, local, put):
        put(local, age=OLD)
        put(local, OTHER, age=OLD)
        local.path_of(OTHER)
        local.close()
        found = collect(local, older_than=30 * 86400)
        assert gone(found) == [("artifact", KEY)]
        assert list(local.keys()) == [OTHER]

    def test_recency_is_this_nodes_own_and_survives_its_processes(self, local, put):
        """Pitfall 35: no access times of the file system, and no write on a read."""
        put(local, age=OLD)
        code = (
            "import sys\nfrom neuron_store_backends.local import LocalStore\n"
            "assert LocalStore(sys.argv[1]).path_of(sys.argv[2])"
        )
        subprocess.run([sys.executable, "-c", code, str(local.root), KEY], check=True, timeout=60)
        assert gone(collect(local, older_than=86400)) == []
        assert local.uses.age(KEY) < 60
        past(local.root / ".stats" / "uses" / KEY, OLD)
        assert gone(collect(local, older_than=86400)) == [("artifact", KEY)]

    def test_a_hit_writes_nothing_itself(self, local, put, monkeypatch):
        """Pitfall 35: what it leaves is a note in memory."""
        put(local)
        monkeypatch.setattr(_uses, "_FLUSH_SECONDS", 600)
        before = {p: p.stat().st_mtime_ns for p in local.root.rglob("*")}
        assert local.path_of(KEY) is not None
        assert {p: p.stat().st_mtime_ns for p in local.root.rglob("*")} == before
        local.close()
        assert local.uses.age(KEY) is not None

    def test_a_read_only_root_costs_a_hit_nothing(self, local, put, monkeypatch):
        put(local)

        def refuse(_path):
            raise PermissionError(13, "read-only")

        monkeypatch.setattr(_uses, "_touch", refuse)
        assert local.path_of(KEY) is not None
        local.close()

    def test_the_neuron_stacks_own_access_mark_counts(self, local):
        entry = local.root / KEY
        entry.mkdir(parents=True)
        write_entry(entry, KEY)
        for each in (*entry.iterdir(), entry):
            past(each, OLD)
        (entry / ".cache_accessed").write_text("1")
        assert gone(collect(local, older_than=86400)) == []
        past(entry / ".cache_accessed", OLD)
        assert gone(collect(local, older_than=86400)) == [("artifact", KEY)]

    def test_a_forked_rank_makes_notes_of_its_own(self, local, put):
        put(local, age=OLD)
        put(local, OTHER, age=OLD)
        local.path_of(OTHER)

        def child():
            local.path_of(KEY)
            local.close()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(30)
        assert local.uses.age(KEY) is not None

    def test_one_handed_out_while_the_collector_is_at_work_stays(self, local, put):
        """The collector has chosen it already; the hit comes right before it is hidden."""
        put(local, age=OLD)
        hits = []

        def hook(name):
            if name == "delete.hide":
                steps.set_hook(None)
                user = threading.Thread(
                    target=lambda: hits.append(LocalStore(local.root).path_of(KEY))
                )
                user.start()
                user.join(30)

        steps.set_hook(hook)
        found = collect(local, older_than=86400)
        assert gone(found) == []
        assert hits == [local.root / KEY]
        local.verify(KEY)

    def test_one_that_is_used_as_it_is_hidden_comes_back(self, local, put, monkeypatch):
        put(local, age=OLD)
        real = os.rename

        def rename(source, target, **more):
            real(source, target, **more)
            if str(source) == str(local.root / KEY):
                monkeypatch.setattr(os, "rename", real)
                local.uses._mark(KEY)

        monkeypatch.setattr(os, "rename", rename)
        assert gone(collect(local, older_than=86400)) == []
        local.verify(KEY)
        assert collect(local, older_than=0, min_age=0).removals[0].outcome == "removed"

    def test_a_hit_before_the_flag_is_marked_before_the_first_removal(self, local, put):
        put(local, age=OLD)
        user = LocalStore(local.root)

        def hook(name):
            if name == "gc.claimed":
                steps.set_hook(None)
                assert user.path_of(KEY) is not None

        steps.set_hook(hook)
        assert gone(collect(local, older_than=86400)) == []

    def test_the_flag_of_a_killed_collector_is_not_heeded_for_ever(self, local, put):
        put(local)
        local.uses.raise_flag()
        assert local.uses._collecting()
        past(local.root / ".stats" / "collecting", 3600)
        assert not local.uses._collecting()

    def test_an_entry_published_anew_since_it_was_listed_stays(self, store, put):
        put(store, age=OLD)
        collector = store.collector()
        (listed,) = collector.holdings()
        store.delete(KEY)
        put(store)
        assert collector.evict(listed, 0) is None
        store.verify(KEY)

    def test_damaged_ones_count_and_go_like_others(self, store, put):
        put(store, age=OLD)
        (store.root / KEY / "f").write_bytes(b"short")
        assert gone(collect(store, max_size=0)) == [("artifact", KEY)]

    def test_by_size_the_coldest_go_and_a_coordinator_compiles_anew(self, local, put, tmp_path):
        put(local, age=OLD)
        put(local, OTHER, age=OLD / 2)
        found = collect(local, max_size=2000)
        assert gone(found) == [("artifact", KEY)]
        job = FakeCompile(KEY, str(tmp_path / "log")).job()
        coordinator = CompileCoordinator(local, CompilePolicy())
        assert coordinator.get_or_compile(job) == local.root / KEY
        assert coordinator.counts["compiled"] == 1


class TestOneAtATime:
    """Pitfall 41."""

    def test_a_second_one_is_told_who_is_at_work(self, store):
        leave(store, f".staging/{KEY}.abc")
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()

        def child():
            with store.collector().exclusive():
                there.send(1)
                there.recv()

        process = context.Process(target=child)
        process.start()
        try:
            assert here.poll(30)
            with pytest.raises(CollectorBusy, match=f"pid {process.pid}"):
                collect(store)
            assert (store.root / ".staging").exists()
            here.send(1)
        finally:
            process.join(30)
        assert gone(collect(store)) == [("staging", f".staging/{KEY}.abc")]

    def test_a_killed_one_is_taken_over_by_one(self, store):
        leave(store, f".staging/{KEY}.abc")
        # On a shared tier the first three steps are the lease's.
        first = 1 if isinstance(store, LocalStore) else 4
        assert run_killed_at(functools.partial(collect, store), first).step == "gc.claimed"
        answers = []

        def attempt():
            try:
                answers.append(gone(collect(type(store)(store.root))))
            except CollectorBusy:
                answers.append("busy")

        threads = [threading.Thread(target=attempt) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers.count([("staging", f".staging/{KEY}.abc")]) == 1
        assert all(a in ("busy", []) or a[0][0] == "staging" for a in answers)

    def test_a_stopped_one_finds_out_that_it_was_overtaken(self, tmp_path):
        store = PosixStore(tmp_path / "tier")
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()

        def child():
            with store.collector().exclusive() as lease:
                there.send(lease.held())
                there.recv()
                there.send(lease.held())

        process = context.Process(target=child)
        process.start()
        try:
            assert here.poll(30)
            assert here.recv() is True
            os.kill(process.pid, signal.SIGSTOP)
            with overtaking(store) as other:
                os.kill(process.pid, signal.SIGCONT)
                here.send(1)
                assert here.poll(30)
                assert here.recv() is False
                assert other.held()
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.join(30)


class TestBesideOthers:
    def test_killed_at_each_step_nothing_half_is_visible_and_the_next_one_cleans_up(
        self, store, put, tmp_path
    ):
        seen, number = set(), 1
        while True:
            # What the one before left would shift the steps.
            shutil.rmtree(store.root / ".staging", ignore_errors=True)
            shutil.rmtree(store.root / ".leases", ignore_errors=True)
            shutil.rmtree(store.root / KEY, ignore_errors=True)
            put(store, age=OLD)
            leave(store, f".staging/{OTHER}.{number}")
            ended = run_killed_at(functools.partial(collect, store, older_than=86400), number)
            assert ended.error is None
            into = tmp_path / f"into-{number}"
            into.mkdir()
            try:
                # By a tier that notes no use, since the next round wants it old again.
                PosixStore(store.root).fetch(KEY, into)
            except ArtifactNotFound:
                pass
            put(store)
            store.verify(KEY)
            if ended.step is None:
                break
            seen.add(ended.step)
            number += 1
        assert {"gc.claimed", "gc.hide", "gc.free", "delete.hide", "delete.free"} <= seen
        collect(store, grace=0)
        assert list((store.root / ".staging").iterdir()) == []

    def test_readers_see_a_whole_artifact_or_none(self, store, put, tmp_path):
        files = {f"part{n}": os.urandom(20_000) for n in range(4)}
        stop, wrong, whole = threading.Event(), [], []

        def read(number):
            reader = type(store)(store.root)
            for turn in range(10**6):
                if stop.is_set():
                    return
                into = tmp_path / f"read-{number}-{turn}"
                into.mkdir()
                try:
                    reader.fetch(KEY, into)
                except ArtifactNotFound:
                    continue
                except NeuronStoreError as error:
                    wrong.append(str(error))
                    continue
                found = {p.name: p.read_bytes() for p in into.iterdir()}
                (whole if found == files else wrong).append(turn)

        readers = [threading.Thread(target=read, args=(n,)) for n in range(2)]
        for reader in readers:
            reader.start()
        try:
            for _ in range(15):
                put(store, files=files)
                time.sleep(0.02)
                collector = store.collector()
                for holding in collector.holdings():
                    collector.evict(holding, 0)
        finally:
            stop.set()
            for reader in readers:
                reader.join(60)
        assert wrong == []
        assert not (store.root / ".quarantine").exists()

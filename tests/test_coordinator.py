"""One compile for all who want it: in threads, in forked and in spawned processes."""

from __future__ import annotations

import collections
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import attrs
import pytest

from neuron_store import (
    ArtifactMismatch,
    CacheMiss,
    CompileCoordinator,
    CompileError,
    CompileJob,
    CompileTimeout,
    ConfigError,
    TieredStore,
    TierError,
)
from neuron_store.policy import CompilePolicy
from neuron_store.readonly import ReadOnlyStore
from neuron_store.testing import FaultyFiles
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile, neff, starts, write_entry

KEY = "0123456789abcdef0123456789abcdef"


@attrs.frozen
class Told:
    """What one rank got."""

    path: str | None
    error: BaseException | None
    at: float
    cpu: float


def _rank(root, shared, policy, compile_, meeting):
    barrier, results = meeting
    store = TieredStore([LocalStore(root), *(PosixStore(s) for s in shared)])
    coordinator = CompileCoordinator(store, policy)
    barrier.wait(60)
    cpu = time.process_time()
    path, error = None, None
    try:
        path = str(coordinator.get_or_compile(compile_.job()))
    except Exception as caught:
        error = caught
    results.put(Told(path, error, time.monotonic(), time.process_time() - cpu))


class Ranks:
    """Processes that want artifacts from one local tier, all starting at once."""

    def __init__(self, tmp_path: Path, method: str) -> None:
        self.root = str(tmp_path / "root")
        self.log = str(tmp_path / "log")
        self.context = multiprocessing.get_context(method)
        self.results = self.context.Queue()
        self.processes: list[multiprocessing.Process] = []

    def start(self, compiles, policy=None, shared=()):
        # Kept: a spawned child looks its semaphore up by name.
        self.barrier = self.context.Barrier(len(compiles))
        for compile_ in compiles:
            meeting = (self.barrier, self.results)
            args = (self.root, shared, policy or CompilePolicy(), compile_, meeting)
            process = self.context.Process(target=_rank, args=args, daemon=True)
            process.start()
            self.processes.append(process)
        return self

    def told(self, count=None) -> list[Told]:
        answers = [
            self.results.get() for _ in range(len(self.processes) if count is None else count)
        ]
        for process in self.processes:
            process.join(60)
        return answers


@pytest.fixture(params=["fork", "spawn"])
def ranks(request, tmp_path):
    ranks = Ranks(tmp_path, request.param)
    yield ranks
    for process in ranks.processes:
        if process.is_alive():
            process.kill()


@pytest.fixture
def local(tmp_path):
    return LocalStore(tmp_path / "root")


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def leftovers(root) -> list[str]:
    staging = Path(root, ".staging")
    return sorted(p.name for p in staging.iterdir()) if staging.exists() else []


@pytest.mark.parametrize("count", [1, 16])
def test_all_ranks_share_one_compile(ranks, count):
    ranks.start([FakeCompile(KEY, ranks.log, seconds=1)] * count)
    told = ranks.told()
    assert [t.error for t in told] == [None] * count
    assert {t.path for t in told} == {f"{ranks.root}/{KEY}"}
    assert len(starts(ranks.log)) == 1
    assert leftovers(ranks.root) == []


def _engine(root, compiles, meeting):
    barrier, results = meeting
    coordinator = CompileCoordinator(TieredStore([LocalStore(root)]))
    barrier.wait(60)
    try:
        paths = [coordinator.get_or_compile(each.job()) for each in compiles]
        results.put([(path / f"graph_{path.name}.neff").read_bytes() for path in paths])
    except Exception as error:
        results.put(error)


def test_eight_engines_start_cold_on_one_root_and_each_has_the_right_files(ranks, tmp_path):
    """Pitfall 36: they neither clobber each other's directories nor compile anything twice."""
    keys = [f"{n:032x}" for n in range(4)]
    wanted = {key: b"payload of " + key.encode() * 1000 for key in keys}
    ranks.barrier = ranks.context.Barrier(8)
    for engine in range(8):
        # Each begins with another graph.
        mine = [keys[(engine + n) % 4] for n in range(4)]
        compiles = [
            FakeCompile(key, f"{ranks.log}.{key}", seconds=0.1, payload=wanted[key]) for key in mine
        ]
        meeting = (ranks.barrier, ranks.results)
        process = ranks.context.Process(
            target=_engine, args=(ranks.root, compiles, meeting), daemon=True
        )
        process.start()
        ranks.processes.append(process)
    told = [ranks.results.get() for _ in range(8)]
    for answer in told:
        assert sorted(answer) == sorted(neff(payload) for payload in wanted.values())
    assert [len(starts(f"{ranks.log}.{key}")) for key in keys] == [1] * 4
    local = LocalStore(ranks.root)
    assert sorted(local.keys()) == keys
    for key in keys:
        assert local.verify(key).file(f"graph_{key}.neff").size == len(neff(wanted[key]))
    assert leftovers(ranks.root) == []


@pytest.mark.slow
def test_sixty_four_ranks_share_one_compile(tmp_path):
    ranks = Ranks(tmp_path, "fork").start([FakeCompile(KEY, str(tmp_path / "log"), seconds=1)] * 64)
    told = ranks.told()
    assert [t.error for t in told] == [None] * 64
    assert len(starts(ranks.log)) == 1


def test_different_keys_compile_side_by_side(ranks, tmp_path):
    logs = [str(tmp_path / f"log{n}") for n in range(4)]
    keys = [f"{n:032x}" for n in range(4)]
    compiles = [FakeCompile(keys[n % 4], logs[n % 4], seconds=4) for n in range(16)]
    told = ranks.start(compiles).told()
    assert collections.Counter(t.path for t in told) == {f"{ranks.root}/{k}": 4 for k in keys}
    assert [len(starts(log)) for log in logs] == [1] * 4
    began = [float(Path(log).read_text().split()[1]) for log in logs]
    # Each compile sleeps for 4 s: they overlapped, or the last would have begun 12 s later.
    assert max(began) - min(began) < 4


def test_when_the_compiling_process_is_killed_exactly_one_other_compiles(ranks):
    """Pitfall 4."""
    ranks.start([FakeCompile(KEY, ranks.log, seconds=1.5)] * 8)
    wait_for(lambda: starts(ranks.log))
    os.kill(starts(ranks.log)[0], signal.SIGKILL)
    told = ranks.told(7)
    assert [t.error for t in told] == [None] * 7
    assert len(starts(ranks.log)) == 2


def test_a_compiler_that_always_fails_is_tried_twice_and_all_get_the_same_error(ranks):
    """Pitfall 2."""
    compile_ = FakeCompile(KEY, ranks.log, seconds=0.5, fail="error code 70")
    told = ranks.start([compile_] * 16).told()
    assert len(starts(ranks.log)) == 2
    errors = [t.error for t in told]
    assert all(type(e) is CompileError for e in errors)
    assert {str(e) for e in errors} == {str(errors[0])}
    assert all(e == errors[0] for e in errors)
    assert "error code 70" in str(errors[0])
    assert leftovers(ranks.root) == []
    assert not Path(ranks.root, KEY).exists()


def test_a_compile_that_fails_once_is_tried_again_by_one_waiter(ranks):
    """Pitfall 2: one of many compiles exits 70, and nobody dies of it."""
    compile_ = FakeCompile(KEY, ranks.log, seconds=0.3, fail="transient", fail_times=1)
    told = ranks.start([compile_] * 8).told()
    assert [t.error for t in told] == [None] * 8
    assert len(starts(ranks.log)) == 2


def test_after_a_failure_the_next_caller_compiles_afresh(local, tmp_path):
    """Pitfalls 13 and 38: a failure is remembered for the waiting wave only."""
    coordinator = CompileCoordinator(local, CompilePolicy())
    log = str(tmp_path / "log")
    with pytest.raises(CompileError):
        coordinator.get_or_compile(FakeCompile(KEY, log, fail="broken").job())
    assert local.find(KEY) is None
    assert coordinator.get_or_compile(FakeCompile(KEY, log).job()) == local.root / KEY
    assert not (local.root / ".failed" / f"{KEY}.json").exists()


def test_a_permanent_failure_is_not_tried_twice(local, tmp_path):
    log = tmp_path / "log"

    def compile_(_workdir):
        with open(log, "a", encoding="utf-8") as file:
            file.write("1 1\n")
        raise CompileError(KEY, "no such flag", permanent=True, log_tail="usage: cc")

    with pytest.raises(CompileError, match="usage: cc") as caught:
        CompileCoordinator(local, CompilePolicy()).get_or_compile(CompileJob(KEY, compile_))
    assert caught.value.permanent
    assert len(starts(log)) == 1


def test_an_interrupt_leaves_no_mark(local, tmp_path):
    """Pitfall 13."""

    def compile_(_workdir):
        raise KeyboardInterrupt

    coordinator = CompileCoordinator(local, CompilePolicy())
    with pytest.raises(KeyboardInterrupt):
        coordinator.get_or_compile(CompileJob(KEY, compile_))
    assert leftovers(local.root) == []
    assert not (local.root / ".failed").exists()
    assert coordinator.get_or_compile(FakeCompile(KEY, str(tmp_path / "log")).job())


def test_a_compile_that_calls_sys_exit_is_a_failed_compile(local):
    calls = []

    def compile_(_workdir):
        calls.append(1)
        raise SystemExit(3)

    with pytest.raises(CompileError, match=r"sys\.exit\(3\)"):
        CompileCoordinator(local, CompilePolicy()).get_or_compile(CompileJob(KEY, compile_))
    assert len(calls) == 2
    assert local.lock(KEY, 0).try_acquire()


def test_a_failure_that_cannot_be_noted_still_ends_after_two_attempts(local, tmp_path):
    local.root.mkdir()
    (local.root / ".failed").write_text("in the way of the notes")
    log = str(tmp_path / "log")
    with pytest.raises(CompileError):
        CompileCoordinator(local, CompilePolicy()).get_or_compile(
            FakeCompile(KEY, log, fail="broken").job()
        )
    assert len(starts(log)) == 2


def test_a_waiter_that_gives_up_names_the_holder_and_the_late_artifact_is_used(ranks):
    """Pitfall 3."""
    ranks.start([FakeCompile(KEY, ranks.log, seconds=2)])
    wait_for(lambda: starts(ranks.log))
    store = LocalStore(ranks.root)
    hasty = CompileCoordinator(store, CompilePolicy(timeout=0.3))
    with pytest.raises(CompileTimeout) as caught:
        hasty.get_or_compile(FakeCompile(KEY, ranks.log).job())
    error = caught.value
    assert f"pid {starts(ranks.log)[0]}" in error.holder
    assert error.host == os.uname().nodename
    assert error.age is not None
    assert 0 <= error.age < 30
    assert isinstance(error, TimeoutError)
    ranks.told()
    assert hasty.get_or_compile(FakeCompile(KEY, ranks.log).job()) == store.root / KEY
    assert len(starts(ranks.log)) == 1


def test_threads_share_one_compile(local, tmp_path):
    coordinator = CompileCoordinator(local, CompilePolicy())
    log, paths = str(tmp_path / "log"), []
    job = FakeCompile(KEY, log, seconds=0.3).job()
    threads = [
        threading.Thread(target=lambda: paths.append(coordinator.get_or_compile(job)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert paths == [local.root / KEY] * 8
    assert len(starts(log)) == 1
    counts = coordinator.counts
    assert counts["compiled"] == 1
    # A thread that begins late hits.
    assert counts["waited"] + counts.get("hits", 0) == 7


def test_a_hit_takes_no_lock_and_writes_nothing(local, tmp_path):
    coordinator = CompileCoordinator(local, CompilePolicy())
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    coordinator.get_or_compile(job)
    before = {p: p.stat().st_mtime_ns for p in local.root.rglob("*")}
    holder = local.lock(KEY, 0)
    assert holder.try_acquire()
    answer: list[Path] = []
    thread = threading.Thread(target=lambda: answer.append(coordinator.get_or_compile(job)))
    thread.start()
    thread.join(10)
    holder.release()
    assert answer == [local.root / KEY]
    after = {p: p.stat().st_mtime_ns for p in local.root.rglob("*")}
    changed = {p.name for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    assert changed <= {".staging", "root"}  # the holder's note came and went


def test_a_warm_shared_tier_is_fetched_and_nothing_is_compiled(ranks, tmp_path):
    """Pitfalls 1 and 14: every path asks every tier first, and waits for the fetch."""
    shared = str(tmp_path / "shared")
    with TieredStore([LocalStore(tmp_path / "a"), PosixStore(shared)]) as node_a:
        CompileCoordinator(node_a, CompilePolicy()).get_or_compile(
            FakeCompile(KEY, str(tmp_path / "log-a")).job()
        )
        node_a.promote(KEY)
    ranks.start([FakeCompile(KEY, ranks.log)] * 8, shared=[str(tmp_path / "empty"), shared])
    told = ranks.told()
    assert {t.path for t in told} == {f"{ranks.root}/{KEY}"}
    assert starts(ranks.log) == []
    assert LocalStore(ranks.root).verify(KEY)


def test_require_hit_asks_every_tier_and_says_what_each_answered(tmp_path):
    policy = CompilePolicy(require_hit=True)
    shared = PosixStore(tmp_path / "shared")
    broken = PosixStore(tmp_path / "file" / "below")
    (tmp_path / "file").write_text("no directory")
    store = TieredStore([LocalStore(tmp_path / "root"), broken, shared])
    log = str(tmp_path / "log")
    with pytest.raises(CacheMiss) as caught:
        CompileCoordinator(store, policy).get_or_compile(FakeCompile(KEY, log).job())
    assert isinstance(caught.value, RuntimeError)
    assert KEY in str(caught.value)
    assert "VLLM_NEURON_DISABLE_WARMUP_COMPILE" in str(caught.value)
    assert {a.location for a in caught.value.answers} == {t.location for t in store.tiers}
    with TieredStore([LocalStore(tmp_path / "other"), shared]) as other:
        CompileCoordinator(other, CompilePolicy()).get_or_compile(FakeCompile(KEY, log).job())
        other.promote(KEY)
    path = CompileCoordinator(store, policy).get_or_compile(FakeCompile(KEY, log).job())
    assert path == tmp_path / "root" / KEY
    assert len(starts(log)) == 1


def test_disabled_nothing_is_read_and_nothing_written(tmp_path):
    """Pitfall 37."""
    root = tmp_path / "root"
    store = TieredStore([LocalStore(root), PosixStore(tmp_path / "shared")])
    coordinator = CompileCoordinator(store, CompilePolicy(disabled=True))
    log = str(tmp_path / "log")
    paths = {coordinator.get_or_compile(FakeCompile(KEY, log).job()) for _ in range(2)}
    assert len(paths) == 2
    assert len(starts(log)) == 2
    assert all((path / f"graph_{KEY}.neff").is_file() for path in paths)
    assert not root.exists()
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("fleet", [False, True])
def test_disabled_what_is_there_is_neither_read_nor_touched(tmp_path, fleet):
    """Pitfall 37: no file call below either tier, though both could answer at once."""
    roots = [tmp_path / "root", tmp_path / "shared"]
    tiers = [LocalStore(roots[0]), PosixStore(roots[1])]
    cached = FakeCompile(KEY, str(tmp_path / "before"), payload=b"cached")
    path = CompileCoordinator(TieredStore(tiers)).get_or_compile(cached.job())
    TieredStore(tiers).promote(KEY)
    assert tiers[1].find(KEY) is not None
    before = [tree(root) for root in roots]
    policy = CompilePolicy(disabled=True, promote=True, fleet_lease=fleet)
    asked = TieredStore([LocalStore(roots[0]), PosixStore(roots[1])])
    job = FakeCompile(KEY, str(tmp_path / "log"), payload=b"fresh").job()
    with FaultyFiles(roots[0]) as local_calls, FaultyFiles(roots[1]) as shared_calls:
        fresh = CompileCoordinator(asked, policy).get_or_compile(job)
    assert local_calls.calls == []
    assert shared_calls.calls == []
    assert (fresh / f"graph_{KEY}.neff").read_bytes() == neff(b"fresh")
    assert [tree(root) for root in roots] == before
    assert (path / f"graph_{KEY}.neff").read_bytes() == neff(b"cached")
    # The same calls with the cache on are counted: the counting works.
    with FaultyFiles(roots[0]) as local_calls:
        assert CompileCoordinator(asked, CompilePolicy()).get_or_compile(job) == path
    assert local_calls.calls


def tree(root):
    """All that a read or a write would change, and what is in the files."""
    return {
        path: (
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_ino,
            path.is_file() and path.read_bytes(),
        )
        for path in sorted([root, *root.rglob("*")])
        for found in [path.lstat()]
    }


def test_disabled_and_require_hit_contradict_each_other(local, monkeypatch):
    monkeypatch.setenv("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "yes")
    with pytest.raises(ConfigError, match="both set"):
        CompileCoordinator(local)


def test_the_environment_sets_the_policy(local, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    with pytest.raises(CacheMiss):
        CompileCoordinator(local).get_or_compile(FakeCompile(KEY, str(tmp_path / "log")).job())


def test_trouble_with_a_tier_never_breaks_a_compile(tmp_path, caplog):
    """Pitfalls 24 and 25: counted as an error, told once, and the compile's result returned."""
    (tmp_path / "file").write_text("no directory")
    broken = PosixStore(tmp_path / "file" / "below")
    store = TieredStore([LocalStore(tmp_path / "root"), broken])
    coordinator = CompileCoordinator(store, CompilePolicy())
    log = str(tmp_path / "log")
    for n in range(6):
        key = f"{n:032x}"
        assert coordinator.get_or_compile(FakeCompile(key, log).job()) == tmp_path / "root" / key
    assert store.counters()[broken.name].errors == 3
    assert caplog.text.count("not a directory") >= 1


class MuteStore(PosixStore):
    """A mount that hangs: every look takes for ever."""

    def fetch(self, key, into):
        time.sleep(3600)
        raise AssertionError

    find = fetch  # type: ignore[assignment]


def test_a_mute_tier_costs_one_deadline_in_all(tmp_path):
    """Pitfall 25: the time lost to dead tiers is bounded, however many keys are compiled."""
    mute = MuteStore(tmp_path / "mute")
    store = TieredStore([LocalStore(tmp_path / "root"), mute], deadline=2)
    coordinator = CompileCoordinator(store, CompilePolicy())
    began = time.monotonic()
    for n in range(20):
        key = f"{n:032x}"
        assert coordinator.get_or_compile(FakeCompile(key, str(tmp_path / "log")).job())
    # 20 keys at 2 s each would be 40 s; what is asserted is that it was not that.
    assert time.monotonic() - began < 30
    assert store.counters()[mute.name].errors == 1


def test_a_full_disk_at_publish_still_returns_the_result(local, tmp_path, monkeypatch):
    """Pitfall 31."""

    def publish(_self, artifact, _source, *, consume=False):
        raise TierError(local.location, "publish", "No space left on device", key=artifact.key)

    monkeypatch.setattr(LocalStore, "publish", publish)
    path = CompileCoordinator(local, CompilePolicy()).get_or_compile(
        FakeCompile(KEY, str(tmp_path / "log")).job()
    )
    assert (path / f"graph_{KEY}.neff").is_file()
    assert local.find(KEY) is None


def test_a_compile_that_finds_no_room_names_the_disk_and_is_not_tried_again(local):
    calls = []

    def compile_(workdir):
        calls.append(workdir)
        (workdir / "out").symlink_to("/dev/full")
        (workdir / "out").write_text("x")

    with pytest.raises(CompileError, match=r"disk full: .*No space left on device") as caught:
        CompileCoordinator(local, CompilePolicy()).get_or_compile(CompileJob(KEY, compile_))
    assert len(calls) == 1
    assert str(calls[0]) in str(caught.value)
    assert not calls[0].exists()


def test_a_damaged_entry_is_told_of_once(local, tmp_path, caplog):
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    store = TieredStore([local, PosixStore(tmp_path / "shared")])
    path = CompileCoordinator(store, CompilePolicy()).get_or_compile(job)
    (path / f"graph_{KEY}.neff").write_bytes(b"short")
    with caplog.at_level("WARNING", logger="neuron_store"):
        CompileCoordinator(store, CompilePolicy()).get_or_compile(job)
    assert len(starts(tmp_path / "log")) == 2
    told = [r.getMessage() for r in caplog.records if "is damaged" in r.getMessage()]
    assert len(told) == 1, told


def test_an_artifact_made_from_other_components_is_refused(local, tmp_path):
    """Pitfall 12."""
    coordinator = CompileCoordinator(local, CompilePolicy())
    compile_ = FakeCompile(KEY, str(tmp_path / "log"))
    coordinator.get_or_compile(compile_.job(components={"target": "trn2", "flags": ["-O1"]}))
    assert coordinator.get_or_compile(compile_.job(components={"flags": ["-O1"], "target": "trn2"}))
    with pytest.raises(ArtifactMismatch) as caught:
        coordinator.get_or_compile(compile_.job(components={"target": "trn1", "flags": ["-O1"]}))
    assert caught.value.differences == {"target": ("trn2", "trn1")}


def test_a_damaged_local_artifact_is_compiled_again_and_healed(local, tmp_path):
    """Pitfall 5: truncated, with its completion mark present."""
    coordinator = CompileCoordinator(local, CompilePolicy())
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    path = coordinator.get_or_compile(job)
    (path / f"graph_{KEY}.neff").write_bytes(b"N")
    assert coordinator.get_or_compile(job) == path
    assert len(starts(tmp_path / "log")) == 2
    assert local.verify(KEY)


def test_the_neuron_stacks_own_entry_is_a_hit(local, tmp_path):
    entry = local.root / KEY
    entry.mkdir(parents=True)
    write_entry(entry, KEY)
    coordinator = CompileCoordinator(local, CompilePolicy())
    log = str(tmp_path / "log")
    assert coordinator.get_or_compile(FakeCompile(KEY, log).job(components={"a": 1})) == entry
    assert starts(log) == []


def test_an_entry_that_the_neuron_stack_left_half_done_is_replaced(local, tmp_path):
    entry = local.root / KEY
    entry.mkdir(parents=True)
    write_entry(entry, KEY, mark=False)
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    assert CompileCoordinator(local, CompilePolicy()).get_or_compile(job) == entry
    assert local.find(KEY) is not None


def test_a_compile_without_the_completion_mark_gets_one(local):
    def compile_(workdir):
        write_entry(workdir, KEY, mark=False)

    path = CompileCoordinator(local, CompilePolicy()).get_or_compile(CompileJob(KEY, compile_))
    mark = (path / ".compilation_complete").read_text()
    assert f"neff_size:{(path / f'graph_{KEY}.neff').stat().st_size}" in mark


@pytest.mark.parametrize("what", ["nothing", "link"])
def test_a_compile_that_leaves_no_artifact_is_an_error(local, what):
    def compile_(workdir):
        if what == "link":
            (workdir / "out").symlink_to("/etc/passwd")

    with pytest.raises(CompileError, match=r"no file|link"):
        CompileCoordinator(local, CompilePolicy()).get_or_compile(CompileJob(KEY, compile_))
    assert leftovers(local.root) == []


def test_promote_auto_promotes_after_the_compile_and_trouble_with_that_is_no_error(tmp_path):
    policy = CompilePolicy(promote=True)
    shared = PosixStore(tmp_path / "shared")
    store = TieredStore([LocalStore(tmp_path / "root"), shared])
    CompileCoordinator(store, policy).get_or_compile(FakeCompile(KEY, str(tmp_path / "log")).job())
    assert shared.verify(KEY)
    closed = TieredStore([LocalStore(tmp_path / "b"), ReadOnlyStore(PosixStore(tmp_path / "ro"))])
    assert CompileCoordinator(closed, policy).get_or_compile(
        FakeCompile(KEY, str(tmp_path / "log")).job()
    )

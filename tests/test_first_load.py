"""Digests of local artifacts: read once for processes that start together, and read again when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from neuron_store import (
    ArtifactCorrupt,
    CompileCoordinator,
    ConfigError,
    Publication,
    TieredStore,
    first_load,
    open_store,
)
from neuron_store.first_load import process_group, runtime_directory
from neuron_store.policy import CompilePolicy
from neuron_store.testing import make_source
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile, starts

KEY = "0123456789abcdef0123456789abcdef"
FILES = {"graph.bin": b"payload" * 5000}


class Counting(LocalStore):
    """Leaves a line in a file at each reading of all bytes, so that processes can be counted."""

    log = ""

    def verify(self, key):
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(0.05)
        return super().verify(key)


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """A runtime directory of the test's own."""
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    first_load._groups.clear()
    return place


@pytest.fixture
def local(tmp_path):
    store = Counting(tmp_path / "local")
    store.log = str(tmp_path / "reads")
    store.publish(*make_source(tmp_path / "source", KEY, FILES))
    return store


def reads(local):
    try:
        with open(local.log, encoding="utf-8") as log:
            return log.read().splitlines()
    except FileNotFoundError:
        return []


def rot(root, name="graph.bin"):
    """Other bytes of the same size."""
    path = root / KEY / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def load(local, results, barrier=None):
    if barrier is not None:
        barrier.wait()
    try:
        results.put(str(TieredStore([local], verify="first").path_of(KEY)))
    except Exception as error:
        results.put(type(error).__name__)


def test_thirty_two_ranks_read_an_artifact_once(local):
    context = multiprocessing.get_context("fork")
    results, barrier = context.Queue(), context.Barrier(32)
    ranks = [context.Process(target=load, args=(local, results, barrier)) for _ in range(32)]
    for rank in ranks:
        rank.start()
    told = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert told == [str(local.root / KEY)] * 32
    assert len(reads(local)) == 1


def test_another_process_group_reads_it_again(local):
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def grouped():
        os.setpgid(0, 0)
        load(local, results)

    for _ in range(2):
        child = context.Process(target=grouped)
        child.start()
        results.get(timeout=60)
        child.join()
    assert len(reads(local)) == 2


def test_a_group_is_told_from_a_later_one_of_the_same_number(monkeypatch, local):
    TieredStore([local], verify="first").path_of(KEY)
    TieredStore([local], verify="first").path_of(KEY)
    assert len(reads(local)) == 1
    started = first_load._start_time(os.getpgid(0))
    monkeypatch.setattr(first_load, "_start_time", lambda pid: str(int(started) + 1))
    first_load._groups.clear()
    TieredStore([local], verify="first").path_of(KEY)
    assert len(reads(local)) == 2


def test_a_group_whose_leader_is_gone_shares_no_note(local, tmp_path):
    """Its number may be used again by a process, whose start time would be another's."""
    code = """
    import os, sys, time
    if os.fork():
        os._exit(0)
    while os.path.exists(f"/proc/{os.getpgid(0)}"):
        time.sleep(0.01)
    from neuron_store.first_load import process_group
    open(sys.argv[1], "w").write(repr(process_group()))
    """
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(out)], check=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert out.read_text() == "None"


def test_ranks_that_torchrun_gave_a_session_each_are_one_group():
    code = "from neuron_store.first_load import process_group; print(process_group())"
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            start_new_session=True,
            env=env,
        ).stdout.strip()
        for _ in range(2)
    }
    assert told == {process_group()}


def test_the_same_process_looks_only_at_the_directory_again(local):
    store = TieredStore([local], verify="first")
    for _ in range(10):
        assert store.path_of(KEY) == local.root / KEY
    assert len(reads(local)) == 1


def test_an_entry_that_was_published_again_or_written_to_is_read_again(local, tmp_path):
    TieredStore([local], verify="first").path_of(KEY)
    local.delete(KEY)
    local.publish(*make_source(tmp_path / "again", KEY, {"graph.bin": b"other"}))
    store = TieredStore([local], verify="first")
    store.path_of(KEY)
    assert len(reads(local)) == 2
    rot(local.root)
    with pytest.raises(ArtifactCorrupt):
        TieredStore([local], verify="first").path_of(KEY)


def test_what_this_process_has_just_published_or_fetched_is_not_read_again(local, tmp_path):
    other = Counting(tmp_path / "other")
    other.log = local.log
    store = TieredStore([other, PosixStore(local.root)], verify="first")
    assert store.get(KEY) == other.root / KEY
    assert store.get(KEY) == other.root / KEY
    # Nor by its neighbours.
    assert TieredStore([other], verify="first").path_of(KEY)
    assert reads(local) == []


def test_what_was_published_some_time_ago_is_read_again(local, tmp_path, monkeypatch):
    store = TieredStore([local], verify="first")
    monkeypatch.setattr(first_load, "_FRESH_SECONDS", -1.0)
    store.publish(*make_source(tmp_path / "source2", KEY[::-1], FILES))
    assert store.path_of(KEY[::-1]) is not None
    assert len(reads(local)) == 1


def test_a_publish_that_met_another_one_vouches_for_nothing(local, tmp_path):
    store = TieredStore([local], verify="first")
    assert store.publish(*make_source(tmp_path / "source2", KEY, FILES)) is Publication.PRESENT
    assert store.path_of(KEY) is not None
    assert len(reads(local)) == 1


def test_a_reader_that_is_killed_leaves_the_turn_to_another(local):
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def die(self, key):
        os.kill(os.getpid(), signal.SIGKILL)

    def rank():
        Counting.verify = die
        load(local, results)

    child = context.Process(target=rank)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert TieredStore([local], verify="first").path_of(KEY)
    assert len(reads(local)) == 1


@pytest.mark.parametrize(("mode", "times"), [("always", 3), ("first", 1), ("size", 0)])
def test_the_setting_says_how_often(local, tmp_path, monkeypatch, mode, times):
    monkeypatch.setenv("NEURON_STORE_VERIFY", mode)
    for name in ("NEURON_STORE_TIERS", "NEURON_LIBTORCH_REMOTE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    calls = []

    def counted(self, key):
        calls.append(key)
        return super(LocalStore, self).verify(key)

    monkeypatch.setattr(LocalStore, "verify", counted)
    with open_store([], local=local.root) as store:
        for _ in range(3):
            store.get(KEY)
    assert calls == [KEY] * times


@pytest.mark.parametrize("damage", ["rot", "truncated", "missing"])
@pytest.mark.parametrize("mode", ["always", "first"])
def test_a_damaged_local_entry_is_healed_from_a_shared_tier(tmp_path, damage, mode):
    """Pitfall 5: a bad artifact with its completion mark present is a hit for ever."""
    local, shared = LocalStore(tmp_path / "local"), PosixStore(tmp_path / "shared")
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    CompileCoordinator(TieredStore([local]), CompilePolicy()).get_or_compile(job)
    TieredStore([local, shared]).promote(KEY)
    neff = local.root / KEY / f"graph_{KEY}.neff"
    good = neff.read_bytes()
    if damage == "rot":
        rot(local.root, neff.name)
    elif damage == "truncated":
        neff.write_bytes(good[:-1])
    else:
        neff.unlink()
    assert (local.root / KEY / ".compilation_complete").exists()
    store = TieredStore([local, shared], verify=mode)
    coordinator = CompileCoordinator(store, CompilePolicy())
    path = coordinator.get_or_compile(job)
    assert (path / neff.name).read_bytes() == good
    assert coordinator.counts == {"fetched": 1}
    assert path == local.root / KEY
    assert len(list((local.root / ".quarantine").iterdir())) == 1
    local.verify(KEY)
    assert len(starts(tmp_path / "log")) == 1


def test_a_damaged_local_entry_that_no_tier_has_is_compiled_again(tmp_path):
    """Pitfall 5."""
    local = LocalStore(tmp_path / "local")
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    CompileCoordinator(TieredStore([local]), CompilePolicy()).get_or_compile(job)
    rot(local.root, f"graph_{KEY}.neff")
    path = CompileCoordinator(TieredStore([local], verify="first"), CompilePolicy()).get_or_compile(
        job
    )
    assert path == local.root / KEY
    assert len(starts(tmp_path / "log")) == 2
    local.verify(KEY)


@pytest.mark.parametrize("with_shared", [True, False])
def test_a_damaged_entry_that_cannot_be_moved_is_still_not_used(
    tmp_path, monkeypatch, with_shared, caplog
):
    local, shared = LocalStore(tmp_path / "local"), PosixStore(tmp_path / "shared")
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    CompileCoordinator(TieredStore([local]), CompilePolicy()).get_or_compile(job)
    TieredStore([local, shared]).promote(KEY)
    good = (local.root / KEY / f"graph_{KEY}.neff").read_bytes()
    rot(local.root, f"graph_{KEY}.neff")
    monkeypatch.setattr(LocalStore, "set_aside", lambda self, key: False)
    tiers = [local, shared] if with_shared else [local]
    path = CompileCoordinator(TieredStore(tiers, verify="first"), CompilePolicy()).get_or_compile(
        job
    )
    assert path != local.root / KEY
    assert (path / f"graph_{KEY}.neff").read_bytes() == good


def test_an_entry_in_use_by_its_lock_holder_is_not_taken_away(local):
    rot(local.root)
    other = LocalStore(local.root)
    with other.lock(KEY, 1.0):
        child = os.fork()
        if child == 0:
            os._exit(int(LocalStore(local.root).set_aside(KEY)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (local.root / KEY).is_dir()
    assert LocalStore(local.root).set_aside(KEY)
    assert not (local.root / KEY).exists()


def test_a_whole_entry_is_not_set_aside(local):
    assert not local.set_aside(KEY)
    local.verify(KEY)


class TestRuntimeDirectory:
    def test_it_is_this_users_own(self, runtime):
        assert runtime_directory() == f"{runtime}/neuron_store"
        assert (runtime / "neuron_store").stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("how", ["link", "open", "file"])
    def test_one_that_others_could_have_laid_there_is_not_used(self, runtime, how, local, tmp_path):
        place = runtime / "neuron_store"
        if how == "link":
            (tmp_path / "elsewhere").mkdir()
            place.symlink_to(tmp_path / "elsewhere")
        elif how == "open":
            place.mkdir()
            place.chmod(0o777)
        else:
            place.write_text("")
        assert runtime_directory() is None
        for _ in range(2):
            assert TieredStore([local], verify="first").path_of(KEY)
        assert len(reads(local)) == 2

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory away")
    def test_a_strangers_is_not_used(self, runtime):
        (runtime / "neuron_store").mkdir(mode=0o700)
        os.chown(runtime / "neuron_store", 65534, 65534)
        assert runtime_directory() is None

    def test_without_one_of_the_session_it_lies_in_memory(self, monkeypatch, tmp_path):
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setattr(first_load, "_MEMORY", str(tmp_path))
        assert runtime_directory() == f"{tmp_path}/neuron_store-{os.getuid()}"

    def test_without_memory_it_lies_with_temporary_files(self, monkeypatch, tmp_path):
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setattr(first_load, "_MEMORY", str(tmp_path / "none"))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert runtime_directory() == f"{tmp_path}/neuron_store-{os.getuid()}"

    def test_notes_of_groups_that_are_gone_are_removed(self, runtime, local):
        stale = runtime / "neuron_store" / "verified" / f"{2**22 + 5}-1-{first_load._machine()}"
        kept = runtime / "neuron_store" / "verified" / f"{2**22 + 5}-1-another00000"
        long_ago = runtime / "neuron_store" / "verified" / f"{2**22 + 6}-1-another00000"
        for folder in (stale, kept, long_ago):
            folder.mkdir(parents=True)
        os.utime(long_ago, (0, time.time() - 8 * 86400))
        (runtime / "neuron_store").chmod(0o700)
        TieredStore([local], verify="first").path_of(KEY)
        assert not stale.exists()
        assert not long_ago.exists()
        assert kept.exists()

    def test_one_process_of_a_group_removes_them_and_not_each(self, local, monkeypatch):
        asked = []
        monkeypatch.setattr(first_load, "_forget_dead_groups", lambda *_: asked.append(os.getpid()))
        make = os.mkdir

        def others_were_first(path, mode=0o777):
            if process_group() in path:
                make(path, mode)
            make(path, mode)

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", others_were_first)
            assert TieredStore([local], verify="first").path_of(KEY)
        assert not asked


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_STORE_VERIFY", "sometimes")
    with pytest.raises(ConfigError, match="NEURON_STORE_VERIFY"):
        open_store([])

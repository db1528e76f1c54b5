"""The file system that fails: what it does, and what the rename tiers make of it."""

from __future__ import annotations

import errno
import fcntl
import functools
import multiprocessing
import os

import pytest

from neuron_store import CompileCoordinator, CompileJob, Publication, TieredStore, TierError
from neuron_store.testing import FaultyFiles, FileFault, make_source, race_publishers
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile, neff, starts

KEY = "7" * 32
FILES = {"f": b"bytes"}


def test_only_calls_below_the_root_count(tmp_path):
    (tmp_path / "root").mkdir()
    with FaultyFiles(tmp_path / "root") as files:
        (tmp_path / "elsewhere").write_bytes(b"x")
        (tmp_path / "root" / "here").write_bytes(b"x")
        descriptor = os.open(tmp_path / "root", os.O_RDONLY)
        os.stat("here", dir_fd=descriptor)
        os.close(descriptor)
    assert [call for call, _ in files.calls] == ["create", "open", "stat"]
    assert os.open.__module__ != "neuron_store.testing.faulty_files"


@pytest.mark.parametrize("done", [False, True])
def test_a_failing_rename_happens_or_not_as_asked(tmp_path, done):
    (tmp_path / "a").mkdir()
    with (
        FaultyFiles(tmp_path, FileFault(1, errno.EIO, done=done)) as files,
        pytest.raises(OSError, match="error") as caught,
    ):
        os.rename(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.EIO
    assert (tmp_path / "b").exists() is done
    assert files.injected == [("rename", str(tmp_path / "b"))]


def test_a_full_disk_stays_full_and_can_be_emptied(tmp_path):
    (tmp_path / "old").write_bytes(b"x")
    with FaultyFiles(tmp_path, FileFault(1, errno.ENOSPC, lasting=True)):
        for number in range(3):
            with pytest.raises(OSError, match="space"):
                (tmp_path / str(number)).write_bytes(b"x")
        (tmp_path / "old").unlink()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("at", [0, -1])
def test_a_fault_that_would_never_come_is_refused(at):
    with pytest.raises(ValueError, match=f"at={at}: calls are counted from 1"):
        FileFault(at)


def test_a_short_write_takes_one_byte(tmp_path):
    descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_WRONLY)
    with FaultyFiles(tmp_path, FileFault(1, short=True)):
        assert os.write(descriptor, b"abc") == 1
        assert os.write(descriptor, b"bc") == 2
    os.close(descriptor)
    assert (tmp_path / "f").read_bytes() == b"abc"


def test_a_miss_is_remembered_until_the_directory_is_listed(tmp_path):
    with FaultyFiles(tmp_path, remembers_misses=60):
        assert not (tmp_path / "k").exists()
        os.system(f"mkdir {tmp_path}/k")  # another client
        assert not (tmp_path / "k").exists()
        with pytest.raises(FileExistsError):
            os.mkdir(tmp_path / "k")
        assert os.listdir(tmp_path) == ["k"]
        assert (tmp_path / "k").exists()


def test_the_loser_that_cannot_see_the_winner_answers_all_the_same(tmp_path):
    """Pitfall 28: a look-up says "not there" for 30 s, and the rename says "taken"."""
    tier = PosixStore(tmp_path / "tier")
    tier.publish(*make_source(tmp_path / "0", "0" * 32, FILES))
    winner = make_source(tmp_path / "1", KEY, FILES)
    loser = make_source(tmp_path / "2", KEY, {"f": b"other"})
    with FaultyFiles(tier.root, remembers_misses=60):
        assert tier.find(KEY) is None
        publish_elsewhere(tier.root, winner)
        assert tier.find(KEY) is None, "still hidden"
        assert tier.publish(*loser) is Publication.CONFLICT
        assert tier.find(KEY) is not None


def publish_elsewhere(root, source):
    """By a process without the faults of this one."""
    process = multiprocessing.get_context("spawn").Process(
        target=publish_there, args=(str(root), source)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


def publish_there(root, source):
    assert PosixStore(root).publish(*source) is Publication.CREATED


def unlocked(root):
    """In each process: a local tier on a file system whose flock excludes nobody."""
    FaultyFiles(root, flock_excludes=False).__enter__()
    return LocalStore(root)


def test_with_locks_that_exclude_nobody_the_data_stays_right(tmp_path):
    """Pitfall 29: flock is a no-op on some mounts; only work is doubled."""
    os.makedirs(tmp_path / "tier")
    with FaultyFiles(tmp_path / "tier", flock_excludes=False):
        one = os.open(tmp_path / "tier" / "lock", os.O_CREAT | os.O_RDWR)
        two = os.open(tmp_path / "tier" / "lock", os.O_RDWR)
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(one)
        os.close(two)
    keys = [f"{n:032x}" for n in range(20)]
    factory = functools.partial(unlocked, str(tmp_path / "tier"))
    for race in race_publishers(factory, keys=keys, writers=6, same=False):
        assert len(race.winners) == 1, race
        assert set(race.answers) == {"CREATED", "CONFLICT"}
    assert sorted(LocalStore(tmp_path / "tier").keys()) == keys


def test_with_locks_that_exclude_nobody_two_coordinators_only_double_the_work(tmp_path):
    """Pitfall 29: both compile at the same time, and both have one whole artifact."""
    root, log = tmp_path / "tier", str(tmp_path / "log")
    context = multiprocessing.get_context("fork")
    both_compile, told = context.Barrier(2), context.Queue()

    def rank(payload):
        compile_ = FakeCompile(KEY, log, payload=payload)

        def compile_beside_the_other(workdir):
            # Were one kept out by the lock, the other would wait here in vain.
            both_compile.wait(60)
            compile_(workdir)

        with FaultyFiles(root, flock_excludes=False):
            coordinator = CompileCoordinator(TieredStore([LocalStore(root)]))
            told.put(coordinator.get_or_compile(CompileJob(KEY, compile_beside_the_other)))

    payloads = [b"one" * 5000, b"two" * 5000]
    ranks = [context.Process(target=rank, args=(payload,)) for payload in payloads]
    for process in ranks:
        process.start()
    try:
        paths = {told.get(timeout=90) for _ in ranks}
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert paths == {root / KEY}
    assert len(starts(log)) == 2, "doubled, and no more than that"
    assert (root / KEY / f"graph_{KEY}.neff").read_bytes() in [neff(each) for each in payloads]
    assert LocalStore(root).verify(KEY).has_digests
    assert list(LocalStore(root).keys()) == [KEY]
    assert os.listdir(root / ".staging") == []


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY])
@pytest.mark.parametrize("operation", ["publish", "delete", "keys"])
def test_a_stale_handle_is_tried_again_and_soon_a_clear_error(tmp_path, code, operation):
    """Pitfall 30: ESTALE and EBUSY from a peer's rename pass; what stays is named."""
    tier = PosixStore(tmp_path / "tier")
    source = make_source(tmp_path / "source", KEY, FILES)
    tier.publish(*make_source(tmp_path / "0", "0" * 32, FILES))
    if operation == "delete":
        tier.publish(*source)
    act = {
        "publish": lambda: tier.publish(*source),
        "delete": lambda: tier.delete(KEY),
        "keys": lambda: list(tier.keys()),
    }[operation]
    with FaultyFiles(tier.root, FileFault(1, code)) as files:
        act()
    assert len(files.injected) == 1


def test_a_disk_that_is_full_costs_no_compile(tmp_path):
    """Pitfall 31: no visible entry, and the result is returned all the same."""
    job = FakeCompile(KEY, str(tmp_path / "log")).job()
    with TieredStore([LocalStore(tmp_path / "local")]) as store:
        # Full from the moment on when the result is to be flushed.
        with FaultyFiles(tmp_path / "local") as counted:
            path = CompileCoordinator(store).get_or_compile(job)
        at = next(n for n, (call, _) in enumerate(counted.calls, 1) if call == "fsync")
        store.delete(KEY)
        fault = FileFault(at, errno.ENOSPC, lasting=True)
        with FaultyFiles(tmp_path / "local", fault) as files:
            path = CompileCoordinator(store).get_or_compile(job)
        assert files.injected
        assert (path / f"graph_{KEY}.neff").exists()


def test_deleting_works_on_a_full_disk(tmp_path):
    """Pitfalls 31 and 40: what frees space must not need any."""
    tier = PosixStore(tmp_path / "tier")
    tier.publish(*make_source(tmp_path / "source", KEY, FILES))
    with FaultyFiles(tier.root, FileFault(1, errno.ENOSPC, lasting=True)) as files:
        assert tier.delete(KEY) is True
    assert files.injected
    assert list(tier.keys()) == []
    assert os.listdir(tier.root / ".staging") == []


def test_a_delete_that_worked_says_so_whatever_the_rename_reported(tmp_path):
    """Pitfall 32: success is success."""
    tier = PosixStore(tmp_path / "tier")
    source = make_source(tmp_path / "source", KEY, FILES)
    for code in (errno.ENOENT, errno.EIO):
        tier.publish(*source)
        with FaultyFiles(tier.root) as counted:
            tier.delete(KEY)
        at = [call for call, _ in counted.calls].index("rename") + 1
        tier.publish(*source)
        with FaultyFiles(tier.root, FileFault(at, code, done=True)) as files:
            assert tier.delete(KEY) is True
        assert len(files.injected) == 1


def test_a_source_on_another_file_system_is_copied(tmp_path):
    """Pitfall 44: EXDEV; staging lies inside the tier's root, so only taking over can meet it."""
    tier = PosixStore(tmp_path / "tier")
    # The first publish makes the tier's own directories, which takes calls of its own.
    tier.publish(*make_source(tmp_path / "first", KEY, FILES))
    tier.delete(KEY)
    source = make_source(tmp_path / "source", KEY, FILES)
    with FaultyFiles(tier.root) as counted:
        tier.publish(*source, consume=True)
    at = [call for call, _ in counted.calls].index("rename") + 1
    tier.delete(KEY)
    source = make_source(tmp_path / "again", KEY, FILES)
    with FaultyFiles(tier.root, FileFault(at, errno.EXDEV)) as files:
        assert tier.publish(*source, consume=True) is Publication.CREATED
    assert len(files.injected) == 1
    assert tier.verify(KEY).size == len(FILES["f"])


def test_trouble_that_stays_is_a_clear_error(tmp_path):
    tier = PosixStore(tmp_path / "tier")
    source = make_source(tmp_path / "source", KEY, FILES)
    with (
        FaultyFiles(tier.root, FileFault(1, errno.EIO, lasting=True)),
        pytest.raises(TierError, match=str(tier.root)),
    ):
        tier.publish(*source)
    assert tier.publish(*source) is Publication.CREATED

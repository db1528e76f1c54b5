"""The file lock under the key's lock: who gets it, who loses it, and what it is not taken on."""

from __future__ import annotations

import fcntl
import os
import signal
import threading

import filelock
import pytest

from neuron_store import _flock


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "lock")


@pytest.fixture
def before():
    """Other tests of this process may hold some."""
    return set(_flock._open)


def test_filelock_and_this_exclude_each_other(path):
    """The Neuron stack takes the same file by filelock."""
    ours = _flock.take(path)
    assert ours is not None
    theirs = filelock.FileLock(path)
    with pytest.raises(filelock.Timeout):
        theirs.acquire(blocking=False)
    _flock.give_up(ours)
    with theirs:
        assert _flock.take(path) is None
    again = _flock.take(path)
    assert again is not None
    _flock.give_up(again)


def test_two_threads_of_a_process_exclude_each_other(path):
    held = _flock.take(path)
    got = []
    thread = threading.Thread(target=lambda: got.append(_flock.take(path)))
    thread.start()
    thread.join(30)
    assert got == [None]
    _flock.give_up(held)


def test_a_child_of_a_killed_holder_does_not_keep_it(path):
    """Forked while it was held, and alive after its parent."""
    ready, tell = os.pipe()
    go, let = os.pipe()
    parent = os.fork()
    if not parent:
        assert _flock.take(path) is not None
        if not os.fork():
            os.close(let)
            os.write(tell, b"%d" % os.getpid())
            os.read(go, 1)
            os._exit(0)
        signal.pause()
    grandchild = int(os.read(ready, 20))
    try:
        assert _flock.take(path) is None
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        os.kill(grandchild, 0)
        held = _flock.take(path)
        assert held is not None
        _flock.give_up(held)
    finally:
        for descriptor in (let, go, ready, tell):
            os.close(descriptor)


def test_no_fork_catches_a_lock_between_its_opening_and_its_record(tmp_path):
    stop = threading.Event()

    def work(number):
        path = str(tmp_path / f"lock{number}")
        while not stop.is_set():
            held = _flock.take(path)
            if held is not None:
                _flock.give_up(held)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    statuses = []
    try:
        for _ in range(100):
            pid = os.fork()
            if not pid:
                there = "/proc/self/fd"
                names = [os.path.realpath(f"{there}/{name}") for name in os.listdir(there)]
                os._exit(any(name.startswith(f"{tmp_path}/") for name in names))
            statuses.append(os.waitpid(pid, 0)[1])
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert statuses == [0] * 100


def test_a_file_that_is_unlinked_before_its_lock_is_there_is_left_for_the_new_one(
    path, monkeypatch
):
    real, unlinked = fcntl.flock, []

    def flock(descriptor, how):
        if not unlinked:
            os.unlink(path)
            unlinked.append(path)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    held = _flock.take(path)
    assert os.path.samestat(os.fstat(held), os.stat(path))
    assert _flock.take(path) is None
    _flock.give_up(held)


def test_one_that_never_keeps_its_name_is_an_error(path, before, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.path.exists(path) and os.unlink(path))
    with pytest.raises(OSError, match="removed again and again"):
        _flock.take(path)
    assert _flock._open == before


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_a_file_is_locked(tmp_path, path, before, kind):
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"kept")
        os.symlink(tmp_path / "elsewhere", path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkdir(path)
    with pytest.raises(OSError, match=r"symbolic|regular|directory"):
        _flock.take(path)
    assert _flock._open == before


def test_a_file_system_without_locks_is_an_error_and_leaves_nothing_open(path, before, monkeypatch):
    def flock(*_):
        raise OSError(37, os.strerror(37))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=os.strerror(37)):
        _flock.take(path)
    assert _flock._open == before

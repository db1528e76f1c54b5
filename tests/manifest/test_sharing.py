"""Keys that processes share out among themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from neuron_store.manifest._sharing import Keys, shared_out

CORES = sorted(os.sched_getaffinity(0))


def names(count):
    return [f"k{number:05}" for number in range(count)]


@pytest.mark.parametrize("count", [5, 1024, 5000])
def test_threads_of_several_processes_take_each_key_once_and_in_order(count):
    keys = names(count)
    taken = {}

    def work(rest, tell):
        def take(_):
            mine = list(rest)
            assert mine == sorted(mine)
            for key in mine:
                tell({"key": key, "pid": os.getpid()})

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(take, range(4)))

    for key, result in shared_out(keys, 3, work):
        assert key not in taken
        taken[key] = result
    assert sorted(taken) == keys
    assert {type(result) for result in taken.values()} == {dict}


def test_a_slow_process_leaves_its_keys_to_the_others(tmp_path):
    """The first process waits until the second one has done everything else."""
    keys = names(40)
    done = tmp_path / "done"

    def work(rest, tell):
        first = next(rest, None)
        if first == keys[0]:
            while not done.exists():
                os.sched_yield()
        for key in (first, *rest):
            if key is not None:
                tell({"key": key, "pid": os.getpid()})

    told, pids = [], {}
    for key, result in shared_out(keys, 2, work):
        told.append(key)
        pids.setdefault(result["pid"], []).append(key)
        if len(told) == len(keys) - 1:
            done.touch()
    assert sorted(told) == keys
    assert sorted(map(len, pids.values())) == [1, len(keys) - 1]


def test_each_of_as_many_processes_as_there_are_cores_stays_on_its_own():
    def work(rest, tell):
        for key in rest:
            tell({"key": key, "cores": sorted(os.sched_getaffinity(0))})
            # Until the other ones have some, too.
            os.sched_yield()

    found = {tuple(r["cores"]) for _, r in shared_out(names(200), len(CORES), work)}
    assert all(len(cores) == 1 for cores in found)
    assert found <= {(core,) for core in CORES}
    assert sorted(os.sched_getaffinity(0)) == CORES


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_fewer_processes_than_cores_run_anywhere():
    def work(rest, tell):
        for key in rest:
            tell({"key": key, "cores": sorted(os.sched_getaffinity(0))})

    found = list(shared_out(names(4), len(CORES) - 1, work))
    assert all(result["cores"] == CORES for _, result in found)


def test_keys_that_nobody_is_left_for_are_told_with_how_the_processes_ended():
    def work(rest, tell):
        tell({"key": next(rest)})
        os._exit(7)

    found = dict(shared_out(names(5), 2, work))
    assert sum(isinstance(result, str) for result in found.values()) == 3
    words = {result for result in found.values() if isinstance(result, str)}
    assert words == {"the process that worked on it ended early (status 7, status 7)"}


def test_no_keys_are_none_to_take():
    keys = Keys([])
    assert list(keys) == []
    keys.close()
    assert list(shared_out([], 2, lambda rest, _: list(rest))) == []


def test_nothing_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    list(shared_out(names(3), 2, lambda rest, tell: [tell({"key": key}) for key in rest]))
    assert len(os.listdir("/proc/self/fd")) == before


HANGING = """
import os, time
from neuron_store.manifest._sharing import shared_out
def work(rest, tell):
    for key in rest:
        tell({"key": key, "pid": os.getpid()})
        time.sleep(600)
for _, result in shared_out(["a", "b"], 2, work):
    print(result["pid"], flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_children_of_a_parent_that_is_killed_end_with_it(how):
    parent = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)
    with parent:
        children = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(os.path.exists(f"/proc/{child}") for child in children)
        parent.send_signal(how)
    deadline = time.monotonic() + 60
    while any(lives(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False

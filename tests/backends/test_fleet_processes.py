"""Pitfall 26: processes with local tiers of their own and one shared tier compile a key once."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path

import attrs
import pytest

from neuron_store import CompileCoordinator, TieredStore
from neuron_store.policy import CompilePolicy
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile, neff, starts

KEY = "0123456789abcdef0123456789abcdef"
# Twenty spawned interpreters are half a minute of importing.
NODES = {"fork": 20, "spawn": 8}

pytestmark = pytest.mark.slow


class Counted(PosixStore):
    """Writes down when it is asked for a lease or an artifact."""

    diary = ""

    def _note(self):
        with open(self.diary, "a", encoding="utf-8") as file:
            file.write(f"{time.monotonic()} {os.getpid()}\n")

    def lease(self, key, ttl):
        self._note()
        return super().lease(key, ttl)

    def find(self, key):
        self._note()
        return super().find(key)


def open_counted(root, diary):
    store = Counted(root)
    store.diary = diary
    return store


def open_s3(address, url):
    from neuron_store_backends.s3 import S3Store

    # By its access key the server knows whose request it is.
    os.environ["AWS_ACCESS_KEY_ID"] = f"node{os.getpid()}"
    return S3Store(address, endpoint_url=url)


@attrs.frozen
class Told:
    pid: int
    did: dict
    payload: bytes | None
    error: str | None


def _node(local, shared, policy, compile_, meeting):
    barrier, results = meeting
    did, payload, error = {}, None, None
    logging.basicConfig()
    try:
        # A busy machine's slow server is no tier in trouble.
        store = TieredStore([LocalStore(local), shared()], deadline=120)
        coordinator = CompileCoordinator(store, policy)
        barrier.wait(120)
        path = coordinator.get_or_compile(compile_.job())
        store.local.verify(KEY)
        payload = Path(path, f"graph_{KEY}.neff").read_bytes()
        did = dict(coordinator.counts)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    results.put(Told(os.getpid(), did, payload, error))


class Nodes:
    """As many of them as the method bears."""

    def __init__(self, folder, shared, method):
        self.folder, self.shared = folder, shared
        self.count = NODES[method]
        self.log = str(folder / "log")
        self.context = multiprocessing.get_context(method)
        self.results = self.context.Queue()
        self.processes = []

    def start(self, seconds, ttl):
        policy = CompilePolicy(fleet_lease=True, lease_ttl=ttl, timeout=150)
        self.barrier = self.context.Barrier(self.count)
        compile_ = FakeCompile(KEY, self.log, seconds=seconds)
        for n in range(self.count):
            args = (str(self.folder / f"node{n}"), self.shared, policy, compile_)
            process = self.context.Process(
                target=_node, args=(*args, (self.barrier, self.results)), daemon=True
            )
            process.start()
            self.processes.append(process)

    def first_holder(self):
        end = time.monotonic() + 120
        while not starts(self.log):
            assert time.monotonic() < end, "nobody compiles"
            time.sleep(0.05)
        return starts(self.log)[0]

    def told(self, without=0):
        answers = [self.results.get(timeout=200) for _ in range(self.count - without)]
        assert [t.error for t in answers if t.error] == []
        assert {t.payload for t in answers} == {neff(b"payload")}
        return answers

    def stop(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def did(told):
    """What all of them did, in all."""
    return sum((Counter(t.did) for t in told), Counter())


class Place:
    """A shared tier, and who asked it when."""

    def __init__(self, opener, asked, leases):
        self.opener, self.asked, self.leases = opener, asked, leases


@pytest.fixture(params=["posix fork", "posix spawn", "s3 fork"])
def place(request, tmp_path):
    kind, method = request.param.split()
    if kind == "posix":
        root, diary = tmp_path / "shared", tmp_path / "diary"

        def asked():
            lines = [line.split() for line in diary.read_text().splitlines()]
            return [(float(at), pid) for at, pid in lines]

        opener = functools.partial(open_counted, str(root), str(diary))
        place = Place(opener, asked, lambda: os.listdir(root / ".leases"))
    else:
        pytest.importorskip("s3fs")
        s3 = request.getfixturevalue("s3_place")
        faults = request.getfixturevalue("moto").faults
        place = Place(
            functools.partial(open_s3, f"{s3.bucket}/{s3.prefix}", s3.url),
            lambda: [(at, who.removeprefix("node")) for at, who in faults.asked],
            lambda: [p for p in s3.paths() if p.startswith("lease/")],
        )
    place.nodes = Nodes(tmp_path, place.opener, method)
    yield place
    place.nodes.stop()


def busiest(asked, waiters, seconds, begin, end):
    """The most requests that one of the waiters made in so many seconds."""
    times = defaultdict(list)
    for at, who in asked:
        if who in waiters and begin <= at <= end:
            times[who].append(at)
    return max(
        sum(first <= t < first + seconds for t in mine) for mine in times.values() for first in mine
    )


def test_a_fleet_shares_one_compile_and_those_who_wait_ask_seldom(place):
    nodes = place.nodes
    nodes.start(seconds=12, ttl=20)
    holder = nodes.first_holder()
    began = time.monotonic()
    told = nodes.told()
    assert starts(nodes.log) == [holder]
    assert did(told) == {
        "compiled": 1,
        "fetched": nodes.count - 1,
    }
    assert place.leases() == []
    waiters = {str(t.pid) for t in told} - {str(holder)}
    # While it compiles; what they did on arrival, and fetch at the end, is not waiting.
    begin, end = began + 4, began + 11
    asked = place.asked()
    most = busiest(asked, waiters, 5, begin, end)
    in_all = sum(begin <= at <= end and who in waiters for at, who in asked)
    print(f"busiest waiter: {most} in 5 s; all: {in_all / (end - begin) / len(waiters):.2f}/s each")
    # Two a second; three more where a busy machine held some up and they came together.
    assert 1 <= most <= 13
    assert in_all <= 2 * (end - begin) * len(waiters)


def test_when_the_holder_is_killed_exactly_one_other_compiles(place):
    nodes = place.nodes
    nodes.start(seconds=3, ttl=4)
    holder = nodes.first_holder()
    os.kill(holder, signal.SIGKILL)
    told = nodes.told(without=1)
    assert len(starts(nodes.log)) == 2
    assert did(told) == {
        "compiled": 1,
        "fetched": nodes.count - 2,
    }
    assert place.leases() == []


def test_a_holder_that_is_stopped_for_longer_than_the_ttl_costs_one_more_compile(place):
    nodes = place.nodes
    nodes.start(seconds=3, ttl=4)
    holder = nodes.first_holder()
    os.kill(holder, signal.SIGSTOP)
    try:
        told = nodes.told(without=1)
        assert len(starts(nodes.log)) == 2
    finally:
        os.kill(holder, signal.SIGCONT)
    (last,) = nodes.told(without=nodes.count - 1)
    assert last.pid == holder
    assert len(starts(nodes.log)) == 2
    assert did(told) == {
        "compiled": 1,
        "fetched": nodes.count - 2,
    }
    assert place.leases() == []
    with place.opener() as shared:
        assert shared.verify(KEY)

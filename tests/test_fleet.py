"""Whose turn it is to compile: which tier gives the lease, what trouble with it ends in."""

from __future__ import annotations

import itertools
import os
import threading
import time

import pytest

from neuron_store import CompileCoordinator, CompileError, CompileTimeout, TieredStore, TierError
from neuron_store import fleet as fleet_module
from neuron_store.abc import ArtifactStore, Lease
from neuron_store.errors import LeaseHeld, ReadOnlyTier, Unsupported
from neuron_store.policy import CompilePolicy
from neuron_store.readonly import ReadOnlyStore
from neuron_store_backends.local import LocalStore
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile, starts

KEY = "0123456789abcdef0123456789abcdef"
TTL = 2.0
POLICY = CompilePolicy(fleet_lease=True, lease_ttl=TTL, timeout=60)


class NoLeases(PosixStore):
    """A third party's tier: the default stays legal."""

    lease = ArtifactStore.lease


class Refusing(PosixStore):
    asked = 0

    def lease(self, key, ttl):
        type(self).asked += 1
        raise Unsupported("lease", self.location, "If-Match is ignored")


class Troubled(PosixStore):
    """Its artifacts are fine, its leases are not."""

    asked = 0

    def lease(self, key, ttl):
        self.asked += 1
        raise TierError(self.location, "lease", "connection refused", key=key)


class Mute(PosixStore):
    def lease(self, key, ttl):
        time.sleep(3600)
        raise AssertionError


@pytest.fixture
def log(tmp_path):
    return str(tmp_path / "log")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The waits of these tests are short; the rate itself is tested on its own."""
    monkeypatch.setattr(fleet_module, "_SECONDS_A_REQUEST", 0.05)


def node(tmp_path, *shared, name="node", deadline=30.0):
    return TieredStore([LocalStore(tmp_path / name), *shared], deadline=deadline)


# -- which tier ---------------------------------------------------------------------------------


def test_the_first_shared_tier_that_can_gives_the_lease(tmp_path):
    one, two = PosixStore(tmp_path / "one"), PosixStore(tmp_path / "two")
    tiers = [ReadOnlyStore(PosixStore(tmp_path / "ro")), NoLeases(tmp_path / "none"), one, two]
    with node(tmp_path, *tiers).lease(KEY, TTL) as lease:
        assert lease.location == one.location
        assert lease.held()
        with pytest.raises(LeaseHeld):
            one.lease(KEY, TTL)
        two.lease(KEY, TTL).release()
    one.lease(KEY, TTL).release()


def test_without_a_tier_that_can_the_refusal_says_why_for_each(tmp_path):
    tiers = [ReadOnlyStore(MemoryStore("fleet-ro")), NoLeases(tmp_path / "a")]
    tiers.append(Refusing(tmp_path / "b"))
    with pytest.raises(Unsupported, match=r"read-only.*NoLeases has none.*If-Match is ignored"):
        node(tmp_path, *tiers).lease(KEY, TTL)
    with pytest.raises(Unsupported, match="no shared tier"):
        node(tmp_path).lease(KEY, TTL)


def test_a_tier_in_trouble_is_passed_over_and_told_when_no_other_can(tmp_path):
    troubled, good = Troubled(tmp_path / "troubled"), PosixStore(tmp_path / "good")
    with node(tmp_path, troubled, good).lease(KEY, TTL) as lease:
        assert lease.location == good.location
    with pytest.raises(TierError, match="connection refused"):
        node(tmp_path, troubled, ReadOnlyStore(good)).lease(KEY, TTL)


def test_a_tier_without_leases_is_no_tier_in_good_health(tmp_path):
    """An answer that costs the tier nothing must not hide that it fails."""

    class Broken(NoLeases):
        def fetch(self, key, into):
            raise TierError(self.location, "fetch", "connection refused", key=key)

    broken = Broken(tmp_path / "broken")
    store = node(tmp_path, broken)
    for n in range(5):
        with pytest.raises(TierError):
            store.get(f"{n:032x}")
        with pytest.raises(Unsupported):
            store.lease(KEY, TTL)
    assert store.counters()[broken.name].errors == 3


def test_a_lease_that_came_after_its_caller_had_gone_is_given_back(tmp_path):
    class Slow(PosixStore):
        def lease(self, key, ttl):
            time.sleep(1)
            return super().lease(key, ttl)

    slow = Slow(tmp_path / "slow")
    with pytest.raises(TierError, match="no answer"):
        node(tmp_path, slow, deadline=0.2).lease(KEY, 300)
    leases, end = tmp_path / "slow" / ".leases", time.monotonic() + 30
    while not leases.exists() or os.listdir(leases):
        assert time.monotonic() < end, "nobody gave it back"
        time.sleep(0.05)


# -- the coordinator ----------------------------------------------------------------------------


def test_the_leader_promotes_to_the_tier_that_gave_the_lease_and_to_no_other(tmp_path, log):
    leased, other = PosixStore(tmp_path / "leased"), PosixStore(tmp_path / "other")
    store = node(tmp_path, leased, other)
    CompileCoordinator(store, POLICY).get_or_compile(FakeCompile(KEY, log).job())
    assert leased.verify(KEY)
    assert other.find(KEY) is None
    assert os.listdir(tmp_path / "leased" / ".leases") == []
    second = node(tmp_path, leased, other, name="second")
    coordinator = CompileCoordinator(second, POLICY)
    assert coordinator.get_or_compile(FakeCompile(KEY, log).job())
    assert coordinator.counts == {"fetched": 1}
    assert len(starts(log)) == 1


def test_with_promote_auto_the_leader_promotes_to_every_tier(tmp_path, log):
    leased, other = PosixStore(tmp_path / "leased"), PosixStore(tmp_path / "other")
    policy = CompilePolicy(fleet_lease=True, lease_ttl=TTL, promote=True)
    CompileCoordinator(node(tmp_path, leased, other), policy).get_or_compile(
        FakeCompile(KEY, log).job()
    )
    assert leased.verify(KEY)
    assert other.verify(KEY)


def test_a_leader_that_lost_its_lease_promotes_nothing_and_has_its_own_result(
    tmp_path, log, caplog
):
    """Pitfall 26, fencing: the next holder promotes its own."""
    leased = PosixStore(tmp_path / "leased")
    folder = tmp_path / "leased" / ".leases" / KEY
    theirs = f"1,{'0' * 32},1,2,4711,elsewhere"

    def compile_(workdir):
        for name in os.listdir(folder):
            (folder / name).rename(folder / theirs)
        time.sleep(TTL)
        FakeCompile(KEY, log)(workdir)

    job = FakeCompile(KEY, log).job()
    path = CompileCoordinator(node(tmp_path, leased), POLICY).get_or_compile(
        type(job)(KEY, compile_)
    )
    assert (path / f"graph_{KEY}.neff").is_file()
    assert leased.find(KEY) is None
    assert "lost" in caplog.text
    assert os.listdir(folder) == [theirs]


def test_a_failed_compile_gives_the_lease_back_at_once(tmp_path, log):
    leased = PosixStore(tmp_path / "leased")
    held = []

    def compile_(workdir):
        with pytest.raises(LeaseHeld):
            PosixStore(tmp_path / "leased").lease(KEY, TTL)
        held.append(1)
        raise CompileError(KEY, "no such flag", permanent=True)

    job = type(FakeCompile(KEY, log).job())(KEY, compile_)
    with pytest.raises(CompileError):
        CompileCoordinator(node(tmp_path, leased), POLICY).get_or_compile(job)
    assert held == [1]
    with leased.lease(KEY, TTL) as lease:
        assert lease.held()


def test_waiting_ends_with_the_compilation_timeout_and_names_the_holder(tmp_path, log):
    leased = PosixStore(tmp_path / "leased")
    policy = CompilePolicy(fleet_lease=True, lease_ttl=TTL, timeout=1)
    with leased.lease(KEY, TTL), pytest.raises(CompileTimeout) as caught:
        CompileCoordinator(node(tmp_path, leased), policy).get_or_compile(
            FakeCompile(KEY, log).job()
        )
    assert caught.value.holder == f"pid {os.getpid()}"
    assert caught.value.host == os.uname().nodename
    assert starts(log) == []


def test_an_artifact_that_appears_ends_the_wait_though_the_lease_is_held_on(tmp_path, log):
    leased = PosixStore(tmp_path / "leased")
    other = node(tmp_path, leased, name="other")
    CompileCoordinator(other, CompilePolicy()).get_or_compile(FakeCompile(KEY, log).job())
    with leased.lease(KEY, TTL):
        promote = threading.Timer(0.5, other.promote, [KEY])
        promote.start()
        coordinator = CompileCoordinator(node(tmp_path, leased), POLICY)
        assert coordinator.get_or_compile(FakeCompile(KEY, log).job())
        promote.join()
    assert coordinator.counts == {"fetched": 1}
    assert len(starts(log)) == 1


def test_an_artifact_that_appears_damaged_is_waited_for_no_more(tmp_path, log):
    """It is there and cannot be had: the lease is what is left to wait for."""
    leased = PosixStore(tmp_path / "leased")
    other = node(tmp_path, leased, name="other")
    CompileCoordinator(other, CompilePolicy()).get_or_compile(FakeCompile(KEY, log).job())

    class Unfetchable(PosixStore):
        fetched = 0

        def fetch(self, key, into):
            self.fetched += 1
            raise TierError(self.location, "fetch", "connection reset", key=key)

    tier = Unfetchable(tmp_path / "leased")
    other.promote(KEY)
    lease = leased.lease(KEY, TTL)
    release = threading.Timer(1.0, lease.release)
    release.start()
    assert CompileCoordinator(node(tmp_path, tier), POLICY).get_or_compile(
        FakeCompile(KEY, log).job()
    )
    release.join()
    assert tier.fetched <= 3
    assert len(starts(log)) == 2


@pytest.mark.parametrize("kind", [Troubled, Refusing, NoLeases])
def test_without_a_lease_to_be_had_every_node_compiles_and_it_is_told_once(
    tmp_path, log, caplog, kind
):
    tier = kind(tmp_path / "tier")
    coordinator = CompileCoordinator(node(tmp_path, tier), POLICY)
    for n in range(5):
        assert coordinator.get_or_compile(FakeCompile(f"{n:032x}", log).job())
    assert len(starts(log)) == 5
    told = [r for r in caplog.records if "no fleet lease" in r.message and r.levelname == "WARNING"]
    assert len(told) == 1
    assert tier.find(f"{0:032x}") is None, "nobody waits, so nothing is promoted unasked"


def test_a_mute_lease_tier_costs_one_deadline_in_all(tmp_path, log):
    mute = Mute(tmp_path / "mute")
    coordinator = CompileCoordinator(node(tmp_path, mute, deadline=2), POLICY)
    began = time.monotonic()
    for n in range(20):
        assert coordinator.get_or_compile(FakeCompile(f"{n:032x}", log).job())
    # 20 keys at 2 s each would be 40 s; what is asserted is that it was not that.
    assert time.monotonic() - began < 30


def test_a_tier_that_goes_mute_during_the_compile_does_not_keep_its_result(
    tmp_path, log, monkeypatch
):
    """The promote hangs, and so do heartbeat and release."""
    leased = PosixStore(tmp_path / "leased")
    hung = threading.Event()

    def hang(*_args, **_facts):
        hung.wait(60)
        raise TierError(leased.location, "publish", "stale mount", key=KEY)

    monkeypatch.setattr(PosixStore, "publish", hang)
    monkeypatch.setattr("neuron_store_backends._lease_renaming._rename", hang)
    policy = CompilePolicy(fleet_lease=True, lease_ttl=0.5, timeout=60)
    try:
        path = CompileCoordinator(node(tmp_path, leased, deadline=0.5), policy).get_or_compile(
            FakeCompile(KEY, log).job()
        )
        assert not hung.is_set()
        assert (path / f"graph_{KEY}.neff").is_file()
    finally:
        hung.set()


def test_the_environment_switches_it_on(tmp_path, log, monkeypatch):
    monkeypatch.setenv("NEURON_STORE_FLEET_LEASE", "1")
    monkeypatch.setenv("NEURON_STORE_LEASE_TTL", "2.5")
    leased = PosixStore(tmp_path / "leased")
    CompileCoordinator(node(tmp_path, leased)).get_or_compile(FakeCompile(KEY, log).job())
    assert leased.verify(KEY)
    assert CompilePolicy.load().lease_ttl == 2.5


def test_switched_off_no_lease_is_asked_for(tmp_path, log):
    refusing = Refusing(tmp_path / "tier")
    before = Refusing.asked
    CompileCoordinator(node(tmp_path, refusing), CompilePolicy()).get_or_compile(
        FakeCompile(KEY, log).job()
    )
    assert Refusing.asked == before


# -- the rate -----------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds


class Held(ArtifactStore):
    """Another node holds the lease for ever. Notes when it was asked what."""

    location = "held"
    keys = delete = open_file = publish = None  # type: ignore[assignment]

    def __init__(self, clock, shared=1):
        self.clock = clock
        self.shared = (None,) * shared
        self.asked = []

    def lease(self, key, ttl) -> Lease:
        self.asked.append((self.clock.now, "lease"))
        raise LeaseHeld(key, "held", "pid 1", host="h")

    def find(self, key):
        self.asked += [(self.clock.now, "find")] * len(self.shared)


@pytest.mark.parametrize("shared", [1, 3])
def test_a_waiting_node_makes_at_most_two_requests_a_second_and_backs_off(monkeypatch, shared):
    monkeypatch.undo()
    clock = Clock()
    monkeypatch.setattr(fleet_module, "time", clock)
    monkeypatch.setattr(fleet_module, "_pace", fleet_module._Pace())
    store = Held(clock, shared)
    with pytest.raises(CompileTimeout):
        fleet_module.Fleet(store, 30.0, 300.0).turn(KEY, clock.now + 300)
    times = [at for at, _ in store.asked]
    for first in times:
        # Three tiers are looked at together, and made up for by the pause that follows.
        assert len([t for t in times if first <= t < first + 10]) <= 20 + shared
    late = [what for at, what in store.asked if at > 1100]
    assert len(late) / 200 <= (1 + shared) / 3, "it does not back off"
    assert {"lease", "find"} == set(late)
    looks = [at for at, what in store.asked if what == "lease"]
    assert max(b - a for a, b in itertools.pairwise(looks)) < 10, "a dead holder is noticed late"


def test_all_who_wait_in_a_process_share_the_rate(monkeypatch):
    monkeypatch.undo()
    pace, times = fleet_module._Pace(), []

    def ask():
        for _ in range(2):
            pace.take(1)
            times.append(time.monotonic())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(times) - min(times) >= 3.4


def test_read_only_everywhere_is_no_trouble(tmp_path, log):
    store = node(tmp_path, ReadOnlyStore(PosixStore(tmp_path / "ro")))
    assert CompileCoordinator(store, POLICY).get_or_compile(FakeCompile(KEY, log).job())
    with pytest.raises(ReadOnlyTier):
        store.shared[0].lease(KEY, TTL)

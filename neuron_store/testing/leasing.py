"""The part of the contract about leases, for tiers that have them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import pytest

from neuron_store.errors import ConfigError, InvalidKey, LeaseHeld, NeuronStoreError, Unsupported
from neuron_store.testing.killing import run_killed_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from neuron_store.abc import ArtifactStore, Lease

__all__ = ["LeaseContract"]

KEY = "fedcba9876543210fedcba9876543210"
_PATIENCE = 120.0


class LeaseContract:
    """Part of `ArtifactStoreContract`. Every test skips on a tier that has no leases."""

    method: str = "spawn"
    killable: bool = True
    lease_ttl: float = 2.0
    """Seconds; long enough for a busy machine's heartbeats."""

    @pytest.fixture
    def leasing(self, factory: Callable[[], ArtifactStore]) -> Callable[[], ArtifactStore]:
        """Opens the tier under test, which has leases."""
        with factory() as store:
            try:
                store.lease("lease-look", self.lease_ttl).release()
            except Unsupported as error:
                pytest.skip(str(error))
        return factory

    @pytest.fixture
    def tier(self, leasing: Callable[[], ArtifactStore]) -> Iterator[ArtifactStore]:
        """The tier under test, open."""
        with leasing() as store:
            yield store

    def test_a_lease_has_one_holder_and_is_free_after_its_release(
        self, leasing: Callable[[], ArtifactStore], tier: ArtifactStore
    ) -> None:
        with leasing() as other:
            lease = tier.lease(KEY, self.lease_ttl)
            assert lease.held()
            assert lease.location
            with pytest.raises(LeaseHeld, match=f"pid {os.getpid()}"):
                other.lease(KEY, self.lease_ttl)
            with pytest.raises(LeaseHeld):
                tier.lease(KEY, self.lease_ttl)
            with other.lease("another", self.lease_ttl) as another:
                assert another.held()
            assert list(tier.keys()) == []
            assert tier.find(KEY) is None
            lease.release()
            assert not lease.held()
            with other.lease(KEY, self.lease_ttl) as second:
                # Harmless when it is another's by now.
                lease.release()
                assert second.held()
                with pytest.raises(LeaseHeld):
                    tier.lease(KEY, self.lease_ttl)

    def test_a_heartbeat_keeps_a_lease_for_as_long_as_it_is_wanted(
        self, leasing: Callable[[], ArtifactStore], tier: ArtifactStore
    ) -> None:
        with tier.lease(KEY, self.lease_ttl) as lease, leasing() as other:
            end = time.monotonic() + 2.5 * self.lease_ttl
            while time.monotonic() < end:
                with pytest.raises(LeaseHeld):
                    other.lease(KEY, self.lease_ttl)
                time.sleep(self.lease_ttl / 10)
            assert lease.held()

    def test_a_lease_that_was_dropped_expires(self, tier: ArtifactStore) -> None:
        lease: Lease | None = tier.lease(KEY, self.lease_ttl)
        assert lease is not None
        del lease
        began = time.monotonic()
        with pytest.raises(LeaseHeld):
            tier.lease(KEY, self.lease_ttl)
        with _wait(tier, self.lease_ttl) as mine:
            assert mine.held()
        assert time.monotonic() - began >= self.lease_ttl

    def test_of_many_who_want_a_free_lease_exactly_one_gets_it(
        self, leasing: Callable[[], ArtifactStore]
    ) -> None:
        with _stores(leasing) as stores:
            for number in range(10):
                got = _race(stores, f"race-{number}", self.lease_ttl, patience=0)
                assert len(got) == 1, number

    def test_of_many_who_wait_for_a_dead_holder_exactly_one_takes_over(
        self, leasing: Callable[[], ArtifactStore]
    ) -> None:
        if self.killable:
            with _child(_hold, leasing, KEY, self.lease_ttl, method=self.method) as child:
                child.kill()
        else:
            with leasing() as store:
                store.lease(KEY, self.lease_ttl)
        with _stores(leasing) as stores:
            for store in stores:
                with pytest.raises(LeaseHeld):
                    store.lease(KEY, self.lease_ttl)
            # From now on each of them may take it over, and all try at the same moment.
            time.sleep(self.lease_ttl * 1.1)
            got = _race(stores, KEY, self.lease_ttl, patience=1.5 * self.lease_ttl)
        assert len(got) == 1

    def test_a_forked_child_neither_has_nor_gives_back_its_parents_lease(
        self, leasing: Callable[[], ArtifactStore], tier: ArtifactStore
    ) -> None:
        with tier.lease(KEY, self.lease_ttl) as lease, leasing() as other:

            def child() -> None:
                assert not lease.held()
                lease.release()

            ended = run_killed_at(child, number=0, method="fork")
            assert ended.error is None
            with pytest.raises(LeaseHeld):
                other.lease(KEY, self.lease_ttl)
            time.sleep(self.lease_ttl)
            with pytest.raises(LeaseHeld):
                other.lease(KEY, self.lease_ttl)
            assert lease.held()

    def test_a_forked_child_does_not_keep_a_dead_parents_lease(
        self, leasing: Callable[[], ArtifactStore], tier: ArtifactStore
    ) -> None:
        if not self.killable:
            pytest.skip("the tier's content dies with its process")
        with _child(_hold_and_fork, leasing, KEY, self.lease_ttl, method=self.method) as child:
            grandchild = child.told
            try:
                child.kill()
                os.kill(grandchild, 0)
                with _wait(tier, self.lease_ttl) as lease:
                    assert lease.held()
            finally:
                os.kill(grandchild, signal.SIGKILL)

    def test_a_holder_that_was_stopped_and_overtaken_finds_out(
        self, leasing: Callable[[], ArtifactStore], tier: ArtifactStore
    ) -> None:
        if not self.killable:
            pytest.skip("the tier's content dies with its process")
        with _child(_hold, leasing, KEY, self.lease_ttl, method=self.method) as child:
            child.signal(signal.SIGSTOP)
            with _wait(tier, self.lease_ttl) as lease:
                child.signal(signal.SIGCONT)
                assert child.ask("held") is False
                assert child.ask("release") is None
                assert lease.held()
                with leasing() as other, pytest.raises(LeaseHeld):
                    other.lease(KEY, self.lease_ttl)

    def test_a_holder_that_was_stopped_and_not_overtaken_has_it_still(
        self, leasing: Callable[[], ArtifactStore]
    ) -> None:
        if not self.killable:
            pytest.skip("the tier's content dies with its process")
        with _child(_hold, leasing, KEY, self.lease_ttl, method=self.method) as child:
            child.signal(signal.SIGSTOP)
            time.sleep(1.5 * self.lease_ttl)
            child.signal(signal.SIGCONT)
            assert child.ask("held") is True

    def test_killed_at_any_step_of_a_lease_nothing_blocks_for_ever(
        self, leasing: Callable[[], ArtifactStore], tier: ArtifactStore
    ) -> None:
        if not self.killable:
            pytest.skip("the tier's content dies with its process")
        keys, steps = [], []
        for number in range(1, 40):
            key = f"killed-{number}"

            def hold(key: str = key) -> None:
                with leasing() as store, store.lease(key, self.lease_ttl):
                    # Long enough for one heartbeat.
                    time.sleep(self.lease_ttl / 3 * 1.5)

            ended = run_killed_at(hold, number)
            assert ended.error is None, ended
            keys.append(key)
            if ended.step is None:
                break
            steps.append(ended.step)
        assert {"lease.create", "lease.renew", "lease.release"} <= set(steps), steps
        # Those who wait for all of them wait at the same time.
        left, end = set(keys), time.monotonic() + _PATIENCE
        while left and time.monotonic() < end:
            for key in sorted(left):
                try:
                    tier.lease(key, self.lease_ttl).release()
                    left.remove(key)
                except LeaseHeld:
                    pass
            time.sleep(self.lease_ttl / 10)
        assert left == set()

    def test_killed_at_any_step_of_a_takeover_nothing_blocks_for_ever(
        self, leasing: Callable[[], ArtifactStore], tier: ArtifactStore
    ) -> None:
        if not self.killable:
            pytest.skip("the tier's content dies with its process")
        number, steps = 0, []
        with _child(_hold, leasing, KEY, self.lease_ttl, method=self.method) as child:
            child.kill()
        while True:
            number += 1

            def take() -> None:
                with leasing() as store:
                    _wait(store, self.lease_ttl).release()

            ended = run_killed_at(take, number)
            assert ended.error is None, ended
            if ended.step is None or ended.step == "lease.release":
                break
            steps.append(ended.step)
        assert "lease.take" in steps, steps
        _wait(tier, self.lease_ttl).release()

    @pytest.mark.parametrize("key", ["", "..", "a/b", ".hidden", "a" * 201, "a\n"])
    def test_a_lease_of_a_hostile_key_is_refused(self, tier: ArtifactStore, key: str) -> None:
        with pytest.raises(InvalidKey):
            tier.lease(key, self.lease_ttl)

    @pytest.mark.parametrize("ttl", [0, -1, 0.01, 901, float("nan"), float("inf")])
    def test_a_ttl_out_of_bounds_is_refused(self, tier: ArtifactStore, ttl: float) -> None:
        with pytest.raises(ConfigError):
            tier.lease(KEY, ttl)


def _wait(store: ArtifactStore, ttl: float, key: str = KEY) -> Lease:
    """Take a lease as soon as it is to be had."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return store.lease(key, ttl)
        except LeaseHeld:
            assert time.monotonic() < end, "it never came free"
            time.sleep(ttl / 20)


@contextmanager
def _stores(factory: Callable[[], ArtifactStore]) -> Iterator[list[ArtifactStore]]:
    """Six stores that have been used, so that what a race measures is not their connecting."""
    with ExitStack() as stack:
        stores = [stack.enter_context(factory()) for _ in range(6)]
        for store in stores:
            store.find(KEY)
        yield stores


def _race(stores: list[ArtifactStore], key: str, ttl: float, *, patience: float) -> list[Lease]:
    """All want a lease at once; those who got it, in `patience` seconds after the first look."""
    got: list[Lease] = []
    wrong: list[BaseException] = []
    barrier = threading.Barrier(len(stores))

    def want(store: ArtifactStore) -> None:
        barrier.wait(60)
        end = time.monotonic() + patience
        while True:
            try:
                got.append(store.lease(key, ttl))
            except LeaseHeld:
                pass
            except NeuronStoreError as error:
                wrong.append(error)
            if time.monotonic() >= end or wrong:
                return
            time.sleep(ttl / 8)

    threads = [threading.Thread(target=want, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    assert wrong == []
    held = [lease for lease in got if lease.held()]
    assert len(held) == len(got)
    for lease in got:
        lease.release()
    return got


class _Child:
    """A process that holds a lease and answers questions about it."""

    def __init__(self, process: Any, pipe: Any) -> None:
        self._process = process
        self._pipe = pipe
        self.told = self._receive()

    def ask(self, what: str) -> object:
        """`held` or `release`, of its lease."""
        self._pipe.send(what)
        return self._receive()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A case that fails must not leave it behind.
        self.kill()

    def kill(self) -> None:
        if self._pipe.closed:
            return
        self._process.kill()
        # Not `join`: it waits for whoever inherited the child's end of a pipe.
        while self._process.exitcode is None:
            time.sleep(0.01)
        self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(_PATIENCE), "no word from the child"
        return self._pipe.recv()


def _child(target: Callable[..., None], *arguments: object, method: str) -> _Child:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)  # type: ignore[attr-defined]  # every context has it
    process.start()
    there.close()
    return _Child(process, here)


def _hold(factory: Callable[[], ArtifactStore], key: str, ttl: float, pipe: Any) -> None:
    lease = factory().lease(key, ttl)
    pipe.send(os.getpid())
    while True:
        pipe.send(lease.held() if pipe.recv() == "held" else lease.release())


def _hold_and_fork(factory: Callable[[], ArtifactStore], key: str, ttl: float, pipe: Any) -> None:
    lease = factory().lease(key, ttl)
    child = os.fork()
    if child == 0:
        time.sleep(_PATIENCE)
        os._exit(0)
    pipe.send(child)
    time.sleep(_PATIENCE)
    lease.release()

"""The part of the contract about leases must fail on tiers that break it."""

from __future__ import annotations

import functools
import os
import time

import pytest

from neuron_store.abc import Lease
from neuron_store.errors import LeaseHeld
from neuron_store.testing import ArtifactStoreContract
from neuron_store_backends import _heartbeat, _lease_renaming
from neuron_store_backends._lease_record import lease_name
from neuron_store_backends.posix import PosixStore

# Of a test that wants an error and gets none.
NOT_RAISED = pytest.fail.Exception


class Contract(ArtifactStoreContract):
    __test__ = False
    lease_ttl = 0.9
    method = "fork"


@pytest.fixture
def factory(tmp_path):
    return functools.partial(PosixStore, str(tmp_path / "tier"))


class LookThenWrite(PosixStore):
    """What racy lock files do."""

    def lease(self, key, ttl):
        place = self.root / f".{key}.lease"
        if place.exists():
            raise LeaseHeld(key, self.location, place.read_text())
        time.sleep(0.02)
        self.root.mkdir(exist_ok=True)
        place.write_text(f"pid {os.getpid()}")

        class Mine(Lease):
            location = self.location

            def held(self):
                return place.exists()

            def release(self):
                place.unlink(missing_ok=True)

        return Mine()


def test_a_tier_that_looks_and_then_writes_fails_the_race(tmp_path):
    factory = functools.partial(LookThenWrite, str(tmp_path / "tier"))
    with pytest.raises(AssertionError):
        Contract().test_of_many_who_want_a_free_lease_exactly_one_gets_it(factory)


def test_a_tier_without_a_heartbeat_fails(factory, monkeypatch):
    monkeypatch.setattr(_heartbeat, "_beat", lambda *_: None)
    with pytest.raises((AssertionError, NOT_RAISED)):
        Contract().test_a_heartbeat_keeps_a_lease_for_as_long_as_it_is_wanted(factory, factory())


def test_a_takeover_that_replaces_whatever_is_there_fails_the_race(factory, monkeypatch):
    def rename(root, key, _name, record):
        time.sleep(0.02)
        folder = f"{root}/.leases/{key}"
        for name in os.listdir(folder):
            os.replace(f"{folder}/{name}", f"{folder}/{lease_name(record)}")
        return True

    monkeypatch.setattr(_lease_renaming, "_rename", rename)
    with pytest.raises(AssertionError):
        Contract().test_of_many_who_wait_for_a_dead_holder_exactly_one_takes_over(factory)


def test_a_holder_that_never_asks_fails_to_find_out(factory, monkeypatch):
    monkeypatch.setattr(_heartbeat.HeldLease, "held", lambda _self: True)
    with pytest.raises(AssertionError):
        Contract().test_a_holder_that_was_stopped_and_overtaken_finds_out(factory, factory())


def test_a_lease_that_does_not_know_its_process_fails_after_fork(factory, monkeypatch):
    monkeypatch.setattr(_heartbeat.os, "getpid", lambda: 1)
    with pytest.raises(AssertionError):
        Contract().test_a_forked_child_neither_has_nor_gives_back_its_parents_lease(
            factory, factory()
        )


def test_a_tier_that_blocks_for_ever_after_a_kill_fails(factory, monkeypatch):
    monkeypatch.setattr(_heartbeat.Watch, "unchanged", lambda *_: 0.0)
    monkeypatch.setattr("neuron_store.testing.leasing._PATIENCE", 3.0)
    with pytest.raises(AssertionError):
        Contract().test_killed_at_any_step_of_a_lease_nothing_blocks_for_ever(factory, factory())

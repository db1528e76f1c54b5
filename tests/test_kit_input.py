"""The test kit says what is wrong with how it is used."""

from __future__ import annotations

import pytest

from neuron_store import steps
from neuron_store.testing import PUBLISH, Fault, Operation, inject_steps
from neuron_store_backends.posix import PosixStore


@pytest.mark.parametrize(("kind", "operation"), [("raise", "publsh"), ("tear", "find")])
def test_a_fault_that_can_befall_nothing_is_refused(kind, operation):
    with pytest.raises(ValueError, match="does not befall"):
        Fault(kind, operation)


def test_an_operation_of_one_step_is_warned_about(tmp_path):
    def once(store, _bench):
        steps.step("mine.only")
        return list(store.keys())

    with pytest.warns(UserWarning, match=r"one step, mine\.only"):
        inject_steps(Operation("mine", once, PUBLISH.act), PosixStore, tmp_path, how=["raise"])

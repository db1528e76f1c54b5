"""A race whose publishers cannot take part ends, and says so."""

from __future__ import annotations

import functools
import os

import pytest

from neuron_store.testing import race_publishers
from neuron_store_backends.posix import PosixStore


def opens_nowhere():
    raise ZeroDivisionError


class DiesInTheSecondRound(PosixStore):
    """Of the publishers one is killed while the others wait for it."""

    def publish(self, artifact, source, *, consume=False):
        if artifact.key == "second" and b"of 1" in (source / "graph.bin").read_bytes():
            os._exit(3)
        return super().publish(artifact, source, consume=consume)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_publishers_that_cannot_open_the_tier_are_told_of(method):
    with pytest.raises(RuntimeError, match="ended without an answer"):
        race_publishers(opens_nowhere, keys=["k"], writers=2, same=True, method=method)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_cannot_open_the_tier_are_told_of():
    with pytest.raises(RuntimeError, match="ended without an answer"):
        race_publishers(opens_nowhere, keys=["k"], writers=2, same=True, method="threads")


def test_a_publisher_that_dies_does_not_leave_the_others_waiting(tmp_path):
    factory = functools.partial(DiesInTheSecondRound, tmp_path / "root")
    with pytest.raises(RuntimeError, match="publisher 1 of 3 ended without an answer"):
        race_publishers(factory, keys=["first", "second"], writers=3, same=False)

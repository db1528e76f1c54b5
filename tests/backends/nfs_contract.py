"""The shared contract on two NFS mounts of one server; run inside the guest by test_nfs.py."""

import itertools
import os

import attrs
import pytest

from neuron_store.testing import ArtifactStoreContract
from neuron_store_backends.posix import PosixStore


@attrs.define
class BothMounts:
    """Opens the tier through one mount and the other in turn, as two nodes would."""

    directory: str
    turn: int = 0

    def __call__(self):
        self.turn += 1
        mount = os.environ["NFS1" if (os.getpid() + self.turn) % 2 else "NFS2"]
        return PosixStore(f"{mount}/{self.directory}")


class TestPosixOnNfs(ArtifactStoreContract):
    method = "fork"
    writers = 8
    rounds = 100
    # A miss may be remembered for acdirmin seconds.
    patience = 45.0
    # One slow processor for all of it.
    lease_ttl = 6.0
    numbers = itertools.count()

    @pytest.fixture
    def factory(self):
        return BothMounts(f"tier{next(self.numbers)}")

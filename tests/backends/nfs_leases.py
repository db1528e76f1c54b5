"""The contract of leases on two NFS mounts of one server; run inside the guest by test_nfs.py."""

import itertools

import pytest

from neuron_store.testing.leasing import LeaseContract
from tests.backends.nfs_contract import BothMounts


class TestLeasesOnNfs(LeaseContract):
    method = "fork"
    # One slow processor for all of it.
    lease_ttl = 6.0
    numbers = itertools.count()

    @pytest.fixture
    def factory(self):
        return BothMounts(f"leases{next(self.numbers)}")

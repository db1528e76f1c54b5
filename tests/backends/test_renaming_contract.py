"""The shared contract on the two rename tiers, and on a store over both."""

import functools

import pytest

from neuron_store import TieredStore
from neuron_store.testing import ArtifactStoreContract
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore


class TestLocal(ArtifactStoreContract):
    writers = 16
    method = "fork"

    @pytest.fixture
    def factory(self, tmp_path):
        return functools.partial(LocalStore, str(tmp_path / "tier"))


class TestPosix(ArtifactStoreContract):
    writers = 16

    @pytest.fixture
    def factory(self, tmp_path):
        return functools.partial(PosixStore, str(tmp_path / "tier"))


def two_tiers(root: str) -> TieredStore:
    return TieredStore([LocalStore(f"{root}/local"), PosixStore(f"{root}/shared")])


class TestTiered(ArtifactStoreContract):
    rounds = 20
    method = "fork"

    @pytest.fixture
    def factory(self, tmp_path):
        return functools.partial(two_tiers, str(tmp_path))

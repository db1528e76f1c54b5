"""The shared contract on the conditional-create tiers: memory, and S3 as moto serves it."""

import functools
import uuid

import pytest

from neuron_store.testing import ArtifactStoreContract
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.s3 import S3Store


class TestMemory(ArtifactStoreContract):
    method = "threads"
    killable = False
    writers = 16

    @pytest.fixture
    def factory(self):
        return functools.partial(MemoryStore, f"contract-{uuid.uuid4().hex}")


class TestS3(ArtifactStoreContract):
    writers = 8

    @pytest.fixture
    def factory(self, s3_place):
        address = f"{s3_place.bucket}/{s3_place.prefix}"
        return functools.partial(S3Store, address, endpoint_url=s3_place.url)

"""The shared contract on the conditional-create tiers."""

from __future__ import annotations

import functools
import uuid

import pytest

from neuron_store.testing import ArtifactStoreContract
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.s3 import S3Store


class TestMemory(ArtifactStoreContract):
    method = "threads"
    killable = False

    @pytest.fixture
    def factory(self):
        return functools.partial(MemoryStore, f"contract-{uuid.uuid4().hex}")


class TestMoto(ArtifactStoreContract):
    method = "fork"

    @pytest.fixture
    def factory(self, s3_place):
        address = f"{s3_place.bucket}/{s3_place.prefix}"
        return functools.partial(S3Store, address, endpoint_url=s3_place.url)


@pytest.mark.slow
class TestAzurite(ArtifactStoreContract):
    method = "fork"

    @pytest.fixture
    def factory(self, azure_place):
        return azure_place.store


@pytest.mark.slow
class TestFakeGcs(ArtifactStoreContract):
    method = "fork"

    @pytest.fixture
    def factory(self, gcs_place):
        return gcs_place.store


@pytest.mark.slow
class TestSeaweed(ArtifactStoreContract):
    """A real S3 server; a race round takes it a second or more, so there are few of them."""

    method = "fork"
    rounds = 5
    writers = 4
    lease_ttl = 4.0

    @pytest.fixture
    def factory(self, seaweed_url, aws):
        from tests.backends.places import S3Place
        from tests.servers.seaweed import client

        place = S3Place(client(seaweed_url), seaweed_url, bucket="warm-up")
        return place.store

from __future__ import annotations

import asyncio
import uuid

import pytest

from neuron_store.abc import Publication
from neuron_store.artifact import MAX_RECORD_BYTES
from neuron_store.errors import ArtifactCorrupt, ConfigError
from neuron_store.tier_url import parse_tier_url
from neuron_store_backends.memory import MemoryObjects, MemoryStore
from tests.backends.cases import ConditionalCases


class MemoryPlace:
    """The back door is fsspec's own global dictionary."""

    forks = False

    def __init__(self) -> None:
        self.name = f"test-{uuid.uuid4().hex}"
        self.root = f"/neuron_store.memory/{self.name}"

    def store(self, **options) -> MemoryStore:
        return MemoryStore(self.name, **options)

    @property
    def fs(self):
        from fsspec.implementations.memory import MemoryFileSystem

        return MemoryFileSystem(skip_instance_cache=True)

    def put(self, path, data):
        self.fs.pipe_file(f"{self.root}/{path}", data)

    def read(self, path):
        return self.fs.cat_file(f"{self.root}/{path}")

    def remove(self, path):
        if self.fs.exists(f"{self.root}/{path}"):
            self.fs.rm_file(f"{self.root}/{path}")

    def paths(self):
        return sorted(p.removeprefix(self.root + "/") for p in self.fs.find(self.root))


class TestMemory(ConditionalCases):
    @pytest.fixture
    def place(self):
        return MemoryPlace()


class LooksThenWrites(MemoryObjects):
    """What fsspec's base class makes of `mode="create"`; between the two others get their turn."""

    async def _create(self, fs, path, data):
        if fs.exists(path):
            raise FileExistsError(path)
        await asyncio.sleep(0.01)
        fs.pipe_file(path, data)


def test_a_create_that_looks_and_then_writes_is_found_by_the_probe(tmp_path):
    """Pitfall 20: one create after the other is refused rightly; only a race shows it."""
    place = MemoryPlace()
    store = place.store()
    store.objects = LooksThenWrites(store.objects.location, store.objects.root)
    report = store.probe()
    assert "concurrent creates won" in (report.refused or "")
    failed = [check.name for check in report.checks if not check.passed]
    assert failed == ["create-if-absent, race"]
    assert MemoryPlace().store().probe().refused is None


def test_two_names_are_two_places(tmp_path):
    from tests.backends.cases import fill

    artifact = fill(tmp_path, {"f": b"1"}, "k")
    one, two = MemoryStore(uuid.uuid4().hex), MemoryStore(uuid.uuid4().hex)
    one.publish(artifact, tmp_path)
    assert list(one.keys()) == ["k"]
    assert list(two.keys()) == []


def test_a_url_gives_name_and_location():
    store = MemoryStore.from_url(parse_tier_url("memory://here?name=mem"))
    assert store.name == "mem"
    assert store.location == "memory://here"


@pytest.mark.parametrize("url", ["memory://", "memory://a/../b", "memory://a?unknown=1"])
def test_an_unusable_url_is_refused(url):
    with pytest.raises(ConfigError):
        MemoryStore.from_url(parse_tier_url(url))


def test_a_record_that_is_too_large_is_damage_and_a_publish_repairs_it(tmp_path):
    from tests.backends.cases import fill

    artifact = fill(tmp_path, {"f": b"1"}, "k")
    store = MemoryStore(uuid.uuid4().hex)
    store.publish(artifact, tmp_path)
    store.objects.handle().pipe_file(store.index_path("k"), b" " * (MAX_RECORD_BYTES + 1))
    with pytest.raises(ArtifactCorrupt):
        store.find("k")
    assert store.publish(artifact, tmp_path) is Publication.REPAIRED
    assert store.verify("k").key == "k"

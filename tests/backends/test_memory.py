from __future__ import annotations

import uuid

import pytest

from neuron_store.errors import ConfigError
from neuron_store.tier_url import parse_tier_url
from neuron_store_backends.memory import MemoryStore
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

"""Small files in one object: all of it on memory and moto, the round trip on the other clouds."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_store import steps
from neuron_store.abc import Publication
from neuron_store.artifact import ArtifactFile
from neuron_store.errors import ArtifactCorrupt, TierError
from neuron_store_backends import _parcels
from neuron_store_backends._objects import PIECE
from neuron_store_backends._options import Times
from neuron_store_backends._s3_client import S3Client
from tests.backends import children
from tests.backends.bundling_cases import (
    FILES,
    NAME,
    SMALL,
    BundleRoundTripCases,
    BundlingCases,
    bundle_paths,
    expected_path,
)
from tests.backends.cases import contents_of, fill
from tests.backends.places import S3Place
from tests.backends.test_memory import MemoryPlace


class TestMemory(BundlingCases):
    @pytest.fixture
    def place(self):
        return MemoryPlace()


class TestMoto(BundlingCases):
    @pytest.fixture
    def place(self, s3_place):
        return s3_place


class TestAzurite(BundleRoundTripCases):
    @pytest.fixture
    def place(self, azure_place):
        return azure_place


class TestFakeGcs(BundleRoundTripCases):
    @pytest.fixture
    def place(self, gcs_place):
        return gcs_place


class TestSeaweed(BundleRoundTripCases):
    @pytest.fixture
    def place(self, seaweed_url, aws):
        from tests.servers.seaweed import client

        return S3Place(client(seaweed_url), seaweed_url, bucket="warm-up")


# -- S3: requests and faults --------------------------------------------------------------------


@pytest.fixture
def many(source):
    return fill(source, FILES, "k")


def test_two_hundred_files_take_a_request_for_every_eight_mib(s3_place, moto, source, into):
    files = {f"f{n:03}": os.urandom(100_000) for n in range(200)}
    artifact = fill(source, files, "k")
    s3_place.store().publish(artifact, source)
    bundles = -(-200 * 100_000 // PIECE)
    assert len(bundle_paths(s3_place)) == bundles
    store = s3_place.store()
    store.find("warm")
    moto.faults.log.clear()
    store.fetch("k", into)
    assert len(moto.faults.log) == 1 + bundles
    assert contents_of(into) == files


@pytest.mark.parametrize("plain", [True, False], ids=["plain requests", "the client's"])
@pytest.mark.parametrize("action", ["answer", "lose_reply", "drop"])
def test_an_upload_outlives_a_passing_fault_and_is_whole(
    s3_place, moto, many, source, into, monkeypatch, action, plain
):
    if not plain:
        monkeypatch.setattr(S3Client, "_ask_for_address", lambda *_: None)
    fault = moto.faults.add(action, method="PUT", path=NAME, times=2)
    assert s3_place.store().publish(many, source) is Publication.CREATED
    assert fault.times == 0
    assert s3_place.read(expected_path(SMALL)) == b"".join(SMALL.values())


@pytest.mark.parametrize("change", ["grew", "became shorter"])
def test_a_file_that_changes_while_it_is_read_never_becomes_a_bundle(s3_place, source, change):
    artifact = fill(source, SMALL, "k")
    first = source / "kernels/k00.bin"

    def hook(name):
        # It is open by now, and was of the right size.
        if name == "conditional.piece":
            steps.set_hook(None)
            os.truncate(first, first.stat().st_size + (1 if change == "grew" else -1))

    steps.set_hook(hook)
    with pytest.raises(ArtifactCorrupt, match=rf"kernels/k00\.bin {change} while"):
        s3_place.store().publish(artifact, source)
    assert bundle_paths(s3_place) == []
    assert s3_place.store().find("k") is None


@pytest.mark.parametrize("action", ["truncate", "drop"])
def test_a_fetch_outlives_a_passing_fault(s3_place, moto, many, source, into, action):
    s3_place.store().publish(many, source)
    fault = moto.faults.add(action, method="GET", path=NAME, times=2)
    s3_place.store().fetch("k", into)
    assert fault.times == 0
    assert contents_of(into) == FILES


def test_a_body_always_cut_short_is_an_error_and_no_damage(s3_place, moto, many, source, into):
    s3_place.store().publish(many, source)
    before = s3_place.paths()
    moto.faults.add("truncate", method="GET", path=NAME, times=10**6)
    # By its deadline, or after the last try that helps.
    with pytest.raises(TierError, match=r"^read .* at s3://"):
        s3_place.store(times=Times(stall_timeout=3)).fetch("k", into)
    assert s3_place.paths() == before


def test_a_wrong_body_is_corrupt_and_noted(s3_place, moto, many, source, into):
    s3_place.store().publish(many, source)
    moto.faults.add("corrupt", method="GET", path=NAME)
    with pytest.raises(ArtifactCorrupt, match="kernels/"):
        s3_place.store().fetch("k", into)
    assert "payload/k/damaged" in s3_place.paths()
    # It was the transport: all is well there, and the word of damage goes.
    assert s3_place.store().publish(many, source) is Publication.PRESENT
    assert "payload/k/damaged" not in s3_place.paths()


@pytest.mark.parametrize("where", ["conditional.piece", "conditional.upload", "conditional.commit"])
def test_killed_at_a_step_nothing_is_visible_and_the_next_publish_works(
    s3_place, many, source, into, where
):
    store = s3_place.store()
    process = multiprocessing.get_context("fork").Process(
        target=children.publish_and_die, args=(store, many, source, where, "kill")
    )
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert s3_place.store().find("k") is None
    assert s3_place.store().publish(many, source) is Publication.CREATED
    assert bundle_paths(s3_place) == [expected_path(SMALL)]
    s3_place.store().fetch("k", into)
    assert contents_of(into) == FILES


# -- the form -----------------------------------------------------------------------------------

digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
sizes = st.integers(0, _parcels.LARGEST + 10) | st.just(_parcels.LARGEST)
listed = st.lists(st.tuples(sizes, digests), max_size=60).map(
    lambda facts: [ArtifactFile(f"f{n}", *fact) for n, fact in enumerate(facts)]
)


@given(listed)
def test_whatever_the_files_each_lies_in_one_object_at_its_place(files):
    formed = _parcels.bundled(files)
    assert list(formed) == files  # forms are no part of equality
    _parcels.require_whole_bundles(formed, "here")
    found = _parcels.parcels("root", formed)
    assert sorted(f.name for p in found for f in p.files) == sorted(f.name for f in files)
    assert len({p.path for p in found}) == len(found)
    for parcel in found:
        assert parcel.is_bundle == (len(parcel.files) > 1)
        assert parcel.size == sum(f.size for f in parcel.files)
        if parcel.is_bundle:
            assert parcel.size <= PIECE
            assert all(f.size <= _parcels.LARGEST for f in parcel.files)
            ends = [parcel.span(f) for f in parcel.files]
            assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
            assert ends[-1][1] == parcel.size


def test_nothing_is_bundled_alone(source):
    # The last of these does not fit into the first bundle, and has no company.
    files = [ArtifactFile(f"f{n}", _parcels.LARGEST, f"{n:064}") for n in range(9)]
    formed = _parcels.bundled(files)
    assert [f.stored is None for f in formed] == [False] * 8 + [True]

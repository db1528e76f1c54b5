"""Compression of payload: on memory and moto all of it, on the other clouds the round trip."""

from __future__ import annotations

import functools
import hashlib
import io
import multiprocessing
import os
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_store import steps
from neuron_store.abc import Publication
from neuron_store.artifact import (
    Artifact,
    ArtifactFile,
    StoredForm,
    dump_record,
    load_record,
)
from neuron_store.errors import ArtifactCorrupt, ConfigError, MissingExtra, TierError
from neuron_store.registry import open_tier
from neuron_store.signing import statement
from neuron_store_backends import _encoding, _packing, _publishing
from neuron_store_backends._options import Times
from tests.backends import children
from tests.backends.cases import ConditionalCases, contents_of, fill
from tests.backends.compressing_cases import (
    PACKED,
    TEXT,
    CompressingCases,
    RoundTripCases,
    forms,
    stored_path,
    zstd,
)
from tests.backends.test_memory import MemoryPlace


class TestMemory(CompressingCases):
    @pytest.fixture
    def place(self):
        return MemoryPlace()


class TestJudged(ConditionalCases):
    """Everything else holds with the option as without: nothing of these files shrinks."""

    @pytest.fixture
    def place(self):
        place = MemoryPlace()
        place.store = functools.partial(place.store, compress="zstd")
        return place


class TestMoto(CompressingCases):
    @pytest.fixture
    def place(self, s3_place):
        return s3_place


class TestAzurite(RoundTripCases):
    @pytest.fixture
    def place(self, azure_place):
        return azure_place


class TestFakeGcs(RoundTripCases):
    @pytest.fixture
    def place(self, gcs_place):
        return gcs_place


# -- the reader ---------------------------------------------------------------------------------


def read_back(frame, data, *, pieces=None):
    """What comes out of a frame that is said to be of `data`."""
    stream = io.BytesIO(frame)
    if pieces is not None:
        stream = Dribble(frame, pieces)
    file = ArtifactFile("f", len(data), hashlib.sha256(data).hexdigest())
    with _encoding.decoded(stream, file, key="k", location="here") as reader:
        return reader.read()


class Dribble(io.RawIOBase):
    """A stream that gives a few bytes at a time."""

    def __init__(self, data, most):
        self._data, self._most = io.BytesIO(data), most

    def readable(self):
        return True

    def readinto(self, target):
        piece = self._data.read(min(self._most, len(target)))
        target[: len(piece)] = piece
        return len(piece)


@given(st.binary(max_size=3000), st.integers(1, 50), st.sampled_from([1, 3, 19]))
def test_what_was_compressed_comes_back(data, pieces, level):
    data *= 3
    assert read_back(zstd.compress(data, level=level), data, pieces=pieces) == data


@given(st.binary(min_size=1, max_size=500), st.data())
def test_a_frame_cut_anywhere_is_corrupt(data, draw):
    frame = zstd.compress(data)
    cut = draw.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ArtifactCorrupt):
        read_back(frame[:cut], data)


@given(st.binary(max_size=500), st.integers(0, 100))
def test_whatever_lies_there_is_read_within_its_bound_or_corrupt(frame, size):
    data = bytes(size)
    try:
        assert len(read_back(frame, data)) <= size + 1
    except ArtifactCorrupt:
        pass


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_flipped_bits_never_pass_for_the_file(data, draw):
    frame = bytearray(zstd.compress(data * 5))
    at = draw.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        told = read_back(bytes(frame), data * 5)
    except ArtifactCorrupt:
        return
    # What it decodes to is for the digest to judge; it is bounded all the same.
    assert len(told) <= len(data) * 5 + 1


def test_a_bomb_takes_no_memory():
    frame = zstd.ZstdCompressor(level=1)
    bomb = b"".join([frame.compress(bytes(1 << 20)) for _ in range(256)] + [frame.flush()])
    tracemalloc.start()
    try:
        assert len(read_back(bomb, bytes(1000))) == 1001
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# -- the record ---------------------------------------------------------------------------------

sizes = st.integers(0, 1 << 40)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
encodings = st.from_regex(r"[a-z0-9][a-z0-9+._-]{0,39}", fullmatch=True)
form = st.builds(StoredForm, encodings, sizes, digests)


@given(st.lists(st.tuples(sizes, digests, st.none() | form), min_size=1, max_size=5))
def test_a_record_with_forms_is_read_back_and_signs_the_same(entries):
    files = tuple(ArtifactFile(f"f{n}", *entry) for n, entry in enumerate(entries))
    artifact = Artifact(key="k", files=files)
    found, _ = load_record(dump_record(artifact), key="k", source="test")
    assert [f.stored for f in found.files] == [f.stored for f in files]
    plain = artifact.without_forms()
    assert plain == found
    assert plain.same_bytes(found)
    assert statement(plain) == statement(found)
    assert plain.stored_size == plain.size


def test_a_field_of_version_2_means_nothing_in_version_1():
    artifact = Artifact(
        key="k", files=(ArtifactFile("f", 1, "a" * 64, StoredForm("zstd", 1, "b" * 64)),)
    )
    data = dump_record(artifact).replace(b'"neuron_store_record": 2', b'"neuron_store_record": 1')
    assert load_record(data, key="k", source="test")[0].files[0].stored is None


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["gzip", "1", ""])
def test_an_unknown_encoding_is_refused(value):
    with pytest.raises(ConfigError, match="compress=.*use zstd or none"):
        open_tier(f"memory://m?compress={value}&name=m")


@pytest.mark.parametrize(
    "url",
    ["memory://m", "s3://b/p", "az://c/p", "gs://b/p"],
)
def test_each_object_tier_takes_the_option(url, aws):
    assert open_tier(url).compress is None
    assert open_tier(f"{url}?compress=none").compress is None
    assert open_tier(f"{url}?compress=zstd").compress == "zstd"


def test_a_directory_takes_no_such_option(tmp_path):
    with pytest.raises(ConfigError, match="unknown option 'compress'"):
        open_tier(f"posix://{tmp_path}?compress=zstd")


def test_without_the_module_the_option_names_the_extra(monkeypatch):
    def missing():
        raise ImportError("no module")

    monkeypatch.setattr(_encoding, "zstd_module", missing)
    with pytest.raises(MissingExtra, match=r"compress=zstd.*pip install 'neuron-store\[zstd\]'"):
        open_tier("memory://m?compress=zstd")
    assert open_tier("memory://m").compress is None


# -- S3 under faults ----------------------------------------------------------------------------


@pytest.fixture
def packed(source):
    return fill(source, PACKED, "k")


@pytest.mark.parametrize("action", ["truncate", "drop"])
def test_a_fetch_outlives_a_passing_fault(s3_place, moto, packed, source, into, action):
    s3_place.store(compress="zstd").publish(packed, source)
    fault = moto.faults.add(action, method="GET", path="/graph.hlo", times=2)
    s3_place.store().fetch("k", into)
    assert fault.times == 0
    assert contents_of(into) == PACKED


def test_a_body_always_cut_short_is_an_error_and_no_damage(s3_place, moto, packed, source, into):
    s3_place.store(compress="zstd").publish(packed, source)
    before = s3_place.paths()
    moto.faults.add("truncate", method="GET", path="/graph.hlo", times=10**6)
    with pytest.raises(TierError, match="broke|cut short"):
        s3_place.store(times=Times(stall_timeout=3)).fetch("k", into)
    assert s3_place.paths() == before


def test_a_wrong_body_is_corrupt_and_noted(s3_place, moto, packed, source, into):
    s3_place.store(compress="zstd").publish(packed, source)
    moto.faults.add("corrupt", method="GET", path="/graph.hlo")
    with pytest.raises(ArtifactCorrupt, match=r"graph\.hlo"):
        s3_place.store().fetch("k", into)
    assert "payload/k/damaged" in s3_place.paths()
    # It was the transport: all is well there, and the word of damage goes.
    assert s3_place.store(compress="zstd").publish(packed, source) is Publication.PRESENT
    assert "payload/k/damaged" not in s3_place.paths()


def test_a_lost_payload_found_while_others_are_on_their_way_is_corrupt(
    s3_place, packed, source, into
):
    s3_place.store(compress="zstd").publish(packed, source)
    s3_place.remove(stored_path(s3_place, "sub/notes.txt"))
    with pytest.raises(ArtifactCorrupt, match=r"sub/notes\.txt is named and not there"):
        s3_place.store().fetch("k", into)


def test_a_large_file_is_compressed_and_decoded_in_bounded_memory(s3_place, source, into):
    line = b"%d = add(%d, 0) " + bytes(1000)
    with (source / "graph.hlo").open("wb") as stream:
        for n in range(100_000):
            stream.write(line % (n, n))
    size = (source / "graph.hlo").stat().st_size
    artifact = Artifact(key="k", files=(ArtifactFile("graph.hlo", size),))
    store = s3_place.store(compress="zstd")
    store.find("k")
    tracemalloc.start()
    try:
        assert store.publish(artifact, source) is Publication.CREATED
        store.fetch("k", into)
        # moto, in this process, keeps what was sent: a hundredth of it.
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert forms(s3_place)["graph.hlo"].size < size / 10
    assert (into / "graph.hlo").stat().st_size == size


# The first piece is read to be compressed, not to be sent.
@pytest.mark.parametrize(
    "where", [*_publishing.COMPRESS_STEPS, "conditional.piece", "conditional.upload"]
)
def test_killed_at_a_step_nothing_is_visible_and_the_next_publish_works(
    s3_place, packed, source, into, tmp_path, monkeypatch, where
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = s3_place.store(compress="zstd")
    process = multiprocessing.get_context("fork").Process(
        target=children.publish_and_die, args=(store, packed, source, where, "kill")
    )
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert [p for p in s3_place.paths() if not p.startswith("probe/")] == []
    assert store.publish(packed, source) is Publication.CREATED
    s3_place.store().fetch("k", into)
    assert contents_of(into) == PACKED


def test_a_source_that_changes_while_it_is_compressed_is_not_published(s3_place, packed, source):
    def hook(name):
        if name == "conditional.compress":
            data = bytearray((source / "graph.hlo").read_bytes())
            data[-1] ^= 1
            (source / "graph.hlo").write_bytes(bytes(data))

    steps.set_hook(hook)
    with pytest.raises(ArtifactCorrupt, match=r"graph\.hlo has sha256"):
        s3_place.store(compress="zstd").publish(packed, source)
    steps.set_hook(None)
    assert s3_place.store().find("k") is None


def test_the_compressed_copy_is_for_its_owner_alone(
    s3_place, packed, source, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modes = []

    def hook(name):
        if name == "conditional.upload":
            modes.extend(p.stat().st_mode & 0o777 for p in tmp_path.glob("neuron_store-zstd.*"))

    steps.set_hook(hook)
    s3_place.store(compress="zstd").publish(packed, source)
    assert modes == [0o700]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 40_000)), min_size=1, max_size=4))
def test_any_mixture_of_text_and_noise_comes_back(tmp_path_factory, mixture):
    source, into = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("into")
    contents = {
        f"d{n}/f": TEXT[:text] + os.urandom(noise) for n, (text, noise) in enumerate(mixture)
    }
    place = MemoryPlace()
    artifact = fill(source, contents, "k")
    assert place.store(compress="zstd").publish(artifact, source) is Publication.CREATED
    assert place.store().fetch("k", into).same_bytes(artifact)
    assert contents_of(into) == contents
    for name, stored in forms(place).items():
        assert stored.size < _packing.WORTH * len(contents[name])
        assert len(contents[name]) >= _packing.SMALLEST

"""What every object tier must do with an artifact of many small files, run on each of them."""

from __future__ import annotations

import hashlib
import json
import os

import attrs
import pytest

from neuron_store.abc import Publication
from neuron_store.artifact import load_record
from neuron_store.collecting import collect
from neuron_store.errors import ArtifactCorrupt, TierError
from neuron_store.streams import empty_directory
from neuron_store_backends import _parcels
from neuron_store_backends._objects import PIECE
from tests.backends.cases import contents_of, fill, flip
from tests.backends.compressing_cases import TEXT, rewritten

NAME = ".neuron_store.bundle"
SMALL = {f"kernels/k{n:02}.bin": os.urandom(9_000 + n * 977) for n in range(12)}
FILES = {
    **SMALL,
    "graph_k.neff": os.urandom(_parcels.LARGEST + 1),
    "meta.json": b'{"version": 0}',
}


def bundle_paths(place, key="k"):
    return [p for p in place.paths() if p.startswith(f"payload/{key}/") and p.endswith(NAME)]


def expected_path(names, key="k"):
    """By the layout's own words, not by the code that it is of."""
    facts = [(n, len(FILES[n]), hashlib.sha256(FILES[n]).hexdigest()) for n in names]
    lines = "".join(f"{name} {size} {digest}\n" for name, size, digest in facts)
    return f"payload/{key}/{hashlib.sha256(lines.encode()).hexdigest()}/{NAME}"


class BundleRoundTripCases:
    """Subclass with a fixture `place`."""

    @pytest.fixture
    def many(self, source):
        """Not published yet; its files are in `source`."""
        return fill(source, FILES, "k")

    def test_small_files_lie_together_and_come_back(self, place, many, source, into):
        assert place.store().publish(many, source) is Publication.CREATED
        neff = f"payload/k/{many.file('graph_k.neff').sha256}/graph_k.neff"
        assert sorted(p for p in place.paths() if p.startswith("payload/")) == sorted(
            [expected_path(SMALL), neff]
        )
        assert place.read(expected_path(SMALL)) == b"".join(SMALL.values())
        fetched = place.store().fetch("k", into)
        assert contents_of(into) == FILES
        assert fetched.same_bytes(many)
        assert all(f.stored is None for f in fetched.files)
        found = place.store().verify("k")
        assert found.size == found.stored_size == sum(map(len, FILES.values()))
        for name, data in FILES.items():
            with place.store().open_file("k", name) as stream:
                assert stream.read() == data
        assert place.store().publish(many, source) is Publication.PRESENT

    def test_a_bundle_is_no_larger_than_a_piece(self, place, source, into):
        # Fits to the byte, then a file too many.
        files = {f"f{n}": os.urandom(_parcels.LARGEST) for n in range(PIECE // _parcels.LARGEST)}
        files |= {"g1": os.urandom(9_000), "g2": os.urandom(9_000)}
        place.store().publish(fill(source, files, "k"), source)
        found, _ = load_record(place.read("index/k.json"), key="k", source="test")
        sizes = sorted({f.stored.size for f in found.files})
        assert sizes == [18_000, PIECE]
        place.store().fetch("k", into)
        assert contents_of(into) == files


class BundlingCases(BundleRoundTripCases):
    """The whole of it; subclass with a fixture `place`."""

    # -- what is bundled ------------------------------------------------------------------------

    def test_few_files_lie_each_at_its_own_name_in_a_record_of_version_1(self, place, source):
        files = dict(list(SMALL.items())[: _parcels.FEWEST - 1])
        place.store().publish(fill(source, files, "k"), source)
        assert bundle_paths(place) == []
        assert json.loads(place.read("index/k.json"))["neuron_store_record"] == 1

    def test_the_record_is_one_that_older_releases_refuse(self, place, many, source):
        place.store().publish(many, source)
        record = json.loads(place.read("index/k.json"))
        assert record["neuron_store_record"] == 2
        forms = [e["stored"]["encoding"] for e in record["files"] if "stored" in e]
        assert forms == ["bundle"] * len(SMALL)

    def test_what_shrinks_is_compressed_and_the_rest_bundled(self, place, source, into):
        files = {**FILES, "graph.hlo": TEXT}
        place.store(compress="zstd").publish(fill(source, files, "k"), source)
        found, _ = load_record(place.read("index/k.json"), key="k", source="test")
        assert found.file("graph.hlo").stored.encoding == "zstd"
        assert found.file("kernels/k00.bin").stored.encoding == "bundle"
        assert found.file("graph_k.neff").stored is None
        place.store().fetch("k", into)
        assert contents_of(into) == files
        place.store().verify("k")

    def test_empty_files_and_equal_files_come_back(self, place, source, into, monkeypatch):
        # Those of a few KiB travel in the record, until it is full of them.
        monkeypatch.setattr("neuron_store_backends._publishing.INLINE_TOTAL", 0)
        files = {**{f"equal{n}": b"same bytes" for n in range(4)}, "empty": b"", "x": b"y"}
        place.store().publish(fill(source, files, "k"), source)
        place.store().fetch("k", into)
        assert contents_of(into) == files
        assert contents_of(into)["empty"] == b""
        place.store().verify("k")

    def test_bundles_of_equal_bytes_are_two(self, place, source, into):
        files = {f"f{n:02}": b"\1" * (_parcels.LARGEST // 2) for n in range(34)}
        artifact = fill(source, files, "k")
        assert place.store().publish(artifact, source) is Publication.CREATED
        assert len(bundle_paths(place)) == 3
        place.store().verify("k")
        place.store().fetch("k", into)
        assert contents_of(into) == files
        assert place.store().publish(artifact, source) is Publication.PRESENT

    def test_a_file_of_a_bundle_that_was_cut_short_is_not_read_as_a_shorter_one(
        self, place, many, source
    ):
        store, path = place.store(), expected_path(SMALL)
        store.publish(many, source)
        place.put(path, place.read(path)[: len(SMALL["kernels/k00.bin"]) + 100])
        with (
            store.open_file("k", "kernels/k01.bin") as stream,
            pytest.raises(ArtifactCorrupt, match=r"kernels/k01\.bin has 100 of 9977 bytes"),
        ):
            stream.read()
        with pytest.raises((ArtifactCorrupt, TierError)):
            store.open_file("k", "kernels/k05.bin").read()

    @pytest.mark.parametrize("first", [True, False])
    def test_the_same_files_in_the_other_form_are_present(
        self, place, many, source, first, monkeypatch
    ):
        """An older release's artifact is as good as ours."""
        for bundles in (first, not first):
            with monkeypatch.context() as patch:
                if not bundles:
                    patch.setattr(_parcels, "FEWEST", 10**6)
                answer = place.store().publish(many, source)
            assert answer is (Publication.CREATED if bundles is first else Publication.PRESENT)
        assert bool(bundle_paths(place)) is first

    # -- damage, repair, gc ---------------------------------------------------------------------

    def test_a_lost_bundle_is_corrupt_and_comes_back_under_its_name(
        self, place, many, source, into
    ):
        store = place.store()
        store.publish(many, source)
        before, record = place.paths(), place.read("index/k.json")
        place.remove(expected_path(SMALL))
        with pytest.raises(ArtifactCorrupt, match=r"kernels/k00\.bin.* is named and not there"):
            place.store().verify("k")
        with pytest.raises(ArtifactCorrupt, match="is named and not there"):
            place.store().open_file("k", "kernels/k05.bin")
        with pytest.raises(ArtifactCorrupt, match="is named and not there"):
            store.fetch("k", into)
        assert store.publish(many, source) is Publication.REPAIRED
        assert [p for p in place.paths() if not p.endswith("/damaged")] == before
        assert place.read("index/k.json") == record
        empty_directory(into)
        store.fetch("k", into)
        assert contents_of(into) == FILES

    @pytest.mark.parametrize("how", ["flipped", "cut", "swapped"])
    def test_a_damaged_bundle_is_told_by_the_file_and_repaired(
        self, place, many, source, into, how
    ):
        store, path = place.store(), expected_path(SMALL)
        store.publish(many, source)
        good = place.read(path)
        at = len(SMALL["kernels/k00.bin"]) + 10
        bad = {
            "flipped": good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :],
            "cut": good[:at],
            "swapped": good[at:] + good[:at],
        }[how]
        place.put(path, bad)
        name = r"kernels/k00\.bin" if how == "swapped" else r"kernels/k01\.bin"
        with pytest.raises(ArtifactCorrupt, match=name):
            place.store().fetch("k", into)
        with pytest.raises(ArtifactCorrupt, match=name):
            place.store().verify("k")
        assert store.publish(many, source) is Publication.REPAIRED
        assert place.read(path) == good
        assert store.verify("k").key == "k"

    def test_one_other_file_is_a_conflict_and_its_bundle_is_swept(self, place, many, source, other):
        store = place.store()
        store.publish(many, source)
        theirs = fill(other, {**FILES, "kernels/k03.bin": b"other" * 3000}, "k")
        assert store.publish(theirs, other) is Publication.CONFLICT
        store.grace = -60.0
        collect(store, grace=0)
        assert bundle_paths(place) == [expected_path(SMALL)]
        assert store.verify("k").same_bytes(many)

    def test_a_lost_bundle_of_which_one_file_differs_is_replaced_by_what_there_is(
        self, place, many, source, other, into
    ):
        store = place.store()
        store.publish(many, source)
        place.remove(expected_path(SMALL))
        files = {**FILES, "kernels/k03.bin": b"other" * 3000}
        assert store.publish(fill(other, files, "k"), other) is Publication.REPAIRED
        store.fetch("k", into)
        assert contents_of(into) == files

    def test_deleting_frees_the_bundle(self, place, many, source):
        store = place.store()
        store.grace = -60.0
        store.publish(many, source)
        assert store.delete("k")
        assert [p for p in place.paths() if p.startswith(("payload/", "index/"))] == []

    def test_a_source_that_is_not_what_the_record_says_never_becomes_a_bundle(
        self, place, many, source
    ):
        flip(source / "kernels/k07.bin", 5000)
        with pytest.raises(ArtifactCorrupt, match=r"kernels/k07\.bin has sha256"):
            place.store().publish(many, source)
        assert bundle_paths(place) == []
        assert place.store().find("k") is None

    # -- hostile records ------------------------------------------------------------------------

    @pytest.mark.parametrize("how", ["order", "names", "digest", "size", "member", "alone"])
    def test_a_record_whose_bundle_is_not_made_of_its_files_is_corrupt(
        self, place, many, source, into, how
    ):
        place.store().publish(many, source)

        def change(files, raw):
            one, two = files["kernels/k00.bin"], files["kernels/k01.bin"]
            if how == "order":
                raw["files"] = [two, one, *(f for f in raw["files"] if f not in (one, two))]
            elif how == "names":
                one["name"], two["name"] = two["name"], one["name"]
            elif how == "digest":
                one["stored"]["sha256"] = "0" * 64
            elif how == "size":
                for name in SMALL:
                    files[name]["stored"]["size"] += 1
            elif how == "member":
                del one["stored"]
            else:
                files["graph_k.neff"]["stored"] = one["stored"]

        rewritten(place, change)
        with pytest.raises(ArtifactCorrupt, match="is not made of them"):
            place.store().find("k")
        with pytest.raises(ArtifactCorrupt, match="is not made of them"):
            place.store().fetch("k", into)
        assert contents_of(into) == {}
        assert place.store().publish(many, source) is Publication.REPAIRED
        place.store().verify("k")

    def test_a_bundle_larger_than_can_be_held_is_a_newer_releases_and_left_alone(
        self, place, many, source
    ):
        place.store().publish(many, source)

        def change(files, _raw):
            for name in SMALL:
                files[name]["stored"]["size"] = PIECE + 1

        rewritten(place, change)
        with pytest.raises(TierError, match="upgrade neuron-store"):
            place.store().find("k")

    def test_no_file_can_have_the_name_of_a_bundle(self, place, many, source):
        place.store().publish(many, source)
        rewritten(place, lambda files, _raw: files["graph_k.neff"].update(name=NAME))
        with pytest.raises(ArtifactCorrupt, match="unsafe file name"):
            place.store().find("k")

    def test_another_tier_chooses_its_own_form(self, place, many, source, into):
        store = place.store()
        store.publish(many, source)
        fetched = attrs.evolve(store.find("k"), key="k2")
        store.fetch("k", into)
        assert store.publish(fetched, into) is Publication.CREATED
        assert bundle_paths(place, "k2") == [expected_path(SMALL, "k2")]

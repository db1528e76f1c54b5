"""What every object tier must do with `compress=zstd`, run on each of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from neuron_store.abc import Publication
from neuron_store.artifact import dump_record, load_record
from neuron_store.collecting import collect
from neuron_store.errors import ArtifactCorrupt, TierError
from neuron_store.streams import empty_directory
from neuron_store_backends import _encoding, _packing
from neuron_store_backends.local import LocalStore
from tests.backends.cases import contents_of, fill

zstd = _encoding.zstd_module()

TEXT = b"".join(b"  %%add.%d = f32[8,128]{1,0} add(%%p.%d, %%p.0)\n" % (n, n) for n in range(5000))
PACKED = {
    "graph.hlo": TEXT,
    "graph_k.neff": os.urandom(300_000),
    "sub/notes.txt": TEXT[:20_000],
    "small.txt": TEXT[:16_000],
    "meta.json": b'{"version": 0}',
}


def rewritten(place, change, key="k"):
    """Put the record back, its JSON changed."""
    raw = json.loads(place.read(f"index/{key}.json"))
    change({entry["name"]: entry for entry in raw["files"]}, raw)
    place.put(f"index/{key}.json", json.dumps(raw).encode())


def forms(place, key="k"):
    """What the record says of stored forms."""
    found, _ = load_record(place.read(f"index/{key}.json"), key=key, source="test")
    return {f.name: f.stored for f in found.files if f.stored is not None}


def stored_path(place, name, key="k"):
    return f"payload/{key}/{forms(place, key)[name].sha256}/{name}"


def smuggle(place, name, data, **facts):
    """Make `data` the stored form of a file, as somebody who may write to the bucket can."""
    form = {"encoding": "zstd", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    place.put(f"payload/k/{form['sha256']}/{name}", data)
    rewritten(place, lambda files, _raw: files[name].update(stored=form, **facts))


@contextlib.contextmanager
def at_level(level):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_packing, "LEVEL", level)
        yield


class RoundTripCases:
    """Subclass with a fixture `place`."""

    @pytest.fixture
    def packed(self, source):
        """Not published yet; its files are in `source`."""
        return fill(source, PACKED, "k")

    @pytest.fixture
    def store(self, place):
        return place.store(compress="zstd")

    def test_what_shrinks_is_stored_compressed_and_comes_back(
        self, place, store, packed, source, into
    ):
        assert store.publish(packed, source) is Publication.CREATED
        record = json.loads(place.read("index/k.json"))
        assert record["neuron_store_record"] == 2
        for entry in record["files"]:
            data = PACKED[entry["name"]]
            assert (entry["size"], entry["sha256"]) == (
                len(data),
                hashlib.sha256(data).hexdigest(),
            )
        assert set(forms(place)) == {"graph.hlo", "sub/notes.txt"}
        for name, form in forms(place).items():
            lies = place.read(stored_path(place, name))
            assert (form.encoding, form.size) == ("zstd", len(lies))
            assert hashlib.sha256(lies).hexdigest() == form.sha256
            assert zstd.decompress(lies) == PACKED[name]
        # Reading needs no option.
        fetched = place.store().fetch("k", into)
        assert contents_of(into) == PACKED
        assert fetched.same_bytes(packed)
        assert all(f.stored is None for f in fetched.files)
        assert place.store().verify("k").stored_size < sum(map(len, PACKED.values())) - 200_000
        with place.store().open_file("k", "graph.hlo") as stream:
            assert stream.read() == TEXT


class CompressingCases(RoundTripCases):
    """The whole of it; subclass with a fixture `place`."""

    # -- publish --------------------------------------------------------------------------------

    def test_without_the_option_the_record_is_one_of_version_1(self, place, packed, source):
        place.store().publish(packed, source)
        record = json.loads(place.read("index/k.json"))
        assert record["neuron_store_record"] == 1
        assert not any("stored" in entry for entry in record["files"])

    def test_where_nothing_shrinks_the_record_is_one_of_version_1(self, place, store, source):
        artifact = fill(source, {"graph_k.neff": os.urandom(300_000)}, "k")
        store.publish(artifact, source)
        assert json.loads(place.read("index/k.json"))["neuron_store_record"] == 1

    def test_a_file_that_shrinks_only_at_its_beginning_is_sent_as_it_is(
        self, place, store, source, into
    ):
        data = bytes(1 << 20) + os.urandom(8 << 20)
        store.publish(fill(source, {"f": data}, "k"), source)
        assert forms(place) == {}
        store.fetch("k", into)
        assert (into / "f").read_bytes() == data

    @pytest.mark.parametrize("first", ["zstd", None])
    def test_the_same_files_in_the_other_form_are_present(self, place, packed, source, first):
        place.store(compress=first).publish(packed, source)
        before = place.paths()
        second = place.store(compress=None if first else "zstd")
        assert second.publish(packed, source) is Publication.PRESENT
        assert place.paths() == before

    def test_other_files_in_any_form_are_a_conflict(self, place, store, packed, source, other):
        store.publish(packed, source)
        theirs = fill(other, {**PACKED, "graph.hlo": TEXT + b"more"}, "k")
        assert store.publish(theirs, other) is Publication.CONFLICT
        assert place.store().publish(theirs, other) is Publication.CONFLICT

    def test_nothing_is_left_in_the_directory_for_temporary_files(
        self, place, store, packed, source, tmp_path, monkeypatch
    ):
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        store.publish(packed, source)
        (source / "graph.hlo").write_bytes(TEXT[:-1] + b"?")
        with pytest.raises(ArtifactCorrupt, match=r"graph\.hlo"):
            store.publish(attrs.evolve(packed, key="k2"), source)
        assert list((tmp_path / "tmp").iterdir()) == []
        assert [p for p in place.paths() if "k2" in p] == []

    def test_a_full_disk_for_temporary_files_costs_only_the_compression(
        self, place, store, packed, source, into, monkeypatch
    ):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(_packing, "write_all", full)
        assert store.publish(packed, source) is Publication.CREATED
        assert forms(place) == {}
        store.fetch("k", into)
        assert contents_of(into) == PACKED

    def test_publishers_of_different_levels_have_one_creator_and_one_form(
        self, place, packed, source, into, monkeypatch
    ):
        local, levels = threading.local(), iter([1, 3, 9, 19])
        barrier, lock = threading.Barrier(4), threading.Lock()

        real = zstd.ZstdCompressor
        module = type("Z", (), {n: getattr(zstd, n) for n in ("compress", "ZstdError")})
        module.ZstdCompressor = staticmethod(lambda level: real(level=local.level))
        monkeypatch.setattr(_packing, "zstd_module", lambda: module)

        def publish(_number):
            with lock:
                local.level = next(levels)
            mine = place.store(compress="zstd")
            barrier.wait(30)
            return mine.publish(packed, source)

        with ThreadPoolExecutor(4) as pool:
            answers = sorted(a.name for a in pool.map(publish, range(4)))
        assert answers == ["CREATED", "PRESENT", "PRESENT", "PRESENT"]
        place.store().fetch("k", into)
        assert contents_of(into) == PACKED
        # The losers' forms are nobody's, and gc sweeps them.
        store = place.store()
        store.grace = -60.0
        collect(store, grace=0)
        named = {f"payload/k/{form.sha256}/{name}" for name, form in forms(place).items()}
        raw = packed.file("graph_k.neff").sha256, packed.file("small.txt").sha256
        named |= {f"payload/k/{raw[0]}/graph_k.neff", f"payload/k/{raw[1]}/small.txt"}
        assert {p for p in place.paths() if p.startswith("payload/")} == named

    # -- repair ---------------------------------------------------------------------------------

    def test_a_lost_compressed_payload_is_brought_back_under_its_name(
        self, place, store, packed, source, into
    ):
        store.publish(packed, source)
        before, path = place.paths(), stored_path(place, "graph.hlo")
        record = place.read("index/k.json")
        place.remove(path)
        with pytest.raises(ArtifactCorrupt):
            place.store().verify("k")
        # Whatever form this one prefers.
        assert place.store().publish(packed, source) is Publication.REPAIRED
        assert place.paths() == before
        assert place.read("index/k.json") == record
        store.fetch("k", into)
        assert contents_of(into) == PACKED

    @pytest.mark.parametrize("compress", ["zstd", None])
    def test_a_lost_payload_that_cannot_be_made_again_is_replaced_in_a_form_that_can(
        self, place, packed, source, into, compress
    ):
        with at_level(19):
            place.store(compress="zstd").publish(packed, source)
        old = forms(place)["graph.hlo"]
        place.remove(stored_path(place, "graph.hlo"))
        store = place.store(compress=compress)
        assert store.publish(packed, source) is Publication.REPAIRED
        assert forms(place).get("graph.hlo") != old
        assert bool(forms(place)) is (compress == "zstd")
        store.fetch("k", into)
        assert contents_of(into) == PACKED
        assert store.publish(packed, source) is Publication.PRESENT

    def test_a_repair_in_another_form_keeps_the_signatures(self, place, packed, source):
        from neuron_store.artifact import Signature
        from neuron_store.signing import SCHEME, merge_signatures

        signature = Signature("0" * 32, "eA==", SCHEME)
        with at_level(19):
            place.store(compress="zstd").publish(merge_signatures(packed, signature), source)
        place.remove(stored_path(place, "graph.hlo"))
        assert place.store().publish(packed, source) is Publication.REPAIRED
        assert place.store().find("k").signatures == (signature,)

    def test_endorsing_keeps_the_stored_form(self, place, store, packed, source):
        from neuron_store.artifact import Signature
        from neuron_store.signing import SCHEME, merge_signatures

        store.publish(packed, source)
        before = forms(place)
        signature = Signature("0" * 32, "eA==", SCHEME)
        assert store.endorse(merge_signatures(packed, signature))
        assert forms(place) == before
        assert place.store().verify("k").signatures == (signature,)

    @pytest.mark.parametrize("how", ["garbage", "cut", "flipped", "longer"])
    def test_a_damaged_frame_is_corrupt_and_the_next_publish_repairs_it(
        self, place, store, packed, source, into, how
    ):
        store.publish(packed, source)
        path = stored_path(place, "graph.hlo")
        good = place.read(path)
        bad = {
            "garbage": os.urandom(len(good)),
            "cut": good[: len(good) // 2],
            "flipped": good[:-20] + bytes([good[-20] ^ 0x55]) + good[-19:],
            "longer": good[:-4],
        }[how]
        place.put(path, bad)
        with pytest.raises(ArtifactCorrupt, match=r"graph\.hlo"):
            place.store().fetch("k", into)
        assert store.publish(packed, source) is Publication.REPAIRED
        assert place.read(path) == good
        assert store.verify("k").key == "k"

    def test_a_plain_payload_lost_is_repaired_by_one_who_compresses(
        self, place, store, packed, source
    ):
        place.store().publish(packed, source)
        path = f"payload/k/{packed.file('graph.hlo').sha256}/graph.hlo"
        place.remove(path)
        assert store.publish(packed, source) is Publication.REPAIRED
        assert place.read(path) == TEXT

    # -- hostile frames -------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [1000, 100_000])
    def test_a_bomb_is_corrupt_and_never_written_out(
        self, place, store, packed, source, into, size
    ):
        """A GiB of zeros in 32 KiB, said to be small."""
        store.publish(packed, source)
        frame = zstd.ZstdCompressor(level=1)
        bomb = b"".join([frame.compress(bytes(1 << 20)) for _ in range(1024)] + [frame.flush()])
        smuggle(place, "graph.hlo", bomb, size=size)
        with pytest.raises(ArtifactCorrupt, match=r"graph\.hlo has more than"):
            place.store().fetch("k", into)
        assert (into / "graph.hlo").stat().st_size <= size
        with pytest.raises(ArtifactCorrupt, match="1001 bytes|100001 bytes"):
            place.store().verify("k")

    def test_a_frame_that_wants_a_larger_window_is_refused(
        self, place, store, packed, source, into
    ):
        store.publish(packed, source)
        options = {zstd.CompressionParameter.window_log: 28}
        frame = zstd.ZstdCompressor(options=options)
        smuggle(place, "graph.hlo", frame.compress(TEXT) + frame.flush())
        with pytest.raises(ArtifactCorrupt, match="cannot be decoded"):
            place.store().fetch("k", into)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (zstd.compress(TEXT)[:-1], "cut off"),
            (zstd.compress(TEXT) + b"+", "after the end"),
            (zstd.compress(TEXT) + zstd.compress(b"more"), "after the end"),
            (zstd.compress(TEXT[:-1]), "of 2"),
            (zstd.compress(TEXT[:-1] + b"?"), "sha256"),
            (TEXT, "cannot be decoded"),
            (b"", "cut off"),
        ],
    )
    def test_frames_that_are_not_the_file_are_corrupt(
        self, place, store, packed, source, into, data, reason
    ):
        store.publish(packed, source)
        smuggle(place, "graph.hlo", data)
        with pytest.raises(ArtifactCorrupt, match=reason):
            place.store().fetch("k", into)
        # Its stored form is right by its own digest; only another record can repair it.
        assert store.publish(packed, source) is Publication.REPAIRED
        assert store.verify("k").key == "k"

    def test_a_wrong_stored_form_in_a_record_is_corrupt(self, place, store, packed, source):
        store.publish(packed, source)
        for wrong in ("zstd", {"encoding": "zstd"}, {"encoding": "a/b", "size": 1, "sha256": ""}):
            rewritten(
                place, lambda files, _raw, wrong=wrong: files["graph.hlo"].update(stored=wrong)
            )
            with pytest.raises(ArtifactCorrupt, match="stored form"):
                place.store().find("k")

    # -- what this process cannot read ----------------------------------------------------------

    def test_an_unknown_encoding_is_trouble_and_no_damage(self, place, store, packed, source, into):
        store.publish(packed, source)
        rewritten(place, lambda files, _raw: files["graph.hlo"]["stored"].update(encoding="zstd2"))
        before = place.paths()
        for read in (
            lambda: store.fetch("k", into),
            lambda: store.verify("k"),
            lambda: store.open_file("k", "graph.hlo"),
        ):
            with pytest.raises(TierError, match=r"stored as zstd2.*upgrade neuron-store"):
                read()
        # No more than what came with the record; the rest was not even asked for.
        assert contents_of(into).keys() <= {"meta.json"}
        empty_directory(into)
        assert place.paths() == before
        assert store.publish(packed, source) is Publication.PRESENT

    def test_without_the_module_reading_is_trouble_that_names_the_extra(
        self, place, store, packed, source, into, monkeypatch
    ):
        store.publish(packed, source)
        before = place.paths()

        def missing():
            raise ImportError("no module")

        monkeypatch.setattr(_encoding, "zstd_module", missing)
        monkeypatch.setattr(_packing, "zstd_module", missing)
        reader = place.store()
        for read in (
            lambda: reader.fetch("k", into),
            lambda: reader.verify("k"),
            lambda: reader.open_file("k", "graph.hlo"),
        ):
            with pytest.raises(TierError, match=r"pip install 'neuron-store\[zstd\]'"):
                read()
        # No more than what came with the record; the rest was not even asked for.
        assert contents_of(into).keys() <= {"meta.json"}
        empty_directory(into)
        assert place.paths() == before
        assert reader.publish(packed, source) is Publication.PRESENT
        # What it cannot make again it replaces by what it has.
        place.remove(stored_path(place, "graph.hlo"))
        assert reader.publish(packed, source) is Publication.REPAIRED
        reader.fetch("k", into)
        assert contents_of(into) == PACKED

    def test_a_record_of_a_newer_version_is_left_alone(self, place, store, packed, source):
        store.publish(packed, source)
        rewritten(place, lambda _files, raw: raw.update(neuron_store_record=3))
        with pytest.raises(TierError, match="upgrade neuron-store"):
            store.find("k")

    # -- other tiers, gc ------------------------------------------------------------------------

    def test_a_local_tier_never_says_how_another_stores_it(
        self, place, store, packed, source, into, tmp_path
    ):
        store.publish(packed, source)
        store.fetch("k", into)
        local = LocalStore(tmp_path / "local")
        # What `find` gives says so, and may be handed on.
        found = store.find("k")
        assert found.file("graph.hlo").stored is not None
        local.publish(found, into)
        record = (tmp_path / "local" / "k" / ".neuron_store.json").read_bytes()
        assert record == dump_record(local.find("k"))
        assert b"stored" not in record
        assert json.loads(record)["neuron_store_record"] == 1
        # Nor does the next object tier take it for its own.
        attrs_key = attrs.evolve(found, key="k2")
        assert place.store().publish(attrs_key, into) is Publication.CREATED
        assert forms(place, "k2") == {}

    def test_gc_keeps_what_a_record_names_and_sweeps_the_rest(self, place, store, packed, source):
        store.publish(packed, source)
        kept = place.paths()
        place.put(f"payload/k/{'a' * 64}/graph.hlo", b"another form")
        raw = packed.file("graph.hlo").sha256
        place.put(f"payload/k/{raw}/graph.hlo", TEXT)
        store.grace = -60.0
        collect(store, grace=0)
        assert [p for p in place.paths() if not p.startswith("gc/")] == kept
        assert store.verify("k").key == "k"
        assert store.delete("k")
        assert [p for p in place.paths() if not p.startswith("gc/")] == []

"""What every conditional-create tier must do, run on each of them.

`place` gives stores and a back door to the raw objects, so that a test never trusts the methods
that it tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import multiprocessing
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import pytest

from neuron_store import steps
from neuron_store.abc import Publication
from neuron_store.artifact import Artifact, ArtifactFile, dump_record
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    InvalidArtifact,
    InvalidKey,
    TierError,
)
from neuron_store_backends import _publishing
from neuron_store_backends._options import Times
from tests.backends import children

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from neuron_store_backends.conditional import ConditionalStore

MIB = 1 << 20


class Place(Protocol):
    """One tier's place, and the back door to it. Paths are relative to the tier's prefix."""

    forks: bool
    """Whether other processes see it."""

    def store(self) -> ConditionalStore: ...

    def put(self, path: str, data: bytes) -> None: ...

    def read(self, path: str) -> bytes: ...

    def remove(self, path: str) -> None: ...

    def paths(self) -> list[str]: ...


def fill(
    directory: Path, contents: Mapping[str, bytes], key: str, *, digests: bool = True
) -> Artifact:
    """A directory with these files, and its artifact."""
    files = []
    for name, data in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest() if digests else None
        files.append(ArtifactFile(name, len(data), digest))
    return Artifact(key=key, files=tuple(files))


CONTENTS = {
    "graph.hlo": os.urandom(30_000),
    "graph_k.neff": os.urandom(300_000),
    "meta.json": b'{"version": 0}',
    "empty": b"",
    "sub/dir/note.txt": b"deep",
}


def flip(path: Path, offset: int) -> None:
    """One bit of a file: random bytes may be those that a test would write over them."""
    with path.open("r+b") as stream:
        byte = os.pread(stream.fileno(), 1, offset)[0]
        os.pwrite(stream.fileno(), bytes([byte ^ 1]), offset)


def contents_of(directory: Path) -> dict[str, bytes]:
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file()
    }


class ConditionalCases:
    """Subclass with a fixture `place`."""

    def payload(self, artifact: Artifact, name: str) -> str:
        file = artifact.file(name)
        assert file is not None
        return f"payload/{artifact.key}/{file.sha256}/{name}"

    # -- publish and read -----------------------------------------------------------------------

    def test_a_published_artifact_comes_back_byte_for_byte(self, place, artifact, source, into):
        assert place.store().publish(artifact, source) is Publication.CREATED
        fetched = place.store().fetch("k", into)
        assert contents_of(into) == CONTENTS
        assert fetched.same_bytes(artifact)
        assert fetched.has_digests

    def test_the_objects_are_where_the_design_says(self, place, artifact, source):
        place.store().publish(artifact, source)
        assert place.paths() == sorted(
            [
                "index/k.json",
                self.payload(artifact, "graph.hlo"),
                self.payload(artifact, "graph_k.neff"),
            ]
        )
        record = json.loads(place.read("index/k.json"))
        assert base64.b64decode(record["inline"]["meta.json"]) == CONTENTS["meta.json"]
        assert set(record["inline"]) == {"meta.json", "empty", "sub/dir/note.txt"}

    def test_missing_digests_are_computed(self, place, source, into):
        artifact = fill(source, CONTENTS, "k", digests=False)
        assert place.store().publish(artifact, source) is Publication.CREATED
        assert place.store().fetch("k", into).has_digests
        assert contents_of(into) == CONTENTS

    def test_a_file_of_many_pieces_survives(self, place, source, into):
        data = os.urandom(1000) * (20 * MIB // 1000) + b"odd"
        artifact = fill(source, {"graph_k.neff": data}, "k")
        assert place.store().publish(artifact, source) is Publication.CREATED
        place.store().fetch("k", into)
        assert (into / "graph_k.neff").read_bytes() == data
        assert place.store().verify("k").size == len(data)

    def test_memory_is_bounded_whatever_the_size(self, place, source, into):
        if not place.forks:
            pytest.skip("the tier keeps its objects in this very memory")
        path = source / "graph_k.neff"
        with path.open("wb") as stream:
            for _ in range(160):
                stream.write(os.urandom(MIB))
        artifact = Artifact("k", (ArtifactFile("graph_k.neff", 160 * MIB),))
        store = place.store()
        answers = multiprocessing.get_context("fork").SimpleQueue()
        process = multiprocessing.get_context("fork").Process(
            target=_measure_memory, args=(store, artifact, source, into, answers)
        )
        process.start()
        process.join(120)
        assert process.exitcode == 0
        assert answers.get() < 150 * MIB

    def test_a_miss_is_none_and_a_fetch_of_it_not_found(self, place, into):
        store = place.store()
        assert store.find("nothing") is None
        with pytest.raises(ArtifactNotFound):
            store.fetch("nothing", into)
        with pytest.raises(ArtifactNotFound):
            store.open_file("nothing", "f")
        assert list(store.keys()) == []
        assert store.delete("nothing") is False

    def test_files_are_streamed_one_by_one(self, place, artifact, source):
        place.store().publish(artifact, source)
        store = place.store()
        for name, data in CONTENTS.items():
            with store.open_file("k", name) as stream:
                assert stream.read(10) == data[:10]
                assert stream.read() == data[10:]
        with pytest.raises(ArtifactNotFound, match="no file 'other'"):
            store.open_file("k", "other")

    @pytest.mark.parametrize("key", ["../x", "a/b", "", ".hidden", "k" * 201])
    def test_an_unsafe_key_is_refused_before_anything_is_asked(
        self, place, artifact, source, into, key
    ):
        store = place.store()
        store.objects.times = Times(timeout=0)  # any request would fail otherwise
        bad = attrs.evolve(artifact, key=key)
        for call in (
            lambda: store.find(key),
            lambda: store.open_file(key, "f"),
            lambda: store.fetch(key, into),
            lambda: store.delete(key),
            lambda: store.publish(bad, source),
        ):
            with pytest.raises(InvalidKey):
                call()

    def test_keys_lists_committed_artifacts_and_nothing_else(self, place, artifact, source):
        store = place.store()
        store.publish(artifact, source)
        store.publish(attrs.evolve(artifact, key="MODULE_1a+2b"), source)
        place.put("payload/orphan/" + "0" * 64 + "/f", b"x")
        place.put("index/README.txt", b"x")
        place.put("index/.hidden.json", b"x")
        place.put("index/sub/dir.json", b"x")
        place.put("elsewhere.json", b"x")
        assert sorted(place.store().keys()) == ["MODULE_1a+2b", "k"]

    def test_what_another_client_writes_is_seen_at_once(self, place, artifact, source, into):
        """Pitfall 21."""
        one, two = place.store(), place.store()
        assert two.find("k") is None
        assert list(two.keys()) == []
        assert one.publish(artifact, source) is Publication.CREATED
        assert two.find("k") is not None
        assert list(two.keys()) == ["k"]
        two.fetch("k", into)
        assert one.delete("k")
        assert two.find("k") is None
        assert list(two.keys()) == []

    # -- first writer wins ----------------------------------------------------------------------

    def test_the_same_bytes_again_are_present(self, place, artifact, source):
        assert place.store().publish(artifact, source) is Publication.CREATED
        before = place.read("index/k.json")
        assert place.store().publish(artifact, source) is Publication.PRESENT
        assert place.read("index/k.json") == before

    def test_another_completion_time_is_still_the_same_artifact(self, place, source, other):
        one = fill(source, {"f": b"1", ".compilation_complete": b"completed:1.0\n"}, "k")
        two = fill(other, {"f": b"1", ".compilation_complete": b"completed:22.0\n"}, "k")
        assert place.store().publish(one, source) is Publication.CREATED
        assert place.store().publish(two, other) is Publication.PRESENT

    def test_other_bytes_are_a_conflict_and_the_first_stay(
        self, place, artifact, source, other, into
    ):
        place.store().publish(artifact, source)
        second = fill(other, {**CONTENTS, "graph.hlo": b"other" * 2000}, "k")
        assert place.store().publish(second, other) is Publication.CONFLICT
        place.store().fetch("k", into)
        assert contents_of(into) == CONTENTS

    def test_of_many_threads_exactly_one_creates(self, place, artifact, source):
        store = place.store()
        for number in range(10):
            mine = attrs.evolve(artifact, key=f"k{number}")
            barrier = threading.Barrier(8)

            def one(_n, mine=mine, barrier=barrier):
                barrier.wait(30)
                return store.publish(mine, source)

            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(one, range(8)))
            assert answers.count(Publication.CREATED) == 1
            assert answers.count(Publication.PRESENT) == 7

    def race(self, place, source, tmp_path, method, processes=16, rounds=4):
        """Processes with the same and with other bytes; each round has one winner."""
        if not place.forks:
            pytest.skip("the tier is for threads")
        context = multiprocessing.get_context(method)
        barrier, answers = context.Barrier(processes), context.SimpleQueue()
        store = place.store()
        if method == "fork":
            assert store.find("warm") is None  # children inherit a used handle
        works = []
        for number in range(processes):
            directory = tmp_path / f"rank{number}"
            directory.mkdir()
            # Two kinds of bytes: losers are PRESENT or CONFLICT.
            fill(directory, {"f": b"%d" % (number % 2) * 20_000, "small": b"s"}, "x")
            works.append(
                [
                    (
                        Artifact(
                            f"r{n}",
                            (
                                ArtifactFile("f", 20_000),
                                ArtifactFile("small", 1),
                            ),
                        ),
                        directory,
                    )
                    for n in range(rounds)
                ]
            )
        pool = [
            context.Process(target=children.publish_rounds, args=(store, work, barrier, answers))
            for work in works
        ]
        for process in pool:
            process.start()
        told = [answers.get() for _ in pool]
        for process in pool:
            process.join(60)
            assert process.exitcode == 0
        for n in range(rounds):
            column = [each[n] for each in told]
            assert column.count("CREATED") == 1, column
            assert set(column) <= {"CREATED", "PRESENT", "CONFLICT"}
            assert column.count("CONFLICT") == processes // 2
            (tmp_path / f"out{n}").mkdir()
            place.store().fetch(f"r{n}", tmp_path / f"out{n}")
        assert sorted(place.store().keys()) == sorted(f"r{n}" for n in range(rounds))

    def test_of_sixteen_forked_processes_exactly_one_creates(self, place, source, tmp_path):
        self.race(place, source, tmp_path, "fork")

    @pytest.mark.slow
    def test_of_sixteen_spawned_processes_exactly_one_creates(self, place, source, tmp_path):
        self.race(place, source, tmp_path, "spawn")

    def test_a_forked_child_uses_what_its_parent_used(self, place, artifact, source, tmp_path):
        """Pitfall 22."""
        if not place.forks:
            pytest.skip("the tier is for threads")
        store = place.store()
        store.publish(artifact, source)
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        pool = []
        for number in range(3):
            (tmp_path / f"child{number}").mkdir()
            pool.append(
                context.Process(
                    target=children.find_and_fetch,
                    args=(store, "k", tmp_path / f"child{number}", answers),
                )
            )
        for process in pool:
            process.start()
        for process in pool:
            process.join(60)
            assert process.exitcode == 0
        assert [answers.get() for _ in pool] == [("ok", artifact.size, ["k"])] * 3
        assert store.find("k") is not None

    # -- killed ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", ["kill", "exit"])
    @pytest.mark.parametrize("where", _publishing.STEPS)
    def test_killed_at_a_step_nothing_is_visible_and_the_next_publish_works(
        self, place, artifact, source, into, where, how
    ):
        if not place.forks:
            pytest.skip("the tier is for threads")
        process = multiprocessing.get_context("fork").Process(
            target=children.publish_and_die, args=(place.store(), artifact, source, where, how)
        )
        process.start()
        process.join(60)
        assert process.exitcode == (-9 if how == "kill" else 77)
        store = place.store()
        committed = where == "conditional.committed"
        assert list(store.keys()) == (["k"] if committed else [])
        assert (store.find("k") is not None) is committed
        expected = Publication.PRESENT if committed else Publication.CREATED
        assert store.publish(artifact, source) is expected
        store.fetch("k", into)
        assert contents_of(into) == CONTENTS

    # -- a bad source ---------------------------------------------------------------------------

    def assert_untouched(self, place) -> None:
        assert [p for p in place.paths() if not p.startswith("payload/")] == []
        assert place.store().find("k") is None

    @pytest.mark.parametrize("name", ["graph_k.neff", "meta.json"])
    def test_a_source_with_other_bytes_is_not_published(self, place, artifact, source, name):
        data = bytearray((source / name).read_bytes())
        data[-1] ^= 1
        (source / name).write_bytes(bytes(data))
        with pytest.raises(ArtifactCorrupt, match=name):
            place.store().publish(artifact, source)
        self.assert_untouched(place)
        # Nor did the wrong bytes get the name of the right ones.
        assert self.payload(artifact, name) not in place.paths()

    def test_wrong_bytes_of_many_pieces_never_get_the_right_name(self, place, source):
        artifact = fill(source, {"big": os.urandom(1000) * 20_000}, "k")
        flip(source / "big", 3 * MIB)
        with pytest.raises(ArtifactCorrupt, match="big has sha256"):
            place.store().publish(artifact, source)
        assert [p for p in place.paths() if "payload" in p] == []
        self.assert_untouched(place)

    @pytest.mark.parametrize("change", ["missing", "shorter", "longer"])
    @pytest.mark.parametrize("name", ["graph_k.neff", "meta.json"])
    def test_a_source_that_is_incomplete_is_not_published(
        self, place, artifact, source, name, change
    ):
        path = source / name
        if change == "missing":
            path.unlink()
        else:
            data = path.read_bytes()
            path.write_bytes(data[:-1] if change == "shorter" else data + b"+")
        with pytest.raises(ArtifactCorrupt, match=name):
            place.store().publish(artifact, source)
        # It is told before anything is sent.
        assert place.paths() == []
        assert place.store().find("k") is None

    @pytest.mark.parametrize("kind", ["link", "pipe", "folder link"])
    def test_links_and_devices_in_the_source_are_refused(
        self, place, artifact, source, tmp_path, kind
    ):
        if kind == "folder link":
            (source / "sub").rename(tmp_path / "moved")
            (source / "sub").symlink_to(tmp_path / "moved")
        else:
            path = source / "graph_k.neff"
            path.rename(tmp_path / "moved")
            if kind == "link":
                path.symlink_to(tmp_path / "moved")
            else:
                os.mkfifo(path)
        with pytest.raises(InvalidArtifact, match="refused"):
            place.store().publish(artifact, source)
        self.assert_untouched(place)

    # -- damage ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", ["missing", "short"])
    def test_a_lost_payload_is_corrupt_and_the_next_publish_repairs_it(
        self, place, artifact, source, into, tmp_path, how
    ):
        store = place.store()
        store.publish(artifact, source)
        path = self.payload(artifact, "graph_k.neff")
        if how == "missing":
            place.remove(path)
        else:
            place.put(path, CONTENTS["graph_k.neff"][:-5])
        (tmp_path / "scrap").mkdir()
        with pytest.raises(ArtifactCorrupt, match="graph_k.neff"):
            place.store().fetch("k", tmp_path / "scrap")
        if how == "missing":
            with pytest.raises(ArtifactCorrupt, match="graph_k.neff"):
                place.store().open_file("k", "graph_k.neff")
        assert place.store().publish(artifact, source) is Publication.REPAIRED
        place.store().fetch("k", into)
        assert contents_of(into) == CONTENTS
        assert place.store().publish(artifact, source) is Publication.PRESENT

    def test_wrong_bytes_of_the_right_size_are_corrupt_and_repaired(
        self, place, artifact, source, into, tmp_path
    ):
        """No listing shows them: the reader that found out leaves word for the next publisher."""
        place.store().publish(artifact, source)
        data = CONTENTS["graph_k.neff"]
        place.put(self.payload(artifact, "graph_k.neff"), bytes(len(data)))
        (tmp_path / "scrap").mkdir()
        with pytest.raises(ArtifactCorrupt, match="sha256"):
            place.store().fetch("k", tmp_path / "scrap")
        assert place.store().publish(artifact, source) is Publication.REPAIRED
        place.store().fetch("k", into)
        assert contents_of(into) == CONTENTS
        assert "payload/k/damaged" not in place.paths()
        assert place.store().publish(artifact, source) is Publication.PRESENT

    def test_a_false_word_of_damage_costs_one_check(self, place, artifact, source):
        place.store().publish(artifact, source)
        place.put("payload/k/damaged", b"")
        assert place.store().publish(artifact, source) is Publication.PRESENT
        assert "payload/k/damaged" not in place.paths()

    def test_a_damaged_artifact_of_other_bytes_is_replaced(
        self, place, artifact, source, other, into
    ):
        place.store().publish(artifact, source)
        place.remove(self.payload(artifact, "graph_k.neff"))
        second = fill(other, {"graph_k.neff": b"good" * 5000}, "k")
        assert place.store().publish(second, other) is Publication.REPAIRED
        place.store().fetch("k", into)
        assert contents_of(into) == {"graph_k.neff": b"good" * 5000}
        # The first one is the one that is late now.
        assert place.store().publish(artifact, source) is Publication.CONFLICT

    @pytest.mark.parametrize(
        "record",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"neuron_store_record": 1}',
            b"\xff\xfe",
            b"[" * 100_000,
        ],
        ids=["empty", "torn", "list", "null", "bare", "binary", "deep"],
    )
    def test_an_unparsable_record_is_corrupt_and_repaired(
        self, place, artifact, source, into, record
    ):
        place.put("index/k.json", record)
        store = place.store()
        with pytest.raises(ArtifactCorrupt):
            store.find("k")
        with pytest.raises(ArtifactCorrupt):
            store.fetch("k", into)
        assert store.publish(artifact, source) is Publication.REPAIRED
        store.fetch("k", into)
        assert contents_of(into) == CONTENTS

    @pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "a\\b"])
    def test_a_record_that_names_an_unsafe_path_writes_nothing(self, place, artifact, into, name):
        raw = json.loads(dump_record(artifact))
        raw["files"][0]["name"] = name
        place.put("index/k.json", json.dumps(raw).encode())
        with pytest.raises(ArtifactCorrupt):
            place.store().fetch("k", into)
        assert list(into.iterdir()) == []

    def test_in_line_bytes_that_were_altered_are_corrupt(self, place, artifact, source):
        place.store().publish(artifact, source)
        raw = json.loads(place.read("index/k.json"))
        raw["inline"]["meta.json"] = base64.b64encode(b'{"version": 9}').decode()
        place.put("index/k.json", json.dumps(raw).encode())
        with pytest.raises(ArtifactCorrupt, match="meta.json"):
            place.store().find("k")
        assert place.store().publish(artifact, source) is Publication.REPAIRED

    def test_the_record_of_a_newer_release_is_left_alone(self, place, artifact, source):
        raw = json.loads(dump_record(artifact))
        raw["neuron_store_record"] = 3
        data = json.dumps(raw).encode()
        place.put("index/k.json", data)
        with pytest.raises(TierError, match="upgrade"):
            place.store().find("k")
        with pytest.raises(TierError, match="upgrade"):
            place.store().publish(artifact, source)
        assert place.read("index/k.json") == data

    def test_of_many_repairers_none_displaces_another(self, place, artifact, source, tmp_path):
        """Each has bytes of its own; whoever was told REPAIRED is still there at the end."""
        works = []
        for number in range(6):
            directory = tmp_path / f"repairer{number}"
            directory.mkdir()
            mine = fill(directory, {"f": b"%d" % number * 9000}, "k")
            works.append((place.store(), mine, directory))
        for _ in range(4):
            place.put("index/k.json", b"torn")
            barrier = threading.Barrier(len(works))

            def one(work, barrier=barrier):
                store, artifact, directory = work
                barrier.wait(30)
                return store.publish(artifact, directory)

            with ThreadPoolExecutor(len(works)) as pool:
                answers = list(pool.map(one, works))
            assert answers.count(Publication.REPAIRED) == 1
            assert answers.count(Publication.CONFLICT) == len(works) - 1
            winner = works[answers.index(Publication.REPAIRED)][1]
            found = place.store().find("k")
            assert found is not None
            assert found.same_bytes(winner)

    def test_payload_swept_between_look_and_commit_is_brought_again(
        self, place, artifact, source, into
    ):
        """A CREATED that was returned outlives its publisher, whatever was swept meanwhile."""
        place.put(self.payload(artifact, "graph_k.neff"), CONTENTS["graph_k.neff"])
        store = place.store()
        steps.set_hook(
            lambda name: (
                place.remove(self.payload(artifact, "graph_k.neff"))
                if name == "conditional.commit"
                else None
            )
        )
        assert store.publish(artifact, source) is Publication.CREATED
        steps.set_hook(None)
        store.fetch("k", into)

    # -- delete ---------------------------------------------------------------------------------

    def test_delete_hides_and_leaves_young_payload(self, place, artifact, source, into):
        store = place.store()
        store.publish(artifact, source)
        assert store.delete("k") is True
        assert store.find("k") is None
        assert store.delete("k") is False
        assert self.payload(artifact, "graph_k.neff") in place.paths()
        assert store.publish(artifact, source) is Publication.CREATED
        store.fetch("k", into)

    def test_delete_frees_payload_that_is_older_than_the_grace_time(self, place, artifact, source):
        store = place.store()
        store.publish(artifact, source)
        store.grace = -60.0
        assert store.delete("k") is True
        assert place.paths() == []

    def test_delete_removes_a_damaged_record(self, place):
        place.put("index/k.json", b"torn")
        assert place.store().delete("k") is True
        assert place.store().find("k") is None

    # -- measured -------------------------------------------------------------------------------

    def test_the_probe_finds_an_honest_tier_fit_and_leaves_nothing(self, place):
        """Pitfall 19: measured for 0 B, 1 B and 6 MiB."""
        report = place.store().probe()
        assert report.refused is None, report
        assert all(check.passed for check in report.checks), report
        assert {c.name for c in report.checks} >= {
            "writable",
            "create-if-absent, 0 B",
            "create-if-absent, 1 B",
            "create-if-absent, 6 MiB",
            "create-if-absent, race",
            "read after write",
            "replace-if-unchanged",
        }
        assert report.latency is not None
        assert place.paths() == []

    def test_a_store_can_be_closed_and_used_again(self, place, artifact, source):
        with place.store() as store:
            store.publish(artifact, source)
        assert store.find("k") is not None
        store.close()


def _measure_memory(store: Any, artifact: Artifact, source: Path, into: Path, answers: Any) -> None:
    """Peak of the Python heap over a publish and a fetch; the server is another process."""
    assert store.find("warm") is None
    tracemalloc.start()
    store.publish(artifact, source)
    store.fetch(artifact.key, into)
    answers.put(tracemalloc.get_traced_memory()[1])

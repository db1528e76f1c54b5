"""The shared contract of all tiers, as a class to subclass.

A subclass gives the fixture `factory`: a callable that opens the tier under test, the same one at
every call and, unless `method` is "threads", in every process that calls it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

import attrs
import pytest

from neuron_store.abc import ArtifactStore, Publication
from neuron_store.artifact import Signature
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    InvalidArtifact,
    InvalidKey,
    InvalidRecord,
)
from neuron_store.testing.killing import run_killed_at
from neuron_store.testing.leasing import LeaseContract
from neuron_store.testing.racing import race_publishers, racer_bytes
from neuron_store.testing.samples import make_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from neuron_store.artifact import Artifact

__all__ = ["ArtifactStoreContract"]


KEY = "0123456789abcdef0123456789abcdef"
SMALL = {"graph.hlo": b"small", "empty.bin": b"", "folder/one.bin": b"1"}
HOSTILE_KEYS = (
    "",
    ".",
    "..",
    "../escape",
    "a/b",
    "/etc/passwd",
    "a\\b",
    ".hidden",
    "a\0b",
    "a\n",
    "a" * 201,
    "ключ",
    "-rf",
    "a b",
    "%2e%2e",
    "a:b",
)


class ArtifactStoreContract(LeaseContract):
    """Run against a tier by subclassing. Class attributes tune it to what a tier costs."""

    method: str = "spawn"
    """How races are run: "spawn", "fork", or "threads" for a tier that lives in one process."""
    rounds: int = 100
    writers: int = 8
    patience: float = 0.0
    """Seconds until another client must see a write; 0 on all but NFS."""
    killable: bool = True
    """False for a tier whose content dies with its process."""

    @pytest.fixture
    def factory(self) -> Callable[[], ArtifactStore]:
        """Opens the tier under test."""
        raise NotImplementedError("a subclass of ArtifactStoreContract gives the fixture `factory`")

    @pytest.fixture
    def store(self, factory: Callable[[], ArtifactStore]) -> Iterator[ArtifactStore]:
        """The tier under test, open."""
        with factory() as store:
            yield store

    # -- one client -----------------------------------------------------------------------------

    def test_a_tier_without_the_artifact_answers_none(self, store: ArtifactStore) -> None:
        assert store.find(KEY) is None
        assert store.locate(KEY) is None
        assert list(store.keys()) == []
        with pytest.raises(ArtifactNotFound):
            store.open_file(KEY, "graph.hlo")
        with pytest.raises(ArtifactNotFound):
            store.verify(KEY)
        assert store.delete(KEY) is False

    def test_what_is_published_is_found_read_fetched_and_listed(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        artifact, source = make_source(
            tmp_path / "source",
            KEY,
            SMALL,
            executable="graph.hlo",
            compiler="fake",
            compiler_version="1.2",
            components={"graph": "abc", "level": 3, "flags": ["-O1"]},
            host={"cpu": "znver3"},
            signatures=(Signature("0" * 32, "c2lnbmF0dXJl", "test"),),
        )
        assert store.publish(artifact, source) is Publication.CREATED
        found = store.find(KEY)
        assert found is not None
        assert attrs.evolve(found, files=artifact.files) == artifact
        assert found.signatures == artifact.signatures, "what vouches for it was lost"
        assert {f.name: f.sha256 for f in found.files} == {
            name: hashlib.sha256(data).hexdigest() for name, data in SMALL.items()
        }
        path = store.path_of(KEY)
        assert store.locate(KEY) == (None if path is None else (path, found))
        for name, data in SMALL.items():
            with store.open_file(KEY, name) as stream:
                assert stream.read() == data
        into = tmp_path / "into"
        into.mkdir()
        assert store.fetch(KEY, into) == found
        assert _tree(into) == SMALL
        assert list(store.keys()) == [KEY]
        assert store.verify(KEY) == found
        assert source.is_dir()
        assert _tree(source) == SMALL

    def test_a_fetch_into_anything_but_an_empty_directory_is_refused_and_touches_nothing(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        store.publish(*make_source(tmp_path / "source", KEY, SMALL))
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "precious").write_text("precious")
        for key in (KEY, "f" * 32):
            with pytest.raises(InvalidArtifact):
                store.fetch(key, mine)
            with pytest.raises(InvalidArtifact):
                store.fetch(key, tmp_path / "absent")
        assert _tree(mine) == {"precious": b"precious"}
        assert not (tmp_path / "absent").exists()

    def test_a_file_that_the_artifact_does_not_have_is_not_found(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        store.publish(*make_source(tmp_path / "source", KEY, SMALL))
        with pytest.raises(ArtifactNotFound):
            store.open_file(KEY, "absent")
        for name in ("../graph.hlo", "/etc/passwd", "folder/../graph.hlo", ""):
            with pytest.raises((InvalidRecord, ArtifactNotFound)):
                store.open_file(KEY, name)

    @pytest.mark.parametrize("size", [0, 1, 6 << 20])
    def test_the_first_writer_stays_whatever_the_size(
        self, store: ArtifactStore, tmp_path: Path, size: int
    ) -> None:
        """Pitfall 19: the second create must fail for 0 B, 1 B and 6 MiB."""
        first = os.urandom(size)
        other = bytes(255 - byte for byte in first) or b"x"
        assert store.publish(*make_source(tmp_path / "a", KEY, {"f": first})) is (
            Publication.CREATED
        )
        assert store.publish(*make_source(tmp_path / "b", KEY, {"f": other})) is (
            Publication.CONFLICT
        )
        assert store.publish(*make_source(tmp_path / "c", KEY, {"f": first})) is (
            Publication.PRESENT
        )
        with store.open_file(KEY, "f") as stream:
            assert stream.read() == first

    def test_the_time_in_the_completion_mark_makes_no_conflict(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        marks = [{"f": b"same", ".compilation_complete": text} for text in (b"1.5", b"2.25")]
        store.publish(*make_source(tmp_path / "a", KEY, marks[0]))
        answer = store.publish(*make_source(tmp_path / "b", KEY, marks[1]))
        assert answer is Publication.PRESENT

    def test_a_deleted_artifact_is_gone_and_may_come_back(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        artifact, source = make_source(tmp_path / "source", KEY, SMALL)
        store.publish(artifact, source)
        first = store.find(KEY)
        assert store.delete(KEY) is True
        assert store.find(KEY) is None
        assert list(store.keys()) == []
        assert store.delete(KEY) is False
        assert store.publish(artifact, source) is Publication.CREATED
        second = store.find(KEY)
        assert first is not None
        assert second is not None
        assert first.write_id != second.write_id, "a writer cannot tell its record from another's"
        assert store.verify(KEY).size == artifact.size

    def test_a_source_that_is_not_what_the_record_says_is_refused(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        artifact, source = make_source(tmp_path / "source", KEY, {"f": b"data"})
        wrong_digest = attrs.evolve(artifact.files[0], sha256="0" * 64)
        wrong_size = attrs.evolve(artifact.files[0], size=5)
        absent = attrs.evolve(artifact.files[0], name="absent")
        for bad in (wrong_digest, wrong_size, absent):
            with pytest.raises(ArtifactCorrupt):
                store.publish(attrs.evolve(artifact, files=(bad,)), source)
            assert store.find(KEY) is None
        assert store.publish(artifact, source) is Publication.CREATED

    def test_links_and_pipes_in_the_source_are_refused(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        artifact, source = make_source(tmp_path / "source", KEY, {"f": b"data"})
        (tmp_path / "secret").write_bytes(b"data")
        (source / "f").unlink()
        (source / "f").symlink_to(tmp_path / "secret")
        with pytest.raises(InvalidArtifact):
            store.publish(artifact, source)
        (source / "f").unlink()
        os.mkfifo(source / "f")
        with pytest.raises(InvalidArtifact):
            store.publish(artifact, source)
        assert store.find(KEY) is None

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    def test_a_hostile_key_is_refused_by_every_operation(
        self, store: ArtifactStore, tmp_path: Path, key: str
    ) -> None:
        artifact, source = make_source(tmp_path / "source", KEY, {"f": b"data"})
        into = tmp_path / "into"
        into.mkdir()
        calls: list[Callable[[], object]] = [
            lambda: store.find(key),
            lambda: store.open_file(key, "f"),
            lambda: store.publish(attrs.evolve(artifact, key=key), source),
            lambda: store.delete(key),
            lambda: store.fetch(key, into),
            lambda: store.verify(key),
            lambda: store.path_of(key),
            lambda: store.locate(key),
            lambda: store.get(key),
        ]
        for call in calls:
            with pytest.raises(InvalidKey):
                call()
        assert list(into.iterdir()) == []

    def test_a_hostile_file_name_is_refused(self, store: ArtifactStore, tmp_path: Path) -> None:
        artifact, source = make_source(tmp_path / "source", KEY, {"f": b"data"})
        for name in ("../x", "/x", "a/../../x", ".neuron_store.json", "a//b", "a\\b", "a\nb"):
            bad = attrs.evolve(artifact.files[0], name=name)
            with pytest.raises(InvalidRecord):
                store.publish(attrs.evolve(artifact, files=(bad,)), source)
        assert store.find(KEY) is None

    def test_a_source_may_be_taken_over(self, store: ArtifactStore, tmp_path: Path) -> None:
        artifact, source = make_source(tmp_path / "source", KEY, SMALL)
        assert store.publish(artifact, source, consume=True) is Publication.CREATED
        assert store.verify(KEY).has_digests

    def test_the_probe_finds_the_tier_fit_and_leaves_nothing(self, store: ArtifactStore) -> None:
        report = store.probe()
        assert report.refused is None, report
        assert report.latency is not None
        assert list(store.keys()) == []

    def test_a_tier_may_be_used_again_after_close(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        store.publish(*make_source(tmp_path / "source", KEY, SMALL))
        store.close()
        assert store.find(KEY) is not None

    # -- several clients ------------------------------------------------------------------------

    def test_another_clients_write_and_delete_are_seen_at_once(
        self, factory: Callable[[], ArtifactStore], store: ArtifactStore, tmp_path: Path
    ) -> None:
        """Pitfalls 21 and 39: no listing cache, no remembered miss."""
        with factory() as other:
            assert other.find(KEY) is None
            assert list(other.keys()) == []
            store.publish(*make_source(tmp_path / "source", KEY, SMALL))
            assert self._soon(lambda: other.find(KEY)) is not None
            assert self._soon(lambda: list(other.keys())) == [KEY]
            other.delete(KEY)
            assert self._soon(lambda: store.find(KEY) is None)

    @pytest.mark.parametrize("same", [False, True], ids=["different bytes", "same bytes"])
    def test_of_racing_publishers_exactly_one_creates(
        self, factory: Callable[[], ArtifactStore], tmp_path: Path, same: bool
    ) -> None:
        keys = [f"{n:032x}" for n in range(self.rounds)]
        races = race_publishers(
            factory, keys=keys, writers=self.writers, same=same, method=self.method
        )
        others = {"PRESENT"} if same else {"CONFLICT"}
        with factory() as store:
            assert self._soon(lambda: sorted(store.keys()) == keys)
            for number, race in enumerate(races):
                assert len(race.winners) == 1, race
                assert set(race.answers) <= {"CREATED"} | others, race
                into = tmp_path / f"{same}-{number}"
                into.mkdir()
                store.fetch(race.key, into)
                expected = racer_bytes(number, race.winners[0], same=same)
                assert (into / "graph.bin").read_bytes() == expected

    def test_a_reader_sees_a_whole_artifact_or_none(
        self, factory: Callable[[], ArtifactStore], tmp_path: Path
    ) -> None:
        artifact, source = make_source(
            tmp_path / "source", KEY, {f"part{n}": os.urandom(20_000) for n in range(4)}
        )
        expected = _tree(source)
        stop, seen = threading.Event(), itertools.count()
        wrong: list[str] = []

        def read() -> None:
            with factory() as store:
                for number in itertools.count():
                    if stop.is_set():
                        return
                    into = tmp_path / f"read{threading.get_ident()}-{number}"
                    into.mkdir()
                    verdict = _read_once(store, into, expected)
                    if verdict == "whole":
                        next(seen)
                    elif verdict != "none":
                        wrong.append(verdict)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            with factory() as store:
                for _ in range(max(10, self.rounds // 4)):
                    assert store.publish(artifact, source) is Publication.CREATED
                    assert store.delete(KEY) is True
                store.publish(artifact, source)
                deadline = time.monotonic() + 60
                while next(seen) < 1 and time.monotonic() < deadline:
                    time.sleep(0.01)
        finally:
            stop.set()
            for reader in readers:
                reader.join(60)
        assert wrong == []

    def test_threads_may_share_a_store(self, store: ArtifactStore, tmp_path: Path) -> None:
        answers: list[object] = []

        def work(number: int) -> None:
            key = f"{number:032x}"
            try:
                store.publish(*make_source(tmp_path / key, key, SMALL))
                answers.append(store.verify(key).key)
            except Exception as error:  # noqa: BLE001  (told below)
                answers.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(map(str, answers)) == [f"{n:032x}" for n in range(8)]

    def test_a_store_that_was_used_works_in_a_forked_child(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """Pitfall 22."""
        store.publish(*make_source(tmp_path / "a", KEY, SMALL))
        other = "f" * 32
        artifact, source = make_source(tmp_path / "b", other, SMALL)

        def child() -> None:
            assert store.verify(KEY).key == KEY
            assert store.publish(artifact, source) is Publication.CREATED
            assert store.find(other) is not None

        ended = run_killed_at(child, number=0, method="fork")
        assert ended.error is None
        if self.killable:
            assert self._soon(lambda: store.find(other)) is not None
        assert store.find(KEY) is not None

    def test_killed_at_any_step_a_publish_leaves_nothing_torn_and_nothing_in_the_way(
        self, factory: Callable[[], ArtifactStore], tmp_path: Path
    ) -> None:
        if not self.killable:
            pytest.skip("the tier's content dies with its process")
        steps = []
        for number in itertools.count(1):
            key = f"{number:032x}"
            artifact, source = make_source(tmp_path / key, key, SMALL)

            ended = run_killed_at(functools.partial(_publish, factory, artifact, source), number)
            assert ended.error is None, ended
            with factory() as store:
                found = store.find(key)
                if found is None:
                    assert key not in list(store.keys())
                    assert store.publish(artifact, source) is Publication.CREATED
                else:
                    assert store.publish(artifact, source) is Publication.PRESENT
                assert store.verify(key).size == artifact.size
            if ended.step is None:
                break
            steps.append(ended.step)
        assert len(steps) >= 3, f"the publish has too few steps to tell: {steps}"

    def test_killed_at_any_step_a_delete_leaves_the_whole_artifact_or_none(
        self, factory: Callable[[], ArtifactStore], tmp_path: Path
    ) -> None:
        if not self.killable:
            pytest.skip("the tier's content dies with its process")
        artifact, source = make_source(tmp_path / "source", KEY, SMALL)
        for number in itertools.count(1):
            with factory() as store:
                store.publish(artifact, source)

            def delete() -> None:
                with factory() as store:
                    store.delete(KEY)

            ended = run_killed_at(delete, number)
            assert ended.error is None, ended
            with factory() as store:
                if store.find(KEY) is not None:
                    assert store.verify(KEY).size == artifact.size
                    assert store.delete(KEY) is True
                assert store.find(KEY) is None
                assert store.publish(artifact, source) is Publication.CREATED
                assert store.delete(KEY) is True
            if ended.step is None:
                break

    def _soon(self, look: Callable[[], object]) -> object:
        """What `look` says, waiting for something true as long as the tier may need."""
        deadline = time.monotonic() + self.patience
        while not (answer := look()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return answer


def _read_once(store: ArtifactStore, into: Path, expected: dict[str, bytes]) -> str:
    try:
        store.fetch(KEY, into)
    except ArtifactNotFound:
        return "none"
    except Exception as error:  # noqa: BLE001  (whatever it is, it is not what was promised)
        return repr(error)
    return "whole" if _tree(into) == expected else f"torn: {sorted(_tree(into))}"


def _publish(factory: Callable[[], ArtifactStore], artifact: Artifact, source: Path) -> None:
    with factory() as store:
        store.publish(artifact, source)


def _tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }

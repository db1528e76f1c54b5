"""What is particular to the rename tiers: strangers' entries, repair, hostile content, kills."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest

from neuron_store import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ConfigError,
    Publication,
    TieredStore,
    TierError,
)
from neuron_store.artifact import RECORD_NAME, Artifact, dump_record
from neuron_store.errors import InvalidRecord, LockTimeout
from neuron_store.neuron_layout import list_files
from neuron_store.registry import open_tier
from neuron_store.testing import make_source
from neuron_store_backends import _aside
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import write_entry

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32


@pytest.fixture
def posix(tmp_path):
    return PosixStore(tmp_path / "tier")


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source", KEY, {"graph.bin": b"payload" * 99, "notes": b"n"})


def stack_entry(root: Path, key: str = KEY, **facts) -> Path:
    entry = root / key
    entry.mkdir(parents=True)
    write_entry(entry, key, **facts)
    return entry


def _note(pid: int, host: str | None = None) -> bytes:
    text = f"pid: {pid}\nprocess_name: elsewhere\ncmdline: []\ntimestamp: 1.0\n"
    return (text + (f"host: {host}\n" if host else "")).encode()


def quarantined(store) -> list[str]:
    place = store.root / ".quarantine"
    return sorted(p.name for p in place.iterdir()) if place.exists() else []


class TestEntriesOfTheNeuronStack:
    """Directories without a record of ours."""

    def test_a_complete_one_is_found_fetched_and_promoted_like_ours(self, posix, tmp_path):
        stack_entry(posix.root)
        found = posix.find(KEY)
        assert found.executable == f"graph_{KEY}.neff"
        assert list(posix.keys()) == [KEY]
        into = tmp_path / "into"
        into.mkdir()
        fetched = posix.fetch(KEY, into)
        assert fetched.has_digests
        shared = PosixStore(tmp_path / "shared")
        assert shared.publish(found, posix.path_of(KEY)) is Publication.CREATED
        assert shared.publish(found, posix.path_of(KEY)) is Publication.PRESENT
        assert shared.verify(KEY).has_digests

    def test_debug_files_rank_directories_and_access_marks_are_left_behind(self, posix):
        entry = stack_entry(posix.root)
        (entry / ".cache_accessed").write_text("1")
        (entry / "fxgraph.txt").write_text("graph()")
        for rank in ("dev0_7.rank3", "rank0"):
            (entry / rank).mkdir()
            (entry / rank / "graph.hlo").write_bytes(b"x")
        assert sorted(f.name for f in posix.find(KEY).files) == [
            ".artifact_metadata_v0.json",
            ".compilation_complete",
            "graph.hlo",
            f"graph_{KEY}.neff",
        ]

    @pytest.mark.parametrize(
        "missing",
        ["graph.hlo", f"graph_{KEY}.neff", ".artifact_metadata_v0.json", ".compilation_complete"],
    )
    def test_one_of_the_four_files_missing_makes_it_incomplete(self, posix, missing):
        (stack_entry(posix.root) / missing).unlink()
        assert posix.find(KEY) is None
        assert list(posix.keys()) == []

    def test_an_executable_of_another_size_than_the_mark_says_makes_it_incomplete(self, posix):
        """Pitfall 5: the stack itself looks at existence only."""
        entry = stack_entry(posix.root)
        (entry / f"graph_{KEY}.neff").write_bytes(b"N")
        assert posix.find(KEY) is None

    def test_metadata_of_another_key_fails_the_full_check(self, posix):
        entry = stack_entry(posix.root)
        (entry / ".artifact_metadata_v0.json").write_text(json.dumps({"cache_key": OTHER}))
        with pytest.raises(ArtifactCorrupt, match="Cache key mismatch"):
            posix.verify(KEY)

    def test_an_executable_that_is_no_neff_fails_the_full_check(self, posix):
        """A byte of executable whose size the completion mark confirms."""
        entry = stack_entry(posix.root)
        (entry / f"graph_{KEY}.neff").write_bytes(b"N")
        (entry / ".compilation_complete").write_text("completed:1.0\nneff_size:1\n")
        with pytest.raises(ArtifactCorrupt, match="not a NEFF"):
            posix.verify(KEY)

    @pytest.mark.parametrize("tier", [PosixStore, LocalStore])
    def test_one_that_fails_the_full_check_alone_is_replaced_by_the_next_publish(
        self, tier, tmp_path, source
    ):
        """Pitfalls 5 and 6: its four files are there and have the right sizes."""
        store = tier(tmp_path / "tier")
        entry = stack_entry(store.root)
        (entry / ".artifact_metadata_v0.json").write_text(json.dumps({"cache_key": OTHER}))
        artifact, directory = source
        assert store.find(KEY) is not None
        assert store.publish(artifact, directory) is Publication.REPAIRED
        assert store.verify(KEY).file("graph.bin") is not None

    def test_a_marked_entry_that_is_not_whole_is_damaged_and_says_why(self, posix):
        entry = stack_entry(posix.root)
        (entry / f"graph_{KEY}.neff").write_bytes(b"N")
        assert list(posix.damaged()) == [KEY]
        with pytest.raises(ArtifactCorrupt, match="has 1 bytes"):
            posix.verify(KEY)
        (entry / f"graph_{KEY}.neff").unlink()
        (entry / f"graph_{KEY}.neff").symlink_to("/etc/passwd")
        with pytest.raises(ArtifactCorrupt, match="link"):
            posix.verify(KEY)

    def test_strangers_beside_the_entries_are_not_listed(self, posix):
        stack_entry(posix.root)
        for name in ("nki", f"{KEY}.tmp.123", f"{KEY}.trash.9", ".abc.compilation_metadata.lock"):
            (posix.root / name).mkdir()
        (posix.root / OTHER).write_text("a file under a key's name")
        shutil.copytree(posix.root / KEY, posix.root / f"{KEY}.farm.77")
        assert list(posix.keys()) == [KEY]
        assert posix.find(OTHER) is None

    def test_ours_has_all_that_the_stack_looks_for(self, posix, tmp_path):
        made = stack_entry(tmp_path / "made")
        artifact = Artifact(KEY, tuple(list_files(made, KEY)), executable=f"graph_{KEY}.neff")
        posix.publish(artifact, made)
        ours = posix.root / KEY
        assert (ours / "graph.hlo").is_file()
        assert (ours / f"graph_{KEY}.neff").is_file()
        assert list(ours.glob(".artifact_metadata_v*.json"))
        size = (ours / f"graph_{KEY}.neff").stat().st_size
        assert f"neff_size:{size}" in (ours / ".compilation_complete").read_text()


class TestRepair:
    def test_an_incomplete_entry_is_repaired_and_kept_aside(self, posix, source):
        """Pitfalls 6 and 34: it used to block promotion for ever."""
        stack_entry(posix.root, mark=False)
        assert posix.publish(*source) is Publication.REPAIRED
        assert posix.verify(KEY).size == source[0].size
        assert len(quarantined(posix)) == 1

    def test_an_empty_directory_is_repaired(self, posix, source):
        (posix.root / KEY).mkdir(parents=True)
        assert posix.publish(*source) is Publication.REPAIRED

    def test_a_file_under_the_keys_name_is_moved_aside(self, posix, source):
        posix.root.mkdir()
        (posix.root / KEY).write_text("in the way")
        assert posix.publish(*source) is Publication.REPAIRED
        assert len(quarantined(posix)) == 1

    def test_a_link_under_the_keys_name_is_neither_followed_nor_kept(self, posix, source, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        PosixStore(elsewhere).publish(*source)
        posix.root.mkdir()
        (posix.root / KEY).symlink_to(elsewhere / KEY)
        assert posix.find(KEY) is None
        assert posix.publish(*source) is Publication.REPAIRED
        assert not (posix.root / KEY).is_symlink()
        assert PosixStore(elsewhere).verify(KEY)

    def test_a_short_file_is_damage_and_the_next_publish_repairs_it(self, posix, source):
        """Pitfall 5."""
        posix.publish(*source)
        (posix.root / KEY / "graph.bin").write_bytes(b"short")
        with pytest.raises(ArtifactCorrupt, match=r"graph\.bin has 5 bytes"):
            posix.find(KEY)
        assert list(posix.keys()) == []
        assert posix.publish(*source) is Publication.REPAIRED

    def test_a_flipped_bit_is_found_by_fetch_and_the_entry_taken_out(self, posix, source, tmp_path):
        posix.publish(*source)
        path = posix.root / KEY / "graph.bin"
        data = bytearray(path.read_bytes())
        data[100] ^= 4
        path.write_bytes(data)
        into = tmp_path / "into"
        into.mkdir()
        with pytest.raises(ArtifactCorrupt, match="sha256"):
            posix.fetch(KEY, into)
        assert posix.find(KEY) is None
        assert len(quarantined(posix)) == 1
        assert posix.publish(*source) is Publication.CREATED

    def test_the_claim_of_a_repairer_that_died_is_taken_over(self, posix, source, monkeypatch):
        monkeypatch.setattr(_aside, "CLAIM_SECONDS", 0.2)
        entry = stack_entry(posix.root, mark=False)
        (entry / ".neuron_store.claim").write_bytes(b"somebody who died")
        assert posix.publish(*source) is Publication.REPAIRED

    @pytest.mark.parametrize("round_", range(25))
    def test_of_racing_repairers_nobody_takes_a_good_artifact_away(self, posix, tmp_path, round_):
        """Pitfall 32: and nobody who succeeded is told otherwise."""
        stack_entry(posix.root, mark=False)
        artifacts = [make_source(tmp_path / f"s{n}", KEY, {"f": bytes([n])}) for n in range(6)]
        answers: dict[int, object] = {}
        start = threading.Barrier(6)

        def publish(number):
            start.wait()
            try:
                answers[number] = PosixStore(posix.root).publish(*artifacts[number])
            except Exception as error:
                answers[number] = error

        threads = [threading.Thread(target=publish, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        won = [n for n, a in answers.items() if a in {Publication.REPAIRED, Publication.CREATED}]
        assert len(won) == 1, answers
        assert {a for n, a in answers.items() if n not in won} == {Publication.CONFLICT}, answers
        with posix.open_file(KEY, "f") as stream:
            assert stream.read() == bytes(won)


class TestHostileContent:
    """A shared tier is not trusted."""

    def plant(self, store, change) -> Path:
        entry = store.root / KEY
        entry.mkdir(parents=True)
        (entry / "f").write_bytes(b"data")
        record = json.loads(dump_record(Artifact(KEY, ())))
        record["files"] = [{"name": "f", "size": 4, "sha256": None}]
        change(record)
        (entry / RECORD_NAME).write_text(json.dumps(record))
        return entry

    @pytest.mark.parametrize(
        "name",
        ["../x", "/etc/passwd", "a/../../x", "..", ".", "", "a\\b", "a\0b", ".neuron_store.json"],
    )
    def test_an_unsafe_name_in_a_record_is_refused_before_a_path_is_built(
        self, posix, tmp_path, name
    ):
        self.plant(posix, lambda r: r["files"].append({"name": name, "size": 4, "sha256": None}))
        into = tmp_path / "deep" / "into"
        into.mkdir(parents=True)
        with pytest.raises(ArtifactCorrupt, match=r"unsafe file name|not a file name"):
            posix.fetch(KEY, into)
        assert [p.name for p in tmp_path.rglob("*") if "tier" not in p.parts] == ["deep", "into"]

    @pytest.mark.parametrize(
        "change",
        [
            lambda r: r.update(neuron_store_record=0),
            lambda r: r.update(neuron_store_record=True),
            lambda r: r.update(key=OTHER),
            lambda r: r.update(key=3),
            lambda r: r.update(files=[]),
            lambda r: r.update(files="f"),
            lambda r: r["files"][0].update(size=-1),
            lambda r: r["files"][0].update(size=4.0),
            lambda r: r["files"][0].update(sha256="abc"),
            lambda r: r["files"].append(r["files"][0]),
            lambda r: r["files"].append({"name": "f/g", "size": 0, "sha256": None}),
            lambda r: r.update(components=[]),
            lambda r: r.update(host={"a": 1}),
            lambda r: r.update(executable="absent"),
            lambda r: r.update(created="yesterday"),
            lambda r: r.update(write_id="x"),
            lambda r: r.pop("write_id"),
        ],
    )
    def test_a_record_that_breaks_a_rule_is_damage(self, posix, source, change):
        self.plant(posix, change)
        with pytest.raises(ArtifactCorrupt):
            posix.find(KEY)
        assert posix.publish(*source) is Publication.REPAIRED

    @pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"\xff", b"{}", b"[" * 100_000])
    def test_truncated_or_foreign_json_is_damage(self, posix, data):
        entry = self.plant(posix, lambda _r: None)
        (entry / RECORD_NAME).write_bytes(data)
        with pytest.raises(ArtifactCorrupt):
            posix.find(KEY)

    @pytest.mark.parametrize("what", ["link", "fifo", "directory", "device"])
    def test_links_and_devices_in_place_of_files_are_refused(self, posix, tmp_path, what):
        entry = self.plant(posix, lambda _r: None)
        (entry / "f").unlink()
        secret = tmp_path / "secret"
        secret.write_bytes(b"data")
        if what == "link":
            (entry / "f").symlink_to(secret)
        elif what == "fifo":
            os.mkfifo(entry / "f")
        elif what == "directory":
            (entry / "f").mkdir()
        else:
            try:
                os.mknod(entry / "f", 0o600 | 0o020000, os.makedev(1, 5))
            except PermissionError:
                pytest.skip("making a device needs root")
        with pytest.raises(ArtifactCorrupt):
            posix.find(KEY)
        into = tmp_path / "into"
        into.mkdir()
        with pytest.raises(ArtifactCorrupt):
            posix.fetch(KEY, into)
        with pytest.raises((ArtifactCorrupt, ArtifactNotFound)):
            posix.open_file(KEY, "f")
        assert secret.read_bytes() == b"data"

    def test_a_linked_folder_inside_an_artifact_is_not_followed(self, posix, tmp_path):
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "g").write_bytes(b"data")
        entry = self.plant(
            posix, lambda r: r["files"].append({"name": "d/g", "size": 4, "sha256": None})
        )
        (entry / "d").symlink_to(tmp_path / "outside")
        with pytest.raises(ArtifactCorrupt):
            posix.find(KEY)

    @pytest.mark.parametrize("what", ["link", "fifo"])
    def test_a_link_or_pipe_in_place_of_the_record_is_refused(self, posix, tmp_path, what):
        entry = self.plant(posix, lambda _r: None)
        record = entry / RECORD_NAME
        if what == "link":
            record.rename(tmp_path / "record")
            record.symlink_to(tmp_path / "record")
        else:
            record.unlink()
            os.mkfifo(record)
        with pytest.raises(ArtifactCorrupt):
            posix.find(KEY)


class TestTrouble:
    def test_a_read_only_tier_is_left_as_it_is_by_a_fetch_that_finds_damage(self, tmp_path, source):
        PosixStore(tmp_path / "tier").publish(*source)
        (tmp_path / "tier" / KEY / "graph.bin").write_bytes(b"short")
        store = open_tier(f"posix://{tmp_path}/tier?read_only=1")
        into = tmp_path / "into"
        into.mkdir()
        with pytest.raises(ArtifactCorrupt):
            store.fetch(KEY, into)
        assert not (tmp_path / "tier" / ".quarantine").exists()

    def test_a_record_of_a_newer_release_is_no_damage(self, posix, source, tmp_path):
        posix.publish(*source)
        record = posix.root / KEY / RECORD_NAME
        newer = {**json.loads(record.read_text()), "neuron_store_record": 3}
        record.write_text(json.dumps(newer))
        into = tmp_path / "into"
        into.mkdir()
        for call in (
            lambda: posix.find(KEY),
            lambda: posix.fetch(KEY, into),
            lambda: posix.publish(*source),
        ):
            with pytest.raises(TierError, match="upgrade"):
                call()
        assert json.loads(record.read_text()) == newer

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_on_this_side_is_not_blamed_on_the_tier(
        self, posix, source, tmp_path, monkeypatch, code
    ):
        posix.publish(*source)

        def full(*_arguments, **_keywords):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("neuron_store_backends.renaming.copy_stream", full)
        store = TieredStore([LocalStore(tmp_path / "local"), posix])
        with pytest.raises(TierError) as caught:
            store.get(KEY)
        assert str(tmp_path / "local") in str(caught.value)
        assert store.counters()[posix.name].errors == 0

    def test_a_root_that_cannot_be_written_is_named_with_a_remedy(self, tmp_path, source):
        (tmp_path / "file").write_text("")
        with pytest.raises(TierError, match="not a directory") as caught:
            PosixStore(tmp_path / "file" / "tier").publish(*source)
        assert isinstance(caught.value.__cause__, OSError)
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == errno.ENOTDIR

    @pytest.mark.parametrize("what", ["file", "below a file", "link to itself"])
    def test_a_root_that_is_no_directory_is_an_error_and_not_a_miss(self, tmp_path, what):
        """Pitfall 24."""
        root = tmp_path / "root"
        if what == "link to itself":
            root.symlink_to(root)
        else:
            root.write_text("")
            root = root / "below" if what == "below a file" else root
        for store in (PosixStore(root), LocalStore(root)):
            with pytest.raises(TierError, match="root"):
                store.find(KEY)
            with pytest.raises(TierError, match="root"):
                list(store.keys())

    def test_a_relative_root_is_refused(self):
        with pytest.raises(ConfigError, match="absolute"):
            PosixStore("relative/path")

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
    def test_no_permission_is_an_error_and_not_a_miss(self, tmp_path, source):
        """Pitfall 24."""
        root = tmp_path / "tier"
        PosixStore(root).publish(*source)
        root.chmod(0o700)
        for parent in [tmp_path, *tmp_path.parents]:
            if str(parent).startswith("/tmp/"):
                parent.chmod(0o755)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            try:
                PosixStore(root).find(KEY)
            except TierError as error:
                os._exit(0 if "right to read" in str(error) else 3)
            except BaseException:
                os._exit(2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_a_full_disk_leaves_nothing_and_gives_the_source_back(self, tmp_path):
        """Pitfall 31, on a real file system of 1 MiB."""
        mount = tmp_path / "small"
        mount.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("mounting a tmpfs needs root")
        try:
            store = LocalStore(mount / "root")
            artifact, source = make_source(tmp_path / "s", KEY, {"f": os.urandom(3 << 20)})
            with pytest.raises(TierError, match="disk is full"):
                store.publish(artifact, source)
            assert list((mount / "root" / ".staging").iterdir()) == []
            assert store.find(KEY) is None
            assert (source / "f").stat().st_size == 3 << 20
            small = make_source(tmp_path / "t", KEY, {"f": b"small"})
            assert store.publish(*small) is Publication.CREATED
        finally:
            subprocess.run(["umount", str(mount)], check=True)

    def test_a_source_that_was_taken_over_comes_back_when_the_publish_fails(
        self, tmp_path, source, monkeypatch
    ):
        store = LocalStore(tmp_path / "tier")
        artifact, place = source

        def rename(*_arguments):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr("neuron_store_backends._staging.Staging.rename", rename)
        with pytest.raises(TierError):
            store.publish(artifact, place, consume=True)
        assert sorted(p.name for p in place.iterdir()) == ["graph.bin", "notes"]

    def test_a_rename_that_worked_but_reports_an_error_is_recognised(
        self, posix, source, monkeypatch
    ):
        """Pitfall 17, as NFS does on a retransmission."""
        real = os.rename

        def rename(old, new, **kwargs):
            real(old, new, **kwargs)
            if str(new).endswith(KEY):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", old)

        monkeypatch.setattr("neuron_store_backends._staging.os.rename", rename)
        assert posix.publish(*source) is Publication.CREATED

    @pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY])
    def test_passing_trouble_at_the_rename_is_tried_again(self, posix, source, monkeypatch, code):
        """Pitfall 30."""
        real, calls = os.rename, []

        def rename(old, new, **kwargs):
            calls.append(new)
            if len(calls) < 3:
                raise OSError(code, os.strerror(code))
            real(old, new, **kwargs)

        monkeypatch.setattr("neuron_store_backends._staging.os.rename", rename)
        assert posix.publish(*source) is Publication.CREATED
        calls.clear()
        monkeypatch.setattr(
            "neuron_store_backends._staging.os.rename",
            lambda *_a, **_k: (_ for _ in ()).throw(OSError(code, os.strerror(code))),
        )
        with pytest.raises(TierError):
            posix.publish(attrs.evolve(source[0], key=OTHER), source[1])
        assert posix.find(OTHER) is None

    def test_staging_on_another_file_system_is_copied_into_the_root(self, tmp_path):
        """Pitfall 44."""
        shm = Path("/dev/shm")
        if shm.stat().st_dev == tmp_path.stat().st_dev or not os.access(shm, os.W_OK):
            pytest.skip("there is no second file system here")
        store = LocalStore(tmp_path / "tier")
        place = shm / f"neuron_store-test-{os.getpid()}"
        try:
            made = make_source(place, KEY, {"f": b"data"})
            assert store.publish(*made, consume=True) is Publication.CREATED
        finally:
            shutil.rmtree(place, ignore_errors=True)
        assert store.verify(KEY)


class TestLocks:
    def test_a_publish_waits_for_a_compile_in_place(self, tmp_path, source):
        """The Neuron stack fills `<root>/<key>/` while it holds the lock."""
        store = LocalStore(tmp_path / "tier")
        (store.root / KEY).mkdir(parents=True)
        lock = store.lock(KEY, 5)
        held, done, answers = threading.Event(), threading.Event(), []

        def stack():
            with lock:
                held.set()
                write_entry(store.root / KEY, KEY)
                done.wait(10)

        thread = threading.Thread(target=stack)
        thread.start()
        held.wait(10)
        publisher = threading.Thread(target=lambda: answers.append(store.publish(*source)))
        publisher.start()
        publisher.join(5)
        done.set()
        thread.join(10)
        publisher.join(10)
        assert answers == [Publication.CONFLICT]
        assert quarantined(store) == []

    def test_the_lock_file_is_never_unlinked_and_the_note_is_gone_after_release(self, tmp_path):
        """Pitfall 7."""
        store = LocalStore(tmp_path / "tier")
        lock = store.lock(KEY, 5)
        note = store.root / f".{KEY}.compilation_metadata"
        with lock:
            inode = os.stat(f"{note}.lock").st_ino
            text = note.read_text()
            assert f"pid: {os.getpid()}\n" in text
            assert "process_name: " in text
            assert "cmdline: [" in text
            assert "timestamp: " in text
            assert note.stat().st_mode & 0o777 == 0o600
            assert lock.holder().pid == os.getpid()
        assert not note.exists()
        assert os.stat(f"{note}.lock").st_ino == inode

    def test_a_note_of_another_host_or_a_dead_pid_breaks_no_lock(self, tmp_path):
        """Pitfall 8: a live holder keeps its lock whatever pid the note says, and no other has it.

        The pids are those that another host's, another boot's or another container's note would
        show here: dead, somebody else's, out of range, our own.
        """
        gone = subprocess.Popen(["true"])
        gone.wait()
        notes = {
            "a dead pid": _note(gone.pid),
            "a dead pid of another host": _note(gone.pid, "node-b"),
            "another user's process": _note(1),
            "another container's first process": _note(1, "pod-7"),
            "a pid that was taken again after a boot": _note(os.getpid()),
            "a pid that this kernel never gives": _note(2**31 - 1),
            "garbage": b"\xff\0garbage",
            "nothing": b"",
        }
        store = LocalStore(tmp_path / "tier")
        note = store.root / f".{KEY}.compilation_metadata"
        context = multiprocessing.get_context("fork")
        held = context.Event()

        def hold():
            store.lock(KEY, 5).acquire()
            held.set()
            time.sleep(600)

        child = context.Process(target=hold)
        child.start()
        try:
            assert held.wait(20)
            assert store.lock(KEY, 1).holder().pid == child.pid
            for what, text in notes.items():
                note.write_bytes(text)
                assert not store.lock(KEY, 1).try_acquire(), f"{what} freed a lock that is held"
                with pytest.raises(LockTimeout):
                    store.lock(KEY, 0.05).acquire()
                assert note.read_bytes() == text, f"{what} was taken away"
            note.write_bytes(notes["a dead pid of another host"])
            with pytest.raises(LockTimeout, match=f"pid {gone.pid}"):
                store.lock(KEY, 0.05).acquire()
        finally:
            child.kill()
            child.join(20)
        # Now nobody holds it: no note keeps anybody out, not even that of a process that lives.
        for what, text in notes.items():
            note.write_bytes(text)
            lock = store.lock(KEY, 1)
            assert lock.try_acquire(), f"{what} kept a lock that is free"
            lock.release()

    def test_the_lock_of_a_killed_process_is_free_at_once(self, tmp_path):
        store = LocalStore(tmp_path / "tier")
        context = multiprocessing.get_context("fork")
        ready = context.Event()

        def hold():
            store.lock(KEY, 5).acquire()
            ready.set()
            time.sleep(60)

        child = context.Process(target=hold)
        child.start()
        assert ready.wait(20)
        assert not store.lock(KEY, 1).try_acquire()
        os.kill(child.pid, signal.SIGKILL)
        child.join(20)
        assert store.lock(KEY, 1).try_acquire()

    def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(self, tmp_path):
        store = LocalStore(tmp_path / "tier")
        lock = store.lock(KEY, 5)
        lock.acquire()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            lock.release()
            assert store.lock(KEY, 1).try_acquire()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


PUBLISH = """
import sys
from pathlib import Path
from neuron_store.artifact import Artifact
from neuron_store.neuron_layout import list_files
from neuron_store_backends.posix import PosixStore
root, source, key = sys.argv[1:]
files = tuple(list_files(Path(source), key))
print(PosixStore(root).publish(Artifact(key, files), Path(source)).name)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("call", ["mkdir", "write", "fsync", "rename"])
def test_killed_at_each_system_call_a_publish_leaves_nothing_in_the_way(tmp_path, call, source):
    """The kernel kills the process at the n-th call that names the tier, for each n."""
    script = tmp_path / "publish.py"
    script.write_text(PUBLISH)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    killed = 0
    names = {"mkdir": "mkdir,mkdirat", "rename": "rename,renameat,renameat2"}.get(call, call)
    for number in range(1, 40):
        root = tmp_path / f"tier{number}"
        command = [
            "strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={names}",
            "-e", f"inject={names}:signal=KILL:when={number}",
            sys.executable, str(script), str(root), str(source[1]), KEY,
        ]  # fmt: skip
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        store = PosixStore(root)
        found = store.find(KEY)
        expected = {Publication.CREATED} if found is None else {Publication.PRESENT}
        assert store.publish(*source) in expected
        assert store.verify(KEY)
        if ended.returncode == 0:
            break
        killed += 1
    assert killed >= 1
    print(f"{call}: killed at {killed} points")


def test_a_publisher_that_lost_the_race_uses_what_it_can_see(posix, source, monkeypatch):
    """Pitfall 28: NFS hides the winner from the loser for a while."""
    other = make_source(posix.root.parent / "other", KEY, {"f": b"winner"})
    PosixStore(posix.root).publish(*other)
    real, looks = PosixStore.find, []

    def find(self, key):
        looks.append(key)
        return None if len(looks) < 4 else real(self, key)

    monkeypatch.setattr(PosixStore, "find", find)
    monkeypatch.setattr(os.path, "lexists", functools.partial(hidden, os.path.lexists, looks))
    assert posix.publish(*source) is Publication.CONFLICT


def hidden(real, looks, path):
    return False if len(looks) < 4 and str(path).endswith(KEY) else real(path)


def test_an_artifact_of_too_many_files_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("neuron_store.artifact.MAX_FILES", 3)
    many = make_source(tmp_path / "many", KEY, {f"f{n}": b"x" for n in range(4)})
    for store in (LocalStore(tmp_path / "local"), PosixStore(tmp_path / "posix")):
        with pytest.raises(InvalidRecord, match="has 4 files, and a key may have 3; pack them"):
            store.publish(*many)
        assert store.find(KEY) is None
    assert len(list((tmp_path / "many").iterdir())) == 4


@pytest.mark.parametrize("consume", [True, False])
def test_every_file_is_flushed_before_the_artifact_has_its_name(tmp_path, monkeypatch, consume):
    names = [f"d{number % 3}/f{number}" for number in range(150)]
    artifact, source = make_source(tmp_path / "source", KEY, dict.fromkeys(names, b"data"))
    flushed, at_rename = set(), []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def noting_rename(old, new, **how):
        if os.path.basename(new) == KEY:
            at_rename.append(set(flushed))
        rename(old, new, **how)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    store = PosixStore(tmp_path / "root")
    before = len(os.listdir("/proc/self/fd"))
    assert store.publish(artifact, source, consume=consume) is Publication.CREATED
    assert len(os.listdir("/proc/self/fd")) == before
    place = tmp_path / "root" / KEY
    written = [place, *place.rglob("*")]
    assert len(written) == 1 + 3 + len(names) + 1
    (known,) = at_rename
    assert {path.stat().st_ino for path in written} <= known
    assert (tmp_path / "root").stat().st_ino in flushed


LOCKING = """
import os, sys
from neuron_store_backends.local import LocalStore
lock = LocalStore(sys.argv[1]).lock(sys.argv[2], 1)
lock.acquire()
note = os.path.join(sys.argv[1], f".{sys.argv[2]}.compilation_metadata")
print(os.path.getsize(note), lock.holder().pid == os.getpid())
lock.release()
print(os.path.exists(note))
"""


def test_a_long_command_line_neither_fills_a_holder_note_nor_leaves_it_behind(tmp_path):
    words = ["\x01" * 50_000, "é" * 25_000]
    command = [sys.executable, "-c", LOCKING, str(tmp_path), KEY, *words]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(told[0]) < 48 << 10
    assert told[1:] == ["True", "False"]

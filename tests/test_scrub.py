"""`verify --repair` underneath: what is read, what is put right from where, and going on later."""

from __future__ import annotations

import json
import os
import stat
import time

import pytest

from neuron_store import ArtifactCorrupt, ConfigError, Publication, TieredStore
from neuron_store.artifact import RECORD_NAME
from neuron_store.readonly import ReadOnlyStore
from neuron_store.scrub import Pace, Scrub, by_key
from neuron_store.scrub_progress import ScrubProgress
from neuron_store.signing import Signer, create_key
from neuron_store.testing import make_source
from neuron_store.testing.killing import run_killed_at
from neuron_store.trust import TrustPolicy
from neuron_store_backends.local import LocalStore
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore

KEY = "0123456789abcdef0123456789abcdef"
FILES = {"graph.bin": b"payload" * 5000, "small": b"s"}


@pytest.fixture
def local(tmp_path):
    store = LocalStore(tmp_path / "local")
    store.publish(
        *make_source(tmp_path / "source", KEY, FILES, created="2026-01-01T00:00:00+00:00")
    )
    return store


@pytest.fixture(params=["posix", "memory"])
def shared(request, tmp_path):
    if request.param == "posix":
        return PosixStore(tmp_path / "shared")
    return MemoryStore(f"scrub-{request.node.name}-{os.getpid()}")


def damage(tier, how="rot", key=KEY):
    """Behind the tier's back: other bytes of the same size, fewer, or none."""
    if isinstance(tier, MemoryStore):
        fs, found = tier.objects.handle(), tier.find(key)
        path = next(p.path for p in tier.parcels(found, ()) if p.files[0].name == "graph.bin")
        data = fs.cat_file(path)
        if how == "gone":
            fs.rm_file(path)
        else:
            fs.pipe_file(path, bytes([data[0] ^ 1]) + data[1:] if how == "rot" else data[:-1])
        return
    path = tier.root / key / "graph.bin"
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:] if how == "rot" else data[:-1])


def scrub(store, tiers=None, *, keys=(KEY,), progress=None, repair=True, pace=None):
    work = by_key([(tier, key) for key in keys for tier in tiers or store.tiers])
    progress = progress or ScrubProgress()
    run = Scrub(store, work, progress=progress, repair=repair, pace=pace)
    return {(s.tier, s.key): s for found in run.run(2) for s in found}


def test_what_a_repair_brings_to_the_local_tier_is_no_work_of_this_node(local, tmp_path):
    """Unless the damaged record names the very same bytes: a signing key would vouch for it."""
    shared = PosixStore(tmp_path / "shared")
    store = TieredStore([local, shared])
    store.promote(KEY)
    damage(local)
    assert scrub(store, [local])[local.name, KEY].outcome == "repaired"
    assert local.find(KEY).fetched_from is None
    shared.delete(KEY)
    shared.publish(*make_source(tmp_path / "others", KEY, {"graph.bin": b"others"}))
    damage(local)
    assert scrub(store, [local])[local.name, KEY].outcome == "repaired"
    assert local.find(KEY).fetched_from == shared.location
    damage(shared)
    assert scrub(store, [shared])[shared.name, KEY].outcome == "repaired"
    assert shared.find(KEY).fetched_from is None


@pytest.mark.parametrize("how", ["rot", "short", "gone"])
def test_a_damaged_shared_entry_is_replaced_from_the_local_tier(local, shared, how):
    """Pitfall 27: the index says hit, the payload is gone. Pitfall 34: torn, and never repaired."""
    store = TieredStore([local, shared])
    store.promote(KEY)
    damage(shared, how)
    with pytest.raises(ArtifactCorrupt):
        shared.verify(KEY)
    found = scrub(store)
    assert found[local.name, KEY].outcome == "ok"
    assert found[shared.name, KEY].outcome == "repaired"
    assert local.location in found[shared.name, KEY].detail
    shared.verify(KEY)
    assert scrub(store)[shared.name, KEY].outcome == "ok"


@pytest.mark.parametrize("how", ["rot", "short", "gone"])
def test_the_next_promote_repairs_what_a_fetch_found_damaged(local, shared, how, tmp_path):
    """Pitfall 34; pitfall 27: a miss, and repaired by the next promote."""
    store = TieredStore([local, shared])
    store.promote(KEY)
    damage(shared, how)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(ArtifactCorrupt):
        shared.fetch(KEY, into)
    assert store.promote(KEY)[shared.name] in {Publication.REPAIRED, Publication.CREATED}
    shared.verify(KEY)


def test_a_damaged_local_entry_is_replaced_from_a_shared_tier(local, shared):
    store = TieredStore([local, shared])
    store.promote(KEY)
    damage(local)
    assert scrub(store)[local.name, KEY].outcome == "repaired"
    local.verify(KEY)


def test_the_damaged_one_lies_in_quarantine(local, tmp_path):
    shared = PosixStore(tmp_path / "shared")
    store = TieredStore([local, shared])
    store.promote(KEY)
    damage(shared)
    scrub(store)
    (moved,) = (shared.root / ".quarantine").iterdir()
    assert moved.name.startswith(KEY)


def test_without_repair_nothing_is_changed(local, shared, tmp_path):
    store = TieredStore([local, shared])
    store.promote(KEY)
    damage(shared)
    found = scrub(store, repair=False)
    assert found[shared.name, KEY].outcome == "corrupt"
    assert scrub(store, repair=False)[shared.name, KEY].outcome == "corrupt"
    assert shared.find(KEY) is not None
    assert not (tmp_path / "shared" / ".quarantine").exists()


def test_a_copy_that_is_damaged_itself_is_passed_over(local, tmp_path):
    a, b = PosixStore(tmp_path / "a"), PosixStore(tmp_path / "b")
    store = TieredStore([local, a, b])
    store.promote(KEY)
    damage(local)
    damage(a)
    found = scrub(store)
    assert found[a.name, KEY].outcome == "repaired"
    assert b.location in found[a.name, KEY].detail
    assert found[local.name, KEY].outcome == "repaired"


def test_of_copies_that_differ_the_one_that_was_there_before_is_taken(local, tmp_path):
    a, b, c = (PosixStore(tmp_path / n) for n in "abc")
    other = make_source(tmp_path / "other", KEY, {"graph.bin": b"another compile"})
    a.publish(*other)
    store = TieredStore([local, a, b, c])
    store.promote(KEY, to=[b.name, c.name])
    local.delete(KEY)
    damage(c)
    found = scrub(store, [c])
    assert found[c.name, KEY].outcome == "repaired"
    assert b.location in found[c.name, KEY].detail


def test_what_no_tier_has_whole_is_beyond_repair_and_stays_to_be_told_of_again(local, tmp_path):
    shared = PosixStore(tmp_path / "shared")
    store = TieredStore([local, shared])
    store.promote(KEY)
    damage(local)
    damage(shared)
    for _ in range(2):
        found = scrub(store)
        for tier in (local, shared):
            assert found[tier.name, KEY].outcome == "corrupt"
            assert "beyond repair" in found[tier.name, KEY].detail
            assert "left in place" in found[tier.name, KEY].detail
            assert not (tier.root / ".quarantine").exists()
            assert list(tier.keys()) == [KEY]


def test_a_tier_that_is_not_to_be_repaired_is_only_read(local, tmp_path):
    mine, other = PosixStore(tmp_path / "mine"), PosixStore(tmp_path / "other")
    for each in (mine, other):
        TieredStore([local, each]).promote(KEY)
        damage(each)
    local.delete(KEY)
    found = scrub(TieredStore([local, mine, other]), [mine])
    assert other.location in found[mine.name, KEY].detail
    assert (other.root / KEY / "graph.bin").exists()
    assert not (other.root / ".quarantine").exists()


def test_a_read_only_tier_is_reported_and_left_alone(local, tmp_path):
    shared = PosixStore(tmp_path / "shared")
    TieredStore([local, shared]).promote(KEY)
    damage(shared)
    store = TieredStore([local, ReadOnlyStore(PosixStore(shared.root, read_only=True))])
    found = scrub(store)
    assert "read-only" in found[shared.name, KEY].detail
    assert (shared.root / KEY).is_dir()


def age(directory, seconds=25 * 3600):
    then = time.time() - seconds
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (then, then))


class TestLostRecord:
    @pytest.fixture
    def lost(self, local, tmp_path):
        shared = PosixStore(tmp_path / "shared")
        TieredStore([local, shared]).promote(KEY)
        (shared.root / KEY / RECORD_NAME).unlink()
        return shared

    def test_is_damage_in_a_shared_tier_and_is_repaired(self, local, lost):
        age(lost.root / KEY)
        assert list(lost.damaged()) == [KEY]
        assert list(lost.keys()) == []
        store = TieredStore([local, lost])
        assert "missing" in scrub(store, repair=False)[lost.name, KEY].detail
        assert scrub(store)[lost.name, KEY].outcome == "repaired"
        assert list(lost.keys()) == [KEY]

    def test_is_none_while_somebody_may_be_filling_it(self, local, lost):
        """The Neuron stack, pointed at the share itself; NFS, hiding the record for a while."""
        age(lost.root / KEY)
        os.utime(lost.root / KEY / "graph.bin")
        assert list(lost.damaged()) == []
        assert scrub(TieredStore([local, lost]))[lost.name, KEY].outcome == "missing"
        assert (lost.root / KEY / "graph.bin").exists()

    @pytest.mark.parametrize("what", ["empty", "link", "file"])
    def test_is_none_where_no_payload_is(self, lost, what):
        path = lost.root / KEY
        if what == "empty":
            (path / "graph.bin").unlink()
            (path / "small").unlink()
        else:
            path.rename(lost.root / "elsewhere")
            age(lost.root / "elsewhere")
            path.symlink_to("elsewhere") if what == "link" else path.write_text("x")
        age(path)
        assert list(lost.damaged()) == []

    def test_in_the_local_tier_it_may_be_a_compile_of_the_neuron_stack(self, local, lost):
        (local.root / KEY / RECORD_NAME).unlink()
        age(local.root / KEY)
        assert list(local.damaged()) == []
        assert scrub(TieredStore([local, lost]))[local.name, KEY].outcome == "missing"
        assert (local.root / KEY / "graph.bin").exists()


class TestSignatures:
    @pytest.fixture
    def signer(self, tmp_path):
        create_key(tmp_path / "key")
        return Signer.load(tmp_path / "key", what="--key")

    def test_an_unsigned_entry_is_refused_and_not_quarantined(self, local, shared, signer):
        TieredStore([local, shared]).promote(KEY)
        store = TieredStore([local, shared], trust=TrustPolicy([signer.public], required=True))
        assert scrub(store)[shared.name, KEY].outcome == "refused"
        assert shared.find(KEY) is not None

    def test_a_copy_that_nobody_trusted_signed_repairs_nothing(self, local, tmp_path, signer):
        a, planted = PosixStore(tmp_path / "a"), PosixStore(tmp_path / "planted")
        TieredStore([local, a], signer=signer).promote(KEY)
        planted.publish(*make_source(tmp_path / "evil", KEY, {"graph.bin": b"EVIL"}))
        local.delete(KEY)
        damage(a)
        policy = TrustPolicy([signer.public], required=True)
        found = scrub(TieredStore([local, planted, a], trust=policy), [a])
        assert found[a.name, KEY].outcome == "corrupt"
        assert planted.find(KEY) is not None

    @pytest.mark.parametrize("required", [True, False])
    def test_the_local_copy_takes_over_the_signature_of_the_record_it_fits(
        self, local, shared, signer, required
    ):
        """The local record was never signed; its bytes are the ones that were."""
        TieredStore([local, shared], signer=signer).promote(KEY)
        damage(shared)
        policy = TrustPolicy([signer.public], required=required)
        found = scrub(TieredStore([local, shared], trust=policy))
        assert found[shared.name, KEY].outcome == "repaired"
        assert policy.judge(shared.find(KEY)).outcome == "trusted"
        shared.verify(KEY)

    def test_what_was_signed_is_not_replaced_by_what_is_not(self, local, tmp_path, signer):
        a = PosixStore(tmp_path / "a")
        TieredStore([local, a], signer=signer).promote(KEY)
        local.delete(KEY)
        local.publish(*make_source(tmp_path / "again", KEY, FILES))
        damage(a)
        store = TieredStore([local, a], trust=TrustPolicy([signer.public], required=False))
        assert scrub(store)[a.name, KEY].outcome == "corrupt"


def test_a_kill_at_any_step_of_a_repair_is_made_good_by_the_next_run(local, tmp_path):
    note = str(tmp_path / "note")
    killed = []
    for number in range(1, 60):
        shared = PosixStore(tmp_path / f"shared-{number}")
        store = TieredStore([local, shared])
        store.promote(KEY)
        damage(shared)

        def run(store=store):
            progress = ScrubProgress.resume(note)
            found = scrub(store, progress=progress)
            progress.finish()
            assert found[store.shared[0].name, KEY].outcome == "repaired"

        told = run_killed_at(run, number)
        assert told.error is None
        local.verify(KEY)
        if told.step is None:
            break
        killed.append(told.step)
        progress = ScrubProgress.resume(note)
        keys = {*shared.keys(), *shared.damaged(), *progress.damaged(shared.location)}
        assert keys == {KEY}
        scrub(store, [shared], progress=progress)
        progress.finish()
        shared.verify(KEY)
    assert {
        "scrub.copied",
        "aside.move",
        "scrub.aside",
        "publish.rename",
        "scrub.published",
    } <= set(killed)


class TestProgress:
    def test_what_was_found_whole_is_not_read_again(self, local, shared, tmp_path):
        store = TieredStore([local, shared])
        store.promote(KEY)
        progress = ScrubProgress.resume(str(tmp_path / "note"))
        assert len(scrub(store, progress=progress)) == 2
        progress.close()
        damage(shared)
        again = ScrubProgress.resume(str(tmp_path / "note"))
        work = by_key([(tier, KEY) for tier in store.tiers])
        run = Scrub(store, work, progress=again)
        assert list(run.run(1)) == [[]]
        assert run.resumed == 2
        again.finish()
        assert not (tmp_path / "note").exists()

    def test_a_line_that_was_cut_off_is_read_once_more(self, tmp_path):
        path = tmp_path / "note"
        progress = ScrubProgress.resume(str(path))
        progress.say("/tier", "a", "ok")
        progress.say("/tier", "b", "ok")
        progress.close()
        path.write_bytes(path.read_bytes()[:-5])
        again = ScrubProgress.resume(str(path))
        assert again.is_done("/tier", "a")
        assert not again.is_done("/tier", "b")
        again.say("/tier", "c", "damaged")
        again.close()
        third = ScrubProgress.resume(str(path))
        assert third.damaged("/tier") == ["c"]
        third.close()

    @pytest.mark.parametrize("content", [b"my thesis", b"{}\n", b"\x00" * 50, b'["x"]\n', b""])
    def test_a_file_that_is_something_else_is_left_alone(self, tmp_path, content):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(ConfigError, match="not a progress note"):
            ScrubProgress.resume(str(tmp_path / "f"))
        assert (tmp_path / "f").read_bytes() == content

    @pytest.mark.parametrize("kind", ["fifo", "link", "directory", "socket"])
    def test_what_is_no_regular_file_is_neither_written_nor_removed(self, tmp_path, kind):
        path, note = tmp_path / "it", tmp_path / "note"
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            ScrubProgress.resume(str(note)).close()
            path.symlink_to(note)
        elif kind == "directory":
            path.mkdir()
        else:
            os.mknod(path, 0o600 | stat.S_IFSOCK)
        with pytest.raises(ConfigError, match="not a regular file"):
            ScrubProgress.resume(str(path))
        assert os.path.lexists(path)

    def test_what_took_the_place_of_the_note_is_not_removed(self, tmp_path):
        path = tmp_path / "note"
        progress = ScrubProgress.resume(str(path))
        path.unlink()
        path.write_text("mine")
        progress.finish()
        assert path.read_text() == "mine"

    def test_a_new_note_is_alone_in_its_directory(self, tmp_path):
        ScrubProgress.resume(str(tmp_path / "note")).close()
        assert os.listdir(tmp_path) == ["note"]

    def test_a_note_behind_a_link_in_place_of_stats_is_not_written(self, local, tmp_path):
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "verify.jsonl").write_text("mine")
        (local.root / ".stats").symlink_to(outside)
        assert ScrubProgress.begin(local.root).path is None
        assert (outside / "verify.jsonl").read_text() == "mine"

    def test_two_runs_do_not_share_one(self, tmp_path):
        first = ScrubProgress.resume(str(tmp_path / "note"))
        with pytest.raises(ConfigError, match="another verify"):
            ScrubProgress.resume(str(tmp_path / "note"))
        first.close()
        ScrubProgress.resume(str(tmp_path / "note")).close()

    def test_lines_that_name_no_entry_are_passed_over(self, tmp_path):
        lines = [
            {"neuron_store_verify": 1},
            1,
            None,
            [],
            {"tier": 1},
            {"tier": "/t", "key": "../x"},
        ]
        text = "\n".join(map(json.dumps, lines)) + '\n{"tier": "/t", "key": "k", "outcome": "ok"}\n'
        (tmp_path / "note").write_text(text)
        progress = ScrubProgress.resume(str(tmp_path / "note"))
        assert progress.is_done("/t", "k")
        progress.close()

    def test_a_note_in_the_local_tier_is_no_entry_and_goes_at_the_end(self, local):
        progress = ScrubProgress.begin(local.root)
        assert progress.path == f"{local.root}/.stats/verify.jsonl"
        assert list(local.keys()) == [KEY]
        # A second run at the same time does without.
        assert ScrubProgress.begin(local.root).path is None
        progress.finish()
        assert not os.path.exists(progress.path)


def test_reading_keeps_to_the_rate_over_all_threads(local, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("neuron_store.scrub.time.sleep", slept.append)
    monkeypatch.setattr("neuron_store.scrub.time.monotonic", lambda: 100.0)
    pace = Pace(1000)
    shared = PosixStore(tmp_path / "shared")
    store = TieredStore([local, shared])
    store.promote(KEY)
    scrub(store, pace=pace)
    size = sum(map(len, FILES.values()))
    # The clock stands still, so the last of four waits for all bytes of both tiers.
    assert max(slept) == pytest.approx(2 * size / 1000)
    assert time.monotonic() == 100.0


def test_two_tiers_with_different_bytes_are_both_whole(local, tmp_path):
    shared = PosixStore(tmp_path / "shared")
    shared.publish(*make_source(tmp_path / "other", KEY, {"graph.bin": b"another compile"}))
    found = scrub(TieredStore([local, shared]))
    assert {s.outcome for s in found.values()} == {"ok"}

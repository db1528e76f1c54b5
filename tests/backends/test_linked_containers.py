"""A link in place of a tier's own directory: nothing goes through it, whoever put it there."""

from __future__ import annotations

import errno
import os
import time

import pytest

from neuron_store import ArtifactCorrupt, Publication, TierError
from neuron_store.collecting import collect
from neuron_store.testing import FaultyFiles, FileFault, make_source
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture(params=[LocalStore, PosixStore], ids=["local", "posix"])
def store(request, tmp_path):
    tier = request.param(tmp_path / "tier")
    tier.root.mkdir()
    return tier


@pytest.fixture
def outside(tmp_path):
    """Somebody's files, as old as garbage, and named as a tier would name its own."""
    place = tmp_path / "outside"
    (place / "folder").mkdir(parents=True)
    (place / "uses").mkdir()
    for name in ("thesis", f"{KEY}.json", "folder/x", f"uses/{KEY}", "collecting"):
        (place / name).write_text("mine")
        os.utime(place / name, (time.time() - 200 * 86400,) * 2)
    for folder in (place / "folder", place / "uses", place):
        os.utime(folder, (time.time() - 200 * 86400,) * 2)
    return place


def listing(place):
    return sorted(str(p.relative_to(place)) for p in place.rglob("*"))


def put(store, tmp_path):
    return store.publish(*make_source(tmp_path / "source", KEY, {"f": b"x" * 100}))


@pytest.mark.parametrize(
    "name", [".staging", ".quarantine", ".leases", ".failed", ".stats", ".stats/uses"]
)
def test_gc_removes_nothing_through_it_and_names_it(store, outside, name):
    if name.startswith(".stats") and type(store) is PosixStore:
        pytest.skip("a shared tier keeps no uses")
    before = listing(outside)
    (store.root / name).parent.mkdir(exist_ok=True)
    (store.root / name).symlink_to(outside / "uses" if name.endswith("uses") else outside)
    with pytest.raises(TierError, match="symbolic link") as caught:
        collect(store, older_than=1.0, grace=0.0)
    assert f"{store.root}/{name}" in str(caught.value)
    assert "remove it" in str(caught.value)
    assert listing(outside) == before


def test_publish_and_promote_write_nothing_through_staging(store, outside, tmp_path):
    (store.root / ".staging").symlink_to(outside)
    before = listing(outside)
    with pytest.raises(TierError, match="symbolic link"):
        put(store, tmp_path)
    assert listing(outside) == before
    assert store.find(KEY) is None


def test_a_fetch_that_finds_damage_leaves_it_rather_than_move_it_out(store, outside, tmp_path):
    assert put(store, tmp_path) is Publication.CREATED
    (store.root / KEY / "f").write_bytes(b"y" * 100)
    (store.root / ".quarantine").symlink_to(outside)
    before = listing(outside)
    (tmp_path / "into").mkdir()
    with pytest.raises(ArtifactCorrupt):
        store.fetch(KEY, tmp_path / "into")
    assert (store.root / KEY).is_dir()
    with pytest.raises(TierError, match="symbolic link"):
        store.set_aside(KEY)
    assert listing(outside) == before


def test_delete_hides_nothing_behind_it(store, outside, tmp_path):
    put(store, tmp_path)
    (store.root / ".staging").rmdir()
    (store.root / ".staging").symlink_to(outside)
    with pytest.raises(TierError, match="symbolic link"):
        store.delete(KEY)
    assert store.find(KEY) is not None


def test_the_word_of_a_failed_compile_neither_goes_through_it_nor_is_taken_back(tmp_path, outside):
    local = LocalStore(tmp_path / "tier")
    local.root.mkdir()
    (local.root / ".failed").symlink_to(outside)
    lock = local.lock(KEY, 1.0)
    lock.write_failures(b"{}")
    lock.write_failures(b"")
    assert (outside / f"{KEY}.json").read_text() == "mine"


def test_a_use_is_not_noted_through_it(tmp_path, outside):
    local = LocalStore(tmp_path / "tier")
    put(local, tmp_path)
    (local.root / ".stats").symlink_to(outside)
    before = (outside / "uses" / KEY).stat().st_mtime
    assert local.path_of(KEY) is not None
    local.close()
    assert (outside / "uses" / KEY).stat().st_mtime == before


@pytest.mark.parametrize("name", [".staging", ".quarantine", ".leases", ".failed", ".stats"])
def test_doctor_says_so(store, outside, name):
    (store.root / name).symlink_to(outside)
    report = store.probe()
    failed = [check for check in report.checks if not check.passed and check.required]
    assert [check.name for check in failed] == ["own directories"]
    assert name in failed[0].detail
    assert name in failed[0].remedy


def test_what_cannot_be_read_asks_for_the_right_to_read(store, tmp_path):
    put(store, tmp_path)
    with (
        FaultyFiles(store.root, FileFault(at=1, error=errno.EACCES)),
        pytest.raises(TierError, match="the right to read it"),
    ):
        store.find(KEY)

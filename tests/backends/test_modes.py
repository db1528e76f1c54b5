"""Who may do what in a directory that several users share, tried as those users.

The umask says how open what a process publishes is, as with any file that it writes; the root says
whose group it gets and who may stage beside it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest

from neuron_store import CompileCoordinator, TieredStore
from neuron_store.collecting import collect
from neuron_store.errors import LeaseHeld
from neuron_store.policy import CompilePolicy
from neuron_store.testing import make_source
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile

pytestmark = pytest.mark.skipif(
    os.getuid() != 0, reason="NOT TESTED: needs root to become other users"
)

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
FILES = {"graph.bin": b"payload" * 100, "sub/deep/er": b"x"}
ALICE, BOB, EVE = 60001, 60002, 60003
TEAM = 60100


@pytest.fixture
def place():
    """A directory that every user reaches; pytest's own is root's alone."""
    path = Path(tempfile.mkdtemp(prefix="neuron-modes-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_user(uid, action, *, groups=(), umask=0o022):
    """What `action` returns (text) when that user runs it, or the error's name and message."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(list(groups))
            os.setgid(uid)
            os.setuid(uid)
            os.umask(umask)
            told = str(action())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told


def source(place, uid, key=KEY, files=FILES, name="source"):
    artifact, path = make_source(place / f"{name}-{uid}", key, files)
    for found in [path, *path.rglob("*")]:
        os.chown(found, uid, uid)
    return artifact, path


def publish(root, artifact, path, *, consume=False, kind=PosixStore):
    return lambda: kind(root).publish(artifact, path, consume=consume).name


def modes(root):
    """Relative path to (mode with the set-group-id bit, gid) of all below a directory."""
    return {
        str(p.relative_to(root)): (stat.S_IMODE(p.stat().st_mode), p.stat().st_gid)
        for p in root.rglob("*")
    }


def team_root(place, mode=0o2775):
    root = place / "tier"
    root.mkdir()
    os.chown(root, ALICE, TEAM)
    root.chmod(mode)
    return root


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027, 0o077])
@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("kind", [PosixStore, LocalStore])
def test_files_are_0666_and_directories_0777_less_the_umask(place, umask, consume, kind):
    root = place / "tier"
    root.mkdir()
    root.chmod(0o777)
    artifact, path = source(place, ALICE)
    # As mkdtemp and careful compilers leave them.
    path.chmod(0o700)
    (path / "graph.bin").chmod(0o600)
    (path / "sub").chmod(0o700)
    if consume:
        # Taken over by a rename only within one file system and one owner.
        os.chown(place, ALICE, ALICE)
    told = as_user(ALICE, publish(root, artifact, path, consume=consume, kind=kind), umask=umask)
    assert told == "CREATED"
    found = modes(root / KEY)
    assert found.pop("sub")[0] == 0o777 & ~umask
    assert found.pop("sub/deep")[0] == 0o777 & ~umask
    assert stat.S_IMODE((root / KEY).stat().st_mode) == 0o777 & ~umask
    assert {mode for mode, _ in found.values()} == {0o666 & ~umask}
    assert len(found) == len(FILES) + 1


@pytest.mark.parametrize("consume", [False, True])
def test_a_set_group_id_root_hands_its_group_down(place, consume):
    root = team_root(place)
    os.chown(place, ALICE, ALICE)
    artifact, path = source(place, ALICE)
    told = as_user(
        ALICE, publish(root, artifact, path, consume=consume), groups=[TEAM], umask=0o002
    )
    assert told == "CREATED"
    assert {gid for _, gid in modes(root / KEY).values()} == {TEAM}
    assert (root / KEY).stat().st_gid == TEAM
    for folder in (root / KEY, root / KEY / "sub", root / KEY / "sub" / "deep", root / ".staging"):
        assert folder.stat().st_gid == TEAM
        assert folder.stat().st_mode & stat.S_ISGID


def test_two_of_a_team_publish_fetch_repair_and_delete_side_by_side(place):
    root = team_root(place)
    team = {"groups": [TEAM], "umask": 0o002}
    one, two = source(place, ALICE), source(place, BOB, OTHER)
    assert as_user(ALICE, publish(root, *one), **team) == "CREATED"
    assert as_user(BOB, publish(root, *two), **team) == "CREATED"
    assert as_user(BOB, publish(root, *source(place, BOB, name="same")), **team) == "PRESENT"
    data = (root / KEY / "graph.bin").read_bytes()
    (root / KEY / "graph.bin").write_bytes(data[:-1])
    again = source(place, BOB, name="again")
    assert as_user(BOB, publish(root, *again), **team) == "REPAIRED"
    assert as_user(BOB, lambda: PosixStore(root).delete(KEY), **team) == "True"
    assert as_user(ALICE, lambda: PosixStore(root).delete(OTHER), **team) == "True"


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_the_first_publishers_umask_shuts_nobody_out_of_an_open_root(place, mode):
    root = team_root(place, mode)
    assert as_user(ALICE, publish(root, *source(place, ALICE)), umask=0o077) == "CREATED"
    assert stat.S_IMODE((root / ".staging").stat().st_mode) == mode
    assert as_user(BOB, publish(root, *source(place, BOB, OTHER)), umask=0o022) == "CREATED"


def test_beside_entries_an_older_release_made_with_its_umask_is_opened_by_its_owner(place):
    root = team_root(place, 0o777)
    (root / ".staging").mkdir(mode=0o755)
    os.chown(root / ".staging", ALICE, ALICE)
    two = source(place, BOB, OTHER)
    told = as_user(BOB, publish(root, *two))
    assert f"({root}/.staging" in told
    assert "give this user the right" in told
    assert as_user(ALICE, publish(root, *source(place, ALICE))) == "CREATED"
    assert as_user(BOB, publish(root, *two)) == "CREATED"


def take_and_give_back(root, key=KEY):
    def act():
        PosixStore(root).lease(key, 10).release()
        return "given back"

    return act


def take_and_die(root, ttl):
    def act():
        lease = PosixStore(root).lease(KEY, ttl)
        assert lease.held()
        return "held"

    return act


def gc(root):
    return lambda: len(collect(PosixStore(root)).removals)


@pytest.mark.parametrize("mode", [0o2775, 0o777, 0o1777])
def test_the_first_collectors_umask_shuts_nobody_out_of_collecting_and_leasing(place, mode):
    root = team_root(place, mode)
    assert as_user(BOB, gc(root), groups=[TEAM], umask=0o077) == "0"
    for name in (".leases", ".staging"):
        found = (root / name).stat()
        kept = mode if name == ".staging" else mode & ~stat.S_ISVTX
        assert stat.S_IMODE(found.st_mode) == kept
        assert found.st_gid == (TEAM if mode & stat.S_ISGID else BOB)
    for user in (ALICE, BOB):
        assert as_user(user, gc(root), groups=[TEAM], umask=0o022) == "0"
        assert as_user(user, take_and_give_back(root), groups=[TEAM]) == "given back"
        assert as_user(user, publish(root, *source(place, user, f"{user:032x}")), groups=[TEAM])


@pytest.mark.parametrize("mode", [0o2775, 0o777, 0o1777])
def test_the_lease_of_another_user_who_died_is_taken_over(place, mode):
    root = team_root(place, mode)
    assert as_user(ALICE, take_and_die(root, 1.0), groups=[TEAM], umask=0o077) == "held"

    def wait_for_it():
        store, tries = PosixStore(root), 0
        while True:
            try:
                lease = store.lease(KEY, 1.0)
            except LeaseHeld:
                tries += 1
                time.sleep(0.1)
            else:
                lease.release()
                return "met" if tries else "was free"

    assert as_user(BOB, wait_for_it, groups=[TEAM]) == "met"
    # The directory was another's; what is left of it is in nobody's way.
    for user in (BOB, ALICE, BOB):
        assert as_user(user, take_and_give_back(root), groups=[TEAM]) == "given back"


def test_leases_an_older_release_made_with_its_umask_are_named_and_opened_by_their_owner(place):
    root = team_root(place)
    (root / ".leases").mkdir(mode=0o755)
    os.chown(root / ".leases", BOB, TEAM)
    (root / ".leases").chmod(0o2755)
    for act in (gc(root), take_and_give_back(root)):
        told = as_user(ALICE, act, groups=[TEAM], umask=0o002)
        assert f"({root}/.leases); give this user the right to write there" in told
    assert not list((root / ".staging").iterdir())
    assert as_user(BOB, gc(root), groups=[TEAM]) == "0"
    assert as_user(ALICE, gc(root), groups=[TEAM]) == "0"
    (root / ".leases" / KEY).mkdir()
    (root / ".leases" / KEY / "stray").touch()
    os.chown(root / ".leases" / KEY, BOB, TEAM)

    def wait_for_it():
        store = PosixStore(root)
        while True:
            try:
                return store.lease(KEY, 1.0)
            except LeaseHeld:
                time.sleep(0.1)

    told = as_user(ALICE, wait_for_it, groups=[TEAM])
    assert f"({root}/.leases/{KEY}); give this user the right to write there" in told


def test_a_private_root_stays_private(place):
    root = place / "tier"
    root.mkdir(mode=0o700)
    os.chown(root, ALICE, ALICE)
    assert as_user(ALICE, publish(root, *source(place, ALICE))) == "CREATED"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert "TierError" in as_user(BOB, lambda: PosixStore(root).find(KEY))


def test_others_read_and_fetch_what_the_umask_lets_them_and_change_nothing(place):
    root = team_root(place, 0o755)
    assert as_user(ALICE, publish(root, *source(place, ALICE))) == "CREATED"
    into = place / "into"
    into.mkdir()
    os.chown(into, BOB, BOB)
    assert as_user(BOB, lambda: PosixStore(root).fetch(KEY, into).key) == KEY
    before = modes(root)
    for attempt in (
        lambda: PosixStore(root).delete(KEY),
        lambda: PosixStore(root).set_aside(KEY),
        publish(root, *source(place, BOB, OTHER)),
    ):
        told = as_user(BOB, attempt)
        assert told == "False" or told.startswith("TierError"), told
    assert modes(root).keys() - {".quarantine"} == before.keys()
    PosixStore(root).verify(KEY)


def test_what_a_umask_hides_is_an_error_and_no_miss_and_is_compiled_without(place):
    """Pitfall 24, between two users."""
    root = team_root(place, 0o777)
    assert as_user(ALICE, publish(root, *source(place, ALICE)), umask=0o077) == "CREATED"
    assert as_user(BOB, lambda: PosixStore(root).find(KEY)).startswith("TierError")
    home = place / "bob"
    home.mkdir()
    os.chown(home, BOB, BOB)

    def compile_():
        store = TieredStore([LocalStore(home / "local"), PosixStore(root)])
        coordinator = CompileCoordinator(store, CompilePolicy())
        coordinator.get_or_compile(FakeCompile(KEY, str(home / "log")).job())
        return coordinator.counts

    assert as_user(BOB, compile_) == "{'compiled': 1}"


def test_damage_that_a_reader_may_not_mend_stays_is_reported_and_is_not_used(place):
    """Pitfall 5, between two users."""
    root = team_root(place, 0o755)
    as_user(ALICE, publish(root, *source(place, ALICE)))
    data = (root / KEY / "graph.bin").read_bytes()
    (root / KEY / "graph.bin").write_bytes(data[:-1] + b"?")
    into = place / "into"
    into.mkdir()
    os.chown(into, BOB, BOB)
    assert as_user(BOB, lambda: PosixStore(root).fetch(KEY, into)).startswith("ArtifactCorrupt")
    assert (root / KEY).is_dir()


def test_in_a_sticky_root_a_stranger_can_plant_new_keys_and_take_nothing_away(place):
    """Why a world-writable root needs signatures: the sticky bit protects names, not readers."""
    root = team_root(place, 0o1777)
    assert as_user(ALICE, publish(root, *source(place, ALICE))) == "CREATED"
    assert as_user(EVE, publish(root, *source(place, EVE, OTHER))) == "CREATED"
    evil = source(place, EVE, KEY, {"graph.bin": b"EVIL"}, name="evil")
    assert as_user(EVE, publish(root, *evil)) == "CONFLICT"
    assert as_user(EVE, lambda: PosixStore(root).delete(KEY)).startswith("TierError")
    assert PosixStore(root).verify(KEY).file("graph.bin").size == len(FILES["graph.bin"])


def test_a_strangers_local_tier_under_tmp_is_refused(place):
    from neuron_store.settings import own_directory

    squatted = place / "vllm_neuron_wdir_alice"
    squatted.mkdir()
    os.chown(squatted, EVE, EVE)
    told = as_user(ALICE, lambda: own_directory(squatted))
    assert told.startswith("ConfigError")
    assert "could plant artifacts" in told


def test_a_publish_in_a_tier_that_may_not_be_written_says_so(place):
    root = team_root(place, 0o755)
    told = as_user(BOB, publish(root, *source(place, BOB)))
    assert told.startswith("TierError")
    assert "give this user the right to write there" in told
    assert not (root / KEY).exists()

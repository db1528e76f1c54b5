"""Every fault at every point of every operation, on the first-party tiers."""

from __future__ import annotations

import errno
import functools
from typing import TYPE_CHECKING

import attrs
import pytest

from neuron_store import TieredStore
from neuron_store.errors import ArtifactNotFound, TierError
from neuron_store.testing import (
    COLLECT,
    DELETE,
    FETCH,
    FIND,
    GET,
    LEASE,
    OPERATIONS,
    PUBLISH,
    FileFault,
    Injected,
    Operation,
    faults_for,
    inject_files,
    inject_steps,
)
from neuron_store_backends import _aside
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from neuron_store_backends.s3 import S3Store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def short_claims(monkeypatch):
    """A claim of a killed process is waited out; in tests no holder is ever slow."""
    monkeypatch.setattr(_aside, "CLAIM_SECONDS", 0.3)


def damage(store, bench):
    bench.publish(store)
    (store.root / bench.key / "graph.hlo").write_bytes(b"")


REPAIR = attrs.evolve(PUBLISH, name="repair", begin=damage, damaged=True)
DELETE_DAMAGED = attrs.evolve(DELETE, name="delete damaged", begin=damage, damaged=True)
RENAMING = (*OPERATIONS, REPAIR, DELETE_DAMAGED)
# A look-up is one read, and has no steps.
ON_OBJECTS = [operation for operation in OPERATIONS if operation is not FIND]
STEPPED = [operation for operation in RENAMING if operation is not FIND]
TIERS = {"local": LocalStore, "posix": PosixStore}


def staged(root: Path) -> list[str]:
    return [path.name for path in root.glob("**/.staging/*")]


def tiered(root: Path) -> TieredStore:
    return TieredStore([LocalStore(root / "local"), PosixStore(root / "shared")])


def checked(report: Injected, least: int) -> None:
    print(report)
    assert report.failures == []
    assert report.points >= least


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("operation", RENAMING, ids=lambda o: o.name)
def test_no_failing_call_of_a_rename_tier_breaks_a_promise(tier, operation, tmp_path):
    """Pitfalls 30, 31, 32, 44: every call of the tier's fails with every error it can have."""
    checked(inject_files(operation, TIERS[tier], tmp_path, leftovers=staged), least=20)


@pytest.mark.parametrize("operation", [PUBLISH, DELETE], ids=lambda o: o.name)
def test_no_call_that_stays_full_or_loses_its_reply_breaks_a_promise(operation, tmp_path):
    """Pitfalls 31 and 32: a disk that is full in the middle; success that reports an error."""

    def some(calls):
        return [f for f in faults_for(calls) if f.done or f.lasting or f.error == errno.EDQUOT]

    checked(inject_files(operation, PosixStore, tmp_path, faults=some, leftovers=staged), least=10)


# A publish that finds another's artifact has one step.
@pytest.mark.filterwarnings("ignore:.* has one step:UserWarning")
@pytest.mark.parametrize("tier", [pytest.param("local", marks=pytest.mark.slow), "posix"])
@pytest.mark.parametrize("operation", STEPPED, ids=lambda o: o.name)
def test_nothing_at_any_step_of_a_rename_tier_breaks_a_promise(tier, operation, tmp_path):
    checked(inject_steps(operation, TIERS[tier], tmp_path), least=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("operation", [LEASE, COLLECT], ids=lambda o: o.name)
def test_no_failing_call_of_a_lease_or_a_collector_breaks_a_promise(operation, tmp_path):
    checked(inject_files(operation, PosixStore, tmp_path), least=20)


@pytest.mark.parametrize("operation", [LEASE, COLLECT], ids=lambda o: o.name)
def test_nothing_at_any_step_of_a_lease_or_a_collector_breaks_a_promise(operation, tmp_path):
    checked(inject_steps(operation, PosixStore, tmp_path), least=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
# A walk that counts what has arrived is broken off by the fault, its directory still open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_failing_call_of_a_get_through_two_tiers_breaks_a_promise(tmp_path):
    """The artifact is in the shared tier, and comes from there through every fault of either."""

    def only_shared(store, bench):
        bench.publish(store.tiers[1])

    get = attrs.evolve(GET, begin=only_shared, name="get through")
    # The local tier has the artifact when the get came through, so the judge's second life begins
    # with two copies; it asks the same of both.
    checked(inject_files(get, tiered, tmp_path), least=100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("operation", [*ON_OBJECTS, LEASE, COLLECT], ids=lambda o: o.name)
def test_nothing_at_any_step_of_s3_breaks_a_promise(operation, s3_place, tmp_path):
    def open_at(root: Path) -> S3Store:
        place = f"{s3_place.bucket}/{root.parent.name}"
        return S3Store(place, endpoint_url=s3_place.url)

    checked(inject_steps(operation, open_at, tmp_path), least=3)


def test_another_operation_is_a_line(tmp_path):
    lists = Operation("keys", lambda store, _bench: list(store.keys()), PUBLISH.act)
    checked(inject_files(lists, PosixStore, tmp_path), least=5)


class ForgetsItsStaging(PosixStore):
    """Cleans up nothing, publishes what is not flushed, and lets foreign errors out."""

    def publish(self, artifact, source, *, consume=False):
        import os
        import shutil

        target = self.root / artifact.key
        os.makedirs(target)
        for file in artifact.files:
            (target / file.name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file.name, target / file.name)
        return super().publish(artifact, source, consume=consume)


def test_a_tier_that_breaks_its_promises_is_caught(tmp_path):
    report = inject_files(PUBLISH, ForgetsItsStaging, tmp_path)
    assert any("foreign error" in failure for failure in report.failures)
    assert any("stuck" in failure for failure in report.failures)
    assert str(report).count("\n") == len(report.failures)


class ErrorsAreMisses(PosixStore):
    """Breaks the first promise of all."""

    def find(self, key):
        try:
            return super().find(key)
        except OSError:
            return None

    def fetch(self, key, into):
        try:
            return super().fetch(key, into)
        except TierError as error:
            raise ArtifactNotFound(key, self.location) from error

    def delete(self, key):
        try:
            return super().delete(key)
        except TierError:
            return False


@pytest.mark.parametrize("operation", [FIND, FETCH, DELETE], ids=lambda o: o.name)
def test_a_tier_that_takes_an_error_for_a_miss_is_caught(operation, tmp_path):
    report = inject_files(operation, ErrorsAreMisses, tmp_path)
    assert report.failures
    assert all("taken for a miss" in failure for failure in report.failures)


def test_a_step_that_fails_is_no_miss_either(tmp_path):
    report = inject_steps(FETCH, ErrorsAreMisses, tmp_path, how=["raise"])
    assert len(report.failures) == report.points > 0


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR])
def test_a_file_system_that_says_not_there_may_be_believed(code, tmp_path):
    def absent(calls):
        return [FileFault(at, code) for at, (call, _) in enumerate(calls, 1) if call == "open"]

    checked(inject_files(FIND, ErrorsAreMisses, tmp_path, faults=absent), least=1)


def test_a_fetch_is_injected_at_its_reads(tmp_path):
    report = inject_files(FETCH, functools.partial(PosixStore), tmp_path)
    assert any(place.startswith("read ") for place in report.places)
    checked(report, least=20)

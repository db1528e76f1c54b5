"""Every fault at every point of an operation, each judged afterwards by a client without faults.

    report = inject_files(PUBLISH, lambda place: PosixStore(place), tmp_path)
    print(report)          # publish: 412 points, ...
    assert not report.failures

An operation is two functions, so a new one is a line:

    KEYS = Operation("keys", lambda store, bench: list(store.keys()), PUBLISH.act)

What is judged after each point, whatever the operation was: nothing torn is seen; what was told to
be there is there; what is there was not called absent because a call failed; nothing half-made is
visible; the key can be published, deleted and published again; only errors of `neuron_store.errors`
came out; a source that was not taken over is untouched.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import threading
import time
import warnings
from typing import TYPE_CHECKING

import attrs

from neuron_store import steps
from neuron_store.errors import (
    ArtifactNotFound,
    LeaseHeld,
    TierError,
)
from neuron_store.testing._judging import ABSENT, Interrupted, judge
from neuron_store.testing.faulty_files import FaultyFiles, FileFault, faults_for
from neuron_store.testing.killing import run_killed_at
from neuron_store.testing.samples import make_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from neuron_store.abc import ArtifactStore, Publication
    from neuron_store.artifact import Artifact

__all__ = [
    "COLLECT",
    "DELETE",
    "FETCH",
    "FIND",
    "GET",
    "HOW",
    "LEASE",
    "OPERATIONS",
    "PUBLISH",
    "PUBLISH_AGAIN",
    "PUBLISH_CONSUMING",
    "PUBLISH_OTHER",
    "Bench",
    "Injected",
    "Operation",
    "inject_files",
    "inject_steps",
]

FILES = {"graph.hlo": b"graph" * 99, "folder/graph.neff": b"executable" * 999, "empty": b""}
# Seconds: of a lease, and until one whose holder is dead must be free.
_TTL = 0.5
_PATIENCE = 30.0
HOW = ("kill", "raise", "interrupt")
"""What can befall a process at a step: SIGKILL, an error, Ctrl-C."""


@attrs.frozen
class Bench:
    """What an operation is done with at one point: one key, its files, and room."""

    place: Path
    key: str
    contents: Mapping[str, bytes]
    artifact: Artifact
    source: Path
    other: tuple[Artifact, Path]
    """The same key with other bytes."""
    into: Path

    @classmethod
    def at(cls, place: Path, number: int) -> Bench:
        """A new one in the new directory `place`."""
        key = hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()
        artifact, source = make_source(place / "source", key, FILES)
        into = place / "into"
        into.mkdir()
        other = make_source(place / "other", key, {**FILES, "graph.hlo": b"other"})
        return cls(place, key, FILES, artifact, source, other, into)

    def publish(self, store: ArtifactStore) -> Publication:
        """Publish the files as they are."""
        return store.publish(self.artifact, self.source)


@attrs.frozen
class Operation:
    """One operation of a tier, as the harness runs it."""

    name: str
    act: Callable[[ArtifactStore, Bench], object]
    begin: Callable[[ArtifactStore, Bench], object] = lambda _store, _bench: None
    """What is there before it."""
    damaged: bool = False
    """What is there before is damaged, and may be found so until it is repaired."""
    consumes: bool = False
    """The source directory may be gone afterwards, if the artifact is in the tier instead."""
    after: Callable[[ArtifactStore, Bench], str | None] = lambda _store, _bench: None
    """Asked of a client without faults: which promise of its own is broken, if any."""


PUBLISH = Operation("publish", lambda store, bench: bench.publish(store))
PUBLISH_CONSUMING = Operation(
    "publish, consuming",
    lambda store, bench: store.publish(bench.artifact, bench.source, consume=True),
    consumes=True,
)
PUBLISH_AGAIN = Operation(
    "publish the same again",
    lambda store, bench: bench.publish(store),
    lambda store, bench: bench.publish(store),
)
PUBLISH_OTHER = Operation(
    "publish where others were first",
    lambda store, bench: bench.publish(store),
    lambda store, bench: store.publish(*bench.other),
)


def _find(store: ArtifactStore, bench: Bench) -> Artifact:
    found = store.find(bench.key)
    if found is None:
        raise ArtifactNotFound(bench.key, store.location)
    return found


FIND = Operation("find", _find, lambda store, bench: bench.publish(store))
FETCH = Operation(
    "fetch",
    lambda store, bench: store.fetch(bench.key, bench.into),
    lambda store, bench: bench.publish(store),
)
DELETE = Operation(
    "delete",
    lambda store, bench: store.delete(bench.key),
    lambda store, bench: bench.publish(store),
)
GET = Operation(
    "get",
    lambda store, bench: store.get(bench.key),
    lambda store, bench: bench.publish(store),
)


def _lease(store: ArtifactStore, bench: Bench) -> None:
    with store.lease(bench.key, _TTL) as lease:
        lease.held()


def _free_again(store: ArtifactStore, bench: Bench) -> str | None:
    """A holder that met with a fault, or was killed, is outwaited."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            store.lease(bench.key, _TTL).release()
        except LeaseHeld as error:
            if time.monotonic() > end:
                return f"the lease is stuck: {error}"
            time.sleep(_TTL / 5)
        else:
            return None


def _collect(store: ArtifactStore, _bench: Bench) -> None:
    from neuron_store.collecting import collect  # noqa: PLC0415  (the operation alone needs it)

    collect(store, older_than=0, min_age=0, grace=0)


LEASE = Operation("lease", _lease, after=_free_again)
COLLECT = Operation("collect", _collect, lambda store, bench: bench.publish(store))
OPERATIONS = (PUBLISH, PUBLISH_CONSUMING, PUBLISH_AGAIN, PUBLISH_OTHER, FIND, FETCH, DELETE)
"""What every tier is put through; `GET` too where there is a local side, `LEASE` and `COLLECT`
where the tier has them."""


@attrs.define
class Injected:
    """What came of one operation."""

    operation: str
    points: int = 0
    """Faults that were injected, each in a run of its own."""
    places: list[str] = attrs.field(factory=list)
    """The steps or calls they were injected at."""
    survived: int = 0
    """Runs that succeeded in spite of the fault."""
    failures: list[str] = attrs.field(factory=list)
    """Broken promises."""

    def __str__(self) -> str:
        text = (
            f"{self.operation}: {self.points} points injected at {len(self.places)} places, "
            f"{self.survived} survived, {len(self.failures)} promises broken"
        )
        return "\n  ".join([text, *self.failures])


def inject_files(
    operation: Operation,
    open_at: Callable[[Path], ArtifactStore],
    workspace: Path,
    *,
    faults: Callable[[list[tuple[str, str]]], Iterable[FileFault]] = faults_for,
    leftovers: Callable[[Path], Iterable[str]] = lambda _root: (),
) -> Injected:
    """Every file fault at every call below the tier's root, one run for each.

    Args:
        operation: what is done.
        open_at: opens the tier at a new directory.
        workspace: an empty directory to work in.
        faults: which faults, given the calls of a run without any.
        leftovers: what an attempt should have cleaned up below the root and did not; asked after
            faults that passed.
    """
    report = Injected(operation.name)
    bench, root = _new(workspace, 0)
    with open_at(root) as store:
        operation.begin(store, bench)
        with FaultyFiles(root) as counted:
            operation.act(store, bench)
    report.places = [f"{call} {os.path.relpath(path, root)}" for call, path in counted.calls]
    for number, fault in enumerate(faults(counted.calls), 1):
        bench, root = _new(workspace, number)
        with open_at(root) as store:
            operation.begin(store, bench)
            with FaultyFiles(root, fault) as files:
                outcome = _outcome(operation, store, bench)
        report.points += bool(files.injected)
        report.survived += not isinstance(outcome, BaseException)
        absent = fault.error in ABSENT and not fault.short
        wrong = judge(operation, open_at, root, bench, outcome, absent=absent)
        if not (fault.lasting or fault.kill):
            wrong += [f"left behind: {name}" for name in leftovers(root)]
        report.failures += [
            f"{fault} ({report.places[fault.at - 1]}): {each} [{outcome!r}]" for each in wrong
        ]
        shutil.rmtree(workspace / str(number), ignore_errors=True)
    return report


def inject_steps(
    operation: Operation,
    open_at: Callable[[Path], ArtifactStore],
    workspace: Path,
    *,
    how: Iterable[str] = HOW,
) -> Injected:
    """A kill, an error and an interrupt before every numbered step, one run for each.

    Args:
        operation: what is done.
        open_at: opens a new, empty tier; a directory of its own is offered to it.
        workspace: an empty directory to work in.
        how: of `HOW`. Without "kill" for a tier that lives in this process.

    Warns where the operation has one step only, so that next to nothing was tried.
    """
    report = Injected(operation.name)
    count = itertools.count()
    for kind in how:
        for at in itertools.count(1):
            number = next(count)
            bench, root = _new(workspace, number)
            with open_at(root) as store:
                operation.begin(store, bench)
            run = _killed if kind == "kill" else _raised
            step, outcome = run(operation, open_at, root, bench, at=at, kind=kind)
            if step is None:
                break
            report.points += 1
            if step not in report.places:
                report.places.append(step)
            report.survived += not isinstance(outcome, BaseException)
            wrong = judge(operation, open_at, root, bench, outcome)
            report.failures += [f"{kind} at {step} ({at}): {each} [{outcome!r}]" for each in wrong]
            shutil.rmtree(workspace / str(number), ignore_errors=True)
    if len(report.places) == 1:
        warnings.warn(
            f"{operation.name} has one step, {report.places[0]}: little was injected; call "
            "neuron_store.steps.step before each step of it",
            stacklevel=2,
        )
    return report


def _new(workspace: Path, number: int) -> tuple[Bench, Path]:
    place = workspace / str(number)
    place.mkdir(parents=True)
    # Not below the bench: its calls are not the tier's.
    return Bench.at(place / "bench", number), place / "tier"


def _outcome(operation: Operation, store: ArtifactStore, bench: Bench) -> object:
    try:
        return operation.act(store, bench)
    except (Exception, Interrupted) as error:  # noqa: BLE001  (judged below)
        return error


def _raised(
    operation: Operation,
    open_at: Callable[[Path], ArtifactStore],
    root: Path,
    bench: Bench,
    *,
    at: int,
    kind: str,
) -> tuple[str | None, object]:
    seen: list[str] = []
    caller = threading.current_thread()

    def hook(name: str) -> None:
        seen.append(name)
        if len(seen) == at:
            # Ctrl-C arrives in the thread that called, and in no worker of the tier's.
            if kind == "interrupt" and threading.current_thread() is caller:
                raise Interrupted(name)
            raise TierError("test", "step", "injected", key=bench.key, code=errno.EIO)

    with open_at(root) as store:
        steps.set_hook(hook)
        try:
            outcome = _outcome(operation, store, bench)
        finally:
            steps.set_hook(None)
    return (seen[at - 1] if len(seen) >= at else None), outcome


def _killed(
    operation: Operation,
    open_at: Callable[[Path], ArtifactStore],
    root: Path,
    bench: Bench,
    *,
    at: int,
    kind: str,
) -> tuple[str | None, object]:
    del kind

    def child() -> None:
        with open_at(root) as store:
            operation.act(store, bench)

    ended = run_killed_at(child, at)
    if ended.error is not None:
        return ended.step or "?", AssertionError(ended.error)
    return ended.step, Interrupted("killed")

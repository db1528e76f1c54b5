"""Which promises were broken by an operation that met with a fault."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_store.abc import Publication
from neuron_store.errors import ArtifactCorrupt, ArtifactNotFound, NeuronStoreError
from neuron_store.testing.samples import make_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from neuron_store.abc import ArtifactStore
    from neuron_store.testing.injecting import Bench, Operation

__all__ = ["ABSENT", "Interrupted", "judge"]

# What a file system says of a name that is not there; every other error says nothing about it.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


class Interrupted(KeyboardInterrupt):
    """Stands for Ctrl-C: no `Exception`, so only clean-up code sees it pass."""


def judge(
    operation: Operation,
    open_at: Callable[[Path], ArtifactStore],
    root: Path,
    bench: Bench,
    outcome: object,
    *,
    absent: bool = False,
) -> list[str]:
    """The promises that were broken, in words. `absent`: a call was told that nothing is there."""
    wrong = []
    if isinstance(outcome, BaseException) and not isinstance(
        outcome, (NeuronStoreError, Interrupted)
    ):
        wrong.append(f"a foreign error escaped: {outcome!r}")
    # A process that is killed while it holds the source cannot give it back.
    source_left = not operation.consumes or bench.source.exists()
    if source_left and _tree(bench.source) != dict(bench.contents):
        wrong.append(f"the source was touched: {sorted(_tree(bench.source))}")
    try:
        with open_at(root) as store:
            wrong += filter(None, [operation.after(store, bench)])
            wrong += _judge_tier(
                store, bench, outcome, operation, source_left=source_left, absent=absent
            )
    except Exception as error:  # noqa: BLE001  (whatever it is, the key is stuck)
        wrong.append(f"the key is stuck: {error!r}")
    return wrong


def _judge_tier(
    store: ArtifactStore,
    bench: Bench,
    outcome: object,
    operation: Operation,
    *,
    source_left: bool,
    absent: bool,
) -> list[str]:
    wrong = []
    found, fine = None, {Publication.CREATED}
    try:
        found = store.find(bench.key)
    except ArtifactCorrupt as error:
        fine = {Publication.REPAIRED}
        if not operation.damaged or isinstance(outcome, Publication):
            wrong.append(f"something torn is visible: {error}")
    wrong += _judge_answer(bench, outcome, found=found is not None, absent=absent)
    killed = isinstance(outcome, Interrupted) and outcome.args == ("killed",)
    if found is None and not source_left and not killed:
        wrong.append("the source is gone, and nothing is in the tier")
    if found is not None:
        into = bench.place / "judged"
        into.mkdir()
        store.fetch(bench.key, into)
        whole = [dict(bench.contents), {**bench.contents, "graph.hlo": b"other"}]
        if _tree(into) not in whole:
            wrong.append("a torn artifact was fetched")
    if found is None and bench.key in list(store.keys()):
        wrong.append("a key is listed that is not there")
    return wrong + _judge_next_life(store, bench, fine, found=found is not None)


def _judge_answer(bench: Bench, outcome: object, *, found: bool, absent: bool) -> list[str]:
    """Whether what the caller was told is so."""
    wrong = []
    if isinstance(outcome, Publication) and not found:
        wrong.append(f"{outcome.name} was lost")
    if isinstance(outcome, Path) and _tree(outcome, hidden=False) != dict(bench.contents):
        wrong.append("get gave something else")
    missed = isinstance(outcome, ArtifactNotFound) or outcome is False
    if missed and found and not absent:
        wrong.append("an error was taken for a miss: the artifact is there")
    if outcome is True and found:
        wrong.append("delete said True, and the artifact is there")
    return wrong


def _judge_next_life(
    store: ArtifactStore, bench: Bench, fine: set[Publication], *, found: bool
) -> list[str]:
    """The key must go through a whole life again, whatever lies in its way."""
    wrong = []
    artifact, source = make_source(bench.place / "again", bench.key, bench.contents)
    answer = store.publish(artifact, source)
    if found:
        fine = {Publication.PRESENT, Publication.CONFLICT}
    if answer not in fine:
        wrong.append(f"the next publish answered {answer.name}")
    store.verify(bench.key)
    if not store.delete(bench.key) or store.find(bench.key) is not None:
        wrong.append("it cannot be deleted")
    if store.publish(artifact, source) is not Publication.CREATED:
        wrong.append("it cannot be published again")
    store.verify(bench.key)
    return wrong


def _tree(directory: Path, *, hidden: bool = True) -> dict[str, Any]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and (hidden or not path.name.startswith("."))
    }

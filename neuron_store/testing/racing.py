"""Many publishers of one key at the same moment, in processes or threads."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.testing.samples import make_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from neuron_store.abc import ArtifactStore

__all__ = ["Race", "race_publishers"]

_PATIENCE = 300.0


@attrs.frozen
class Race:
    """One round: what each publisher was told, by its number."""

    key: str
    answers: tuple[str, ...]
    """Names of `Publication`, or the error's text."""

    @property
    def winners(self) -> Sequence[int]:
        """The publishers that were told CREATED."""
        return [n for n, answer in enumerate(self.answers) if answer == "CREATED"]


def racer_bytes(round_: int, writer: int, *, same: bool) -> bytes:
    """What a publisher publishes; `same` for all of a round, or its own."""
    return f"round {round_} of {'all' if same else writer}".encode() * 40


def _publish_rounds(
    factory: Callable[[], ArtifactStore],
    writer: int,
    keys: Sequence[str],
    same: bool,
    meeting: tuple[Any, Any],
) -> None:
    barrier, results = meeting
    with tempfile.TemporaryDirectory(prefix="neuron_store-race-") as folder, factory() as store:
        for round_, key in enumerate(keys):
            data = racer_bytes(round_, writer, same=same)
            files = {"graph.bin": data, "more/notes.txt": data[:20]}
            artifact, source = make_source(Path(folder, str(round_)), key, files)
            barrier.wait(_PATIENCE)
            try:
                answer = store.publish(artifact, source).name
            except Exception as error:  # noqa: BLE001  (told to the test)
                answer = f"{type(error).__name__}: {error}"
            results.put((round_, writer, answer))
            barrier.wait(_PATIENCE)


def race_publishers(
    factory: Callable[[], ArtifactStore],
    *,
    keys: Sequence[str],
    writers: int,
    same: bool,
    method: str = "spawn",
) -> Sequence[Race]:
    """One round for each key, all writers starting together.

    Args:
        factory: opens the tier; pickles, unless `method` is "fork" or "threads".
        keys: a fresh key for each round.
        writers: publishers in each round.
        same: all publish the same bytes (else each its own).
        method: "spawn", "fork", or "threads" for a tier that lives in one process.

    Raises:
        RuntimeError: a publisher ended without an answer.
    """
    if method == "threads":
        barrier: Any = threading.Barrier(writers)
        results: Any = queue.Queue()
        make: Any = threading.Thread
    else:
        context = multiprocessing.get_context(method)
        barrier, results = context.Barrier(writers), context.Queue()
        make = context.Process  # type: ignore[attr-defined]  # every context has it
    workers = [
        make(target=_publish_rounds, args=(factory, n, keys, same, (barrier, results)), daemon=True)
        for n in range(writers)
    ]
    for worker in workers:
        worker.start()
    answers: dict[tuple[int, int], str] = {}
    try:
        while len(answers) < writers * len(keys):
            ended = [n for n, worker in enumerate(workers) if not worker.is_alive()]
            try:
                round_, writer, answer = results.get(timeout=0.5)
            except queue.Empty:
                left = [n for n in ended if (len(keys) - 1, n) not in answers]
                if left:
                    raise RuntimeError(
                        f"publisher {left[0]} of {writers} ended without an answer; what it raised "
                        "is on the standard error (the factory has to open the tier in each)"
                    ) from None
                continue
            answers[round_, writer] = answer
    except BaseException:
        # The others wait for the one that will not come.
        barrier.abort()
        raise
    finally:
        for worker in workers:
            worker.join(_PATIENCE)
    return [
        Race(key, tuple(answers[n, writer] for writer in range(writers)))
        for n, key in enumerate(keys)
    ]

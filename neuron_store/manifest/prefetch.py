"""Brings all graphs of a deployment to the node, and promotes them from it."""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from neuron_store.artifact import dump_record
from neuron_store.errors import NeuronStoreError, PromoteError, fetch_outcome
from neuron_store.manifest._sharing import shared_out
from neuron_store.manifest.reader import graph_ranks
from neuron_store.streams import sizes_below
from neuron_store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from neuron_store.abc import ArtifactStore, Publication
    from neuron_store.artifact import Artifact
    from neuron_store.manifest.reader import Engine

__all__ = [
    "OUTCOMES",
    "Fetched",
    "Prefetch",
    "Promoted",
    "Promotes",
    "prefetch",
    "promote_manifest",
]

DEFAULT_WORKERS = 16
OUTCOMES = (
    "present",
    "fetched",
    "waited",
    "missing",
    "corrupt",
    "refused",
    "error",
    "skipped",
)
# Fewer graphs than this are not worth a process.
_LEAST_SHARE = 8


@attrs.frozen
class Fetched:
    """What became of one graph."""

    key: str
    outcome: str
    """`present` (was local already), `fetched`, `waited` (another process fetched it meanwhile),
    `missing`, `corrupt` (a tier has it, damaged), `refused` (it is there, and nobody trusted signed
    it), `error`, or `skipped` (over budget)."""
    size: int = 0
    """Bytes on the disk, where this process fetched them."""
    detail: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it is on the node now."""
        return self.outcome in {"present", "fetched", "waited"}


@attrs.frozen
class Prefetch:
    """What a prefetch did."""

    graphs: tuple[Fetched, ...]
    seconds: float

    def of(self, outcome: str) -> tuple[Fetched, ...]:
        """Those with that outcome."""
        return tuple(graph for graph in self.graphs if graph.outcome == outcome)

    @property
    def complete(self) -> bool:
        """Whether every graph is on the node now."""
        return all(graph.is_here for graph in self.graphs)

    @property
    def size(self) -> int:
        """Bytes fetched."""
        return sum(graph.size for graph in self.graphs)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "complete": self.complete,
            **{outcome: len(self.of(outcome)) for outcome in OUTCOMES},
            "bytes": self.size,
            "seconds": round(self.seconds, 3),
            "graphs": [attrs.asdict(graph) for graph in self.graphs],
        }


def prefetch(
    store: ArtifactStore,
    engines: Sequence[Engine],
    *,
    workers: int = DEFAULT_WORKERS,
    processes: int = 1,
    budget: int | None = None,
    progress: Callable[[Fetched], None] | None = None,
) -> Prefetch:
    """Bring every graph of the manifests into the store's local tier.

    Several ranks of a node may call it at once: `get` takes each key's lock, so that each graph is
    fetched once, and every process starts at another place of the list, so that they share the
    work.

    Args:
        store: has a local side (`TieredStore`).
        engines: whose graphs to bring.
        workers: fetches at once in each process.
        processes: forked from this one to share the work, at most one for eight graphs. One brings
            some fifty small graphs a second. This process must be fit to be forked: no other of its
            threads may hold locks, and no JAX may run in it.
        budget: bytes that may be fetched in all; what would go beyond is skipped, in the order of
            the manifests. What each takes on the disk, its record included, is known before
            anything is fetched.
        progress: told of each graph as it is done, one at a time.
    """
    began = time.monotonic()
    keys = list(graph_ranks(engines))
    lock = threading.Lock()
    results: dict[str, Fetched] = {}

    def done(result: Fetched) -> None:
        with lock:
            results[result.key] = result
            if progress is not None:
                progress(result)

    there = [key for key in keys if _may_be_local(store, key)]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        # The first look may read an artifact's bytes.
        for key, path in zip(there, pool.map(functools.partial(_local, store), there), strict=True):
            if path is not None:
                done(Fetched(key, "present"))
        wanted = [key for key in keys if key not in results]
        if budget is not None:
            wanted = _within(store, wanted, budget, pool, done)
    start = os.getpid() % len(wanted) if wanted else 0
    wanted = wanted[start:] + wanted[:start]
    processes = min(processes, len(wanted) // _LEAST_SHARE)
    if processes > 1:
        _bring_by_processes(store, wanted, workers, processes, done)
    else:
        # The iterator of a list may be shared by threads.
        _bring_all(store, iter(wanted), workers, done)
    return Prefetch(tuple(results[key] for key in keys), time.monotonic() - began)


def _bring_all(
    store: ArtifactStore, keys: Iterator[str], workers: int, done: Callable[[Fetched], None]
) -> None:
    stopped = threading.Event()

    def bring() -> None:
        for key in keys:
            if stopped.is_set():
                return
            done(_bring(store, key))

    pool = ThreadPoolExecutor(max(1, workers))
    try:
        for future in [pool.submit(bring) for _ in range(max(1, workers))]:
            future.result()
    except BaseException as error:
        stopped.set()
        # Whoever interrupts does not wait for what is on its way.
        pool.shutdown(wait=isinstance(error, Exception))
        raise
    pool.shutdown()


def _bring_by_processes(
    store: ArtifactStore,
    keys: Sequence[str],
    workers: int,
    processes: int,
    done: Callable[[Fetched], None],
) -> None:
    def work(share: Iterator[str], tell: Callable[[dict[str, Any]], None]) -> None:
        _bring_all(store, share, workers, lambda result: tell(attrs.asdict(result)))
        # What a use leaves behind is written down later, or at the end; a forked child has none.
        store.close()

    # Once for all of them: the imports of a cloud's client take each half a second.
    store.preload()
    for key, result in shared_out(keys, processes, work):
        if isinstance(result, str):
            done(Fetched(key, "error", detail=result))
        else:
            done(Fetched(**result))


def _may_be_local(store: ArtifactStore, key: str) -> bool:
    """Not, where one cheap look of this thread says so: handing over costs more."""
    if not isinstance(store, TieredStore):
        return True
    try:
        return store.local.locate(key) is not None
    except NeuronStoreError:
        return True  # `get` will say what is wrong, or repair it.


def _local(store: ArtifactStore, key: str) -> Path | None:
    try:
        return store.path_of(key)
    except NeuronStoreError:
        return None  # `get` will say what is wrong, or repair it.


def _within(
    store: ArtifactStore,
    keys: list[str],
    budget: int,
    pool: ThreadPoolExecutor,
    done: Callable[[Fetched], None],
) -> list[str]:
    # A local record names the tier that it came from.
    shared = store.shared if isinstance(store, TieredStore) else ()
    origin = max((tier.location for tier in shared), key=len, default=None)

    def size(key: str) -> int | None:
        try:
            artifact = store.find(key)
        except NeuronStoreError:
            return None
        return None if artifact is None else _on_disk(artifact, origin)

    left, chosen = budget, []
    for key, found in zip(keys, pool.map(size, keys), strict=True):
        # Of unknown size: not there, or in trouble; `get` will say which.
        if found is not None and found > left:
            done(Fetched(key, "skipped", detail=f"{found} bytes, {left} left of the budget"))
            continue
        left -= found or 0
        chosen.append(key)
    return chosen


def _bring(store: ArtifactStore, key: str) -> Fetched:
    try:
        # Any other store does not say whether it waited.
        path, fetched = (
            store.bring(key) if isinstance(store, TieredStore) else (store.get(key), True)
        )
    except NeuronStoreError as error:
        return Fetched(key, fetch_outcome(error), detail=str(error))
    if fetched and path.name != key:
        # Usable where it lies, by this process; but no other will ever find it.
        shutil.rmtree(path, ignore_errors=True)
        reason = "fetched, but the local tier could not take it (is its disk full?); see the log"
        return Fetched(key, "error", detail=reason)
    return Fetched(key, "fetched", sizes_below(path)[0]) if fetched else Fetched(key, "waited")


def _on_disk(artifact: Artifact, origin: str | None) -> int:
    """Bytes that the artifact takes with its record, which names where it came from."""
    files = tuple(attrs.evolve(f, sha256=f.sha256 or "0" * 64) for f in artifact.files)
    return artifact.size + len(
        dump_record(attrs.evolve(artifact, files=files, fetched_from=origin))
    )


class Promotes(Protocol):
    """A store that promotes to shared tiers, as `TieredStore` does."""

    def promote(self, key: str) -> Mapping[str, Publication]:
        """Publish a local artifact in the shared tiers; tier name to what became of it."""


@attrs.frozen
class Promoted:
    """What became of one graph's promotion."""

    key: str
    tiers: Mapping[str, Publication]
    error: NeuronStoreError | None = None


def promote_manifest(
    store: Promotes,
    engines: Sequence[Engine],
    *,
    workers: int = 8,
    progress: Callable[[Promoted], None] | None = None,
) -> list[Promoted]:
    """Promote every graph of the manifests; one that fails does not stop the others.

    Args:
        store: where the artifacts are, with the tiers to promote to.
        engines: whose graphs to promote.
        workers: promotions at once.
        progress: told of each graph as it is done, one at a time.

    Returns:
        One for each graph; those with an `error` did not reach every tier.
    """
    lock = threading.Lock()

    def one(key: str) -> Promoted:
        try:
            result = Promoted(key, store.promote(key))
        except PromoteError as error:
            result = Promoted(key, error.done, error)
        except NeuronStoreError as error:
            result = Promoted(key, {}, error)
        with lock:
            if progress is not None:
                progress(result)
        return result

    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(one, graph_ranks(engines)))

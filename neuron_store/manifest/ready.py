"""Whether a tier holds all that a deployment needs: the gate of a roll-out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.counting import counted
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ArtifactUntrusted,
    ConfigError,
    NeuronStoreError,
)
from neuron_store.manifest.coverage import Coverage
from neuron_store.manifest.reader import graph_ranks
from neuron_store.mounted import require_mounted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.manifest.reader import Engine

__all__ = [
    "MAX_WORLD_SIZE",
    "GraphState",
    "Readiness",
    "check_ready",
    "expected_world_size",
    "partial_ranks",
]

MAX_WORLD_SIZE = 1 << 20
"""A larger one is refused: each rank is looked for."""


@attrs.frozen
class GraphState:
    """One graph in the tier."""

    key: str
    ranks: tuple[int, ...]
    """Global ranks that need it."""
    state: str
    """`ready`, `missing`, `corrupt`, `refused` (nobody trusted signed it), or `error` when the tier
    could not say."""
    detail: str = ""


@attrs.frozen
class Readiness:
    """The answer, with all that stands in the way."""

    location: str
    world_size: int
    graphs: tuple[GraphState, ...]
    unseen_ranks: tuple[int, ...]
    """Ranks below the world size that traced no graph: their engine's manifest is missing."""
    beyond_ranks: tuple[int, ...] = ()
    """Ranks at or above the world size that traced graphs: it is not that deployment's size."""
    partial: tuple[str, ...] = ()
    """Engines where ranks of a stage traced different numbers of graphs, told in words."""

    @property
    def missing(self) -> tuple[GraphState, ...]:
        """Graphs that are not ready."""
        return tuple(graph for graph in self.graphs if graph.state != "ready")

    @property
    def ready(self) -> bool:
        """Whether every graph of every rank is there and verifies."""
        return (
            not self.missing
            and not self.unseen_ranks
            and not self.beyond_ranks
            and bool(self.graphs)
        )

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "ready": self.ready,
            "tier": self.location,
            "world_size": self.world_size,
            "graphs": len(self.graphs),
            "missing": [attrs.asdict(graph) for graph in self.missing],
            "unseen_ranks": list(self.unseen_ranks),
            "beyond_ranks": list(self.beyond_ranks),
            "partial": list(self.partial),
        }


def expected_world_size(engines: Sequence[Engine]) -> int:
    """The largest world size that the manifests name, or else one more than the highest rank."""
    said = [engine.manifest.config.topology.world_size or 0 for engine in engines]
    seen = [rank + 1 for engine in engines for rank in engine.manifest.ranks]
    return max([*said, *seen], default=0)


def check_ready(
    engines: Sequence[Engine],
    store: ArtifactStore,
    *,
    world_size: int | None = None,
    verify: bool = True,
    workers: int = 8,
    progress: Callable[[GraphState], None] | None = None,
) -> Readiness:
    """Look up every graph of the manifests in the tier.

    Args:
        engines: the deployment's manifests.
        store: the tier that the new nodes will fetch from.
        world_size: global ranks that must each have traced something; None: as the manifests say.
        verify: read every byte and check every digest; False: look whether it is committed.
        workers: look-ups at once.
        progress: told of each graph as it is done, one at a time.

    Raises:
        ConfigError: the world size is beyond `MAX_WORLD_SIZE`.
        TierError: the tier is a directory of this machine that does not exist.
    """
    needed = graph_ranks(engines)
    lock = threading.Lock()
    size = expected_world_size(engines) if world_size is None else world_size
    if size > MAX_WORLD_SIZE:
        raise ConfigError(
            f"a world size of {size} ranks; at most {MAX_WORLD_SIZE} are checked: correct it, or "
            "the ranks in the manifests"
        )
    if needed:
        require_mounted(store.location)

    def look(key: str) -> GraphState:
        found = GraphState(key, needed[key], *_state(store, key, verify=verify))
        if progress is not None:
            with lock:
                progress(found)
        return found

    with ThreadPoolExecutor(max(1, min(workers, len(needed) or 1))) as pool:
        graphs = tuple(pool.map(look, needed))
    seen = {rank for ranks in needed.values() for rank in ranks}
    return Readiness(
        location=store.location,
        world_size=size,
        graphs=graphs,
        unseen_ranks=tuple(r for r in range(size) if r not in seen),
        beyond_ranks=tuple(sorted(r for r in seen if r >= size)),
        partial=tuple(partial_ranks(engines)),
    )


def _state(store: ArtifactStore, key: str, *, verify: bool) -> tuple[str, str]:
    try:
        if verify:
            store.verify(key)
        elif store.find(key) is None:
            return "missing", ""
    except ArtifactNotFound:
        return "missing", ""
    except ArtifactCorrupt as error:
        return "corrupt", error.reason
    except ArtifactUntrusted as error:
        return "refused", error.reason
    except NeuronStoreError as error:
        return "error", str(error)
    return "ready", ""


def partial_ranks(engines: Sequence[Engine]) -> list[str]:
    """Engines in which some ranks traced fewer graphs than others of their stage, in words.

    Not always a fault (rank 0 alone may sample), but what a rank that died early looks like.
    """
    told = []
    for engine in engines:
        coverage = Coverage.of(engine.manifest)
        counts = dict.fromkeys(engine.manifest.ranks, 0)
        for graph in engine.manifest.graphs:
            for rank in graph.ranks:
                counts[rank] += 1
        for stage, ranks in sorted(coverage.stages.items()):
            most = max(counts[rank] for rank in ranks)
            few = [rank for rank in sorted(ranks) if counts[rank] < most]
            if few:
                some = ", ".join(f"rank {rank}: {counts[rank]}" for rank in few[:8])
                more = f" and {len(few) - 8} more" if len(few) > 8 else ""
                where = f", stage {stage}" if len(coverage.stages) > 1 else ""
                told.append(
                    f"{engine.name}{where}: up to {counted(most, 'graph')} a rank, but {some}{more}"
                )
    return told

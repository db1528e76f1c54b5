"""Which ranks of an engine should have traced a graph and did not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from neuron_store.manifest.schema import Manifest, Topology

__all__ = ["Coverage"]


@attrs.frozen
class Coverage:
    """The ranks of one engine that traced anything, by pipeline stage.

    The ranks of a stage run the same layers, so what most of them (more than half) traced, all of
    them should have; what fewer traced is theirs alone, such as an expert's graph. Ranks that
    traced nothing at all count for neither side: they may be another manifest's.
    """

    stages: dict[int, frozenset[int]]
    """Stage to its ranks that traced anything; one stage where the topology does not say more."""
    period: tuple[int, int]
    """Stages, and ranks in each."""

    @classmethod
    def of(cls, manifest: Manifest) -> Coverage:
        """As the manifest's topology and graphs say."""
        period = _period(manifest.config.topology)
        found: dict[int, set[int]] = {}
        for rank in manifest.ranks:
            found.setdefault(_stage(rank, period), set()).add(rank)
        return cls({stage: frozenset(ranks) for stage, ranks in found.items()}, period)

    def stage(self, rank: int) -> int:
        """The pipeline stage that a global rank belongs to."""
        return _stage(rank, self.period)

    def holes(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Of a graph that these ranks traced: those that should have traced it, too, ascending."""
        traced: dict[int, set[int]] = {}
        for rank in ranks:
            traced.setdefault(self.stage(rank), set()).add(rank)
        missing: set[int] = set()
        for stage, some in traced.items():
            everybody = self.stages.get(stage, frozenset())
            if len(some) > 1 and 2 * len(some) > len(everybody):
                missing |= everybody - some
        return tuple(sorted(missing))


def _period(topology: Topology) -> tuple[int, int]:
    # vLLM numbers ranks by data-parallel replica, then stage, then rank within the stage.
    stages = topology.pipeline_parallel_size or 1
    if stages < 2:
        return 1, 1
    world, within = topology.world_size or 0, topology.tensor_parallel_size or 0
    replicas = topology.data_parallel_size or 1
    # Other dimensions than the tensor's may lie within a stage; replicas do not.
    if world and world not in {stages * within, stages * within * replicas} and world % stages == 0:
        return stages, world // stages
    return (stages, within) if within > 0 else (1, 1)


def _stage(rank: int, period: tuple[int, int]) -> int:
    stages, size = period
    return (rank // size) % stages

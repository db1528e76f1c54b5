"""Which keys will miss after an upgrade or a change of flags, before anybody pays for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.manifest.flags import canonical_flags, split_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.manifest.reader import Engine
    from neuron_store.manifest.schema import Graph

__all__ = ["FlagChange", "Plan", "PlannedGraph", "plan_upgrade"]

# Their versions are parts of every key (torch_neuronx, neuronxcc, nki), or of the keys that
# neuron_store computes for its own compilers.
KEY_PACKAGES = frozenset(
    {
        "neuronx-cc",
        "torch-neuronx",
        "nki",
        "libtorch-neuronx-lite",
        "iree-base-compiler",
        "libneuronxla",
    }
)
_ALIASES = {"neuronxcc": "neuronx-cc", "torch-neuronx-lite": "libtorch-neuronx-lite"}
# Their code decides what the graph looks like; whether it really changes shows only in tracing.
GRAPH_PACKAGES = frozenset(
    {"torch", "vllm", "vllm-neuron", "transformers", "jax", "jaxlib", "neuronx-distributed"}
    | {"neuronx-distributed-inference", "torch-xla", "python"}
)


@attrs.frozen
class FlagChange:
    """Options added (or replaced) and removed by name."""

    add: tuple[str, ...] = ()
    """Command-line text each, such as `--auto-cast=none` or `--target trn3`."""
    remove: tuple[str, ...] = ()
    """Names, such as `--verbose`."""

    def apply(self, flags: str) -> dict[str, str]:
        """The canonical flags after the change."""
        changed = canonical_flags(flags)
        for name in self.remove:
            changed.pop(name, None)
        for text in self.add:
            changed.update(canonical_flags(split_flags(text)))
        return changed


@attrs.frozen
class PlannedGraph:
    """What becomes of one key."""

    key: str
    outcome: str
    """`miss`, `may miss` (a change that shows only when the graph is traced again) or `hit`."""
    reasons: tuple[str, ...]
    ranks: tuple[int, ...]
    size: int | None
    """Bytes of the executable that would be compiled anew."""


@attrs.frozen
class Plan:
    """What an upgrade costs."""

    graphs: tuple[PlannedGraph, ...]

    def of(self, outcome: str) -> tuple[PlannedGraph, ...]:
        """Those with that outcome."""
        return tuple(graph for graph in self.graphs if graph.outcome == outcome)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "miss": len(self.of("miss")),
            "may_miss": len(self.of("may miss")),
            "hit": len(self.of("hit")),
            "bytes_to_compile": sum(graph.size or 0 for graph in self.of("miss")),
            "graphs": [attrs.asdict(graph) for graph in self.graphs],
        }


def plan_upgrade(
    engines: Sequence[Engine],
    *,
    upgrades: Mapping[str, str] | None = None,
    flags: FlagChange | None = None,
) -> Plan:
    """Tell for every graph of the manifests whether its key survives the change.

    A key holds the exact versions of the compiler and of the Neuron framework, and the compiler's
    flags in canonical form (order does not matter, and of repeats the last counts).

    Args:
        engines: the deployment as it is.
        upgrades: package name to the version that will be installed.
        flags: the change of compiler flags, if any.
    """
    wanted = {_package(name): version for name, version in (upgrades or {}).items()}
    planned: dict[str, PlannedGraph] = {}
    for engine in engines:
        certain, possible = _versions(engine, wanted)
        for graph in engine.manifest.graphs:
            sure = [*certain, *(_flag_reasons(graph, flags) if flags else [])]
            outcome = "miss" if sure else ("may miss" if possible else "hit")
            known = planned.get(graph.graph_hash)
            if known is None:
                planned[graph.graph_hash] = PlannedGraph(
                    graph.graph_hash,
                    outcome,
                    tuple(sure or possible),
                    graph.ranks,
                    graph.neff_size,
                )
            else:
                worse = min(known.outcome, outcome, key=("miss", "may miss", "hit").index)
                planned[graph.graph_hash] = attrs.evolve(
                    known,
                    outcome=worse,
                    reasons=tuple(dict.fromkeys([*known.reasons, *(sure or possible)])),
                    ranks=tuple(sorted({*known.ranks, *graph.ranks})),
                    size=known.size if known.size is not None else graph.neff_size,
                )
    return Plan(tuple(planned.values()))


def _package(name: str) -> str:
    plain = re.sub(r"[-_.]+", "-", name.strip()).lower()
    return _ALIASES.get(plain, plain)


def _versions(engine: Engine, wanted: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Reasons why keys certainly and why they possibly miss."""
    installed = {_package(n): v for n, v in engine.manifest.environment.items()}
    certain, possible = [], []
    for name, version in wanted.items():
        now = installed.get(name)
        if now == version:
            continue
        reason = f"{name} {now or '(version not recorded)'} -> {version}"
        if name in KEY_PACKAGES:
            certain.append(f"{reason}: the version is part of the key")
        elif name in GRAPH_PACKAGES:
            possible.append(f"{reason}: the traced graph may change")
        else:
            possible.append(f"{reason}: not part of the key, but it may change the graph")
    return certain, possible


def _flag_reasons(graph: Graph, flags: FlagChange) -> list[str]:
    before, after = canonical_flags(graph.compiler_flags), flags.apply(graph.compiler_flags)
    return [
        f"flag {name}: {before.get(name, '(none)')} -> {after.get(name, '(none)')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]

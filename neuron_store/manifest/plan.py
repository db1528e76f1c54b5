"""Which keys will miss after an upgrade or a change of flags, before anybody pays for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.compiler_flags import parse_flags, recorded_flags, settled_flags

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    """Names, such as `--verbose`; with a value (`-O1`) only where it has that value."""

    def apply(self, flags: Sequence[str]) -> list[str]:
        """The flags after the change; raises ConfigError where the change is no flags."""
        kept = parse_flags(flags)
        for text in self.remove:
            for gone in parse_flags(text):
                kept = [
                    flag
                    for flag in kept
                    if flag.name != gone.name or gone.value not in {None, flag.value}
                ]
        tokens = [token for flag in kept for token in flag.tokens]
        return [*tokens, *(token for text in self.add for token in _tokens(text))]


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
    notes: tuple[str, ...] = ()
    """What was asked and concerns nothing here, in words: a package or flag that none has."""

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
            "notes": list(self.notes),
        }


def plan_upgrade(
    engines: Sequence[Engine],
    *,
    upgrades: Mapping[str, str] | None = None,
    flags: FlagChange | None = None,
) -> Plan:
    """Tell for every graph of the manifests whether its key survives the change.

    A key holds the exact versions of the compiler and of the Neuron framework, and the compiler's
    flags in canonical form (order does not matter, and of repeats the last counts). The Neuron
    stack's own keys tell `-O1` from `--optlevel=1`, ours do not: such a change may miss.

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
            changed, respelled = _flag_reasons(graph, flags) if flags else ([], [])
            sure, maybe = [*certain, *changed], [*possible, *respelled]
            outcome = "miss" if sure else ("may miss" if maybe else "hit")
            known = planned.get(graph.graph_hash)
            if known is None:
                planned[graph.graph_hash] = PlannedGraph(
                    graph.graph_hash,
                    outcome,
                    tuple(sure or maybe),
                    graph.ranks,
                    graph.neff_size,
                )
            else:
                worse = min(known.outcome, outcome, key=("miss", "may miss", "hit").index)
                planned[graph.graph_hash] = attrs.evolve(
                    known,
                    outcome=worse,
                    reasons=tuple(dict.fromkeys([*known.reasons, *(sure or maybe)])),
                    ranks=tuple(sorted({*known.ranks, *graph.ranks})),
                    size=known.size if known.size is not None else graph.neff_size,
                )
    return Plan(tuple(planned.values()), tuple(_notes(engines, wanted, flags)))


def _notes(
    engines: Sequence[Engine], wanted: Mapping[str, str], flags: FlagChange | None
) -> Iterator[str]:
    installed = {_package(name) for e in engines for name in e.manifest.environment}
    for name in wanted:
        if name not in installed:
            yield f"no manifest lists a package {name}: is it spelt right?"
    lines = {graph.compiler_flags for e in engines for graph in e.manifest.graphs}
    present = [flag for line in lines for flag in parse_flags(recorded_flags(line))]
    for text in flags.remove if flags else ():
        for gone in parse_flags(text):
            if not any(f.name == gone.name and gone.value in {None, f.value} for f in present):
                yield f"no graph was compiled with {' '.join(gone.tokens)}: nothing to remove"


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


def _tokens(text: str) -> list[str]:
    return [token for flag in parse_flags(text) for token in flag.tokens]


def _flag_reasons(graph: Graph, flags: FlagChange) -> tuple[list[str], list[str]]:
    """Reasons why the key certainly and why it possibly misses."""
    before = recorded_flags(graph.compiler_flags)
    after = flags.apply(before)
    old, new = settled_flags(before), settled_flags(after)
    certain = [
        f"flag {old.get(name, '(none)')} -> {new.get(name, '(none)')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if certain or _spelled(before) == _spelled(after):
        return certain, []
    left_out = "flags differ only in what our keys leave out (spelling, logs, paths)"
    return [], [f"{left_out}: the Neuron stack's own key sees it"]


def _spelled(flags: Sequence[str]) -> dict[str, str | None]:
    """What libtorch_neuronx_lite's key holds: `--k v` is `--k=v` there, `-O1` no `--optlevel=1`."""
    return {flag.tokens[0].partition("=")[0]: flag.value for flag in parse_flags(flags)}

"""One manifest of a whole deployment, from those of its engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.manifest.diff import flatten
from neuron_store.manifest.schema import MANIFEST_VERSION, Config, Graph, Manifest, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.manifest.reader import Engine

__all__ = ["merge_engines"]


def merge_engines(engines: Sequence[Engine]) -> Manifest:
    """A manifest of the engines' latest version that lists each graph once.

    A graph's `ranks` are the union over the engines; the additional field `engines` of each graph
    says which engine traced it on which ranks. `config` and `environment` are the first engine's;
    where others differ stands in the additional top-level field `engines`. Top-level fields of a
    later minor version are kept, the first engine's where several have one. Every command that
    takes a manifest takes the result, too.
    """
    graphs: dict[str, Graph] = {}
    traced: dict[str, dict[str, list[int]]] = {}
    for engine in engines:
        for graph in engine.manifest.graphs:
            known = graphs.get(graph.graph_hash)
            graphs[graph.graph_hash] = graph if known is None else _joined(known, graph)
            by_engine = traced.setdefault(graph.graph_hash, {})
            # What was merged before names its engines already.
            inner = graph.extra.get("engines")
            if isinstance(inner, dict):
                by_engine.update({f"{engine.name}/{name}": ranks for name, ranks in inner.items()})
            else:
                by_engine[engine.name] = list(graph.ranks)
    first = engines[0].manifest if engines else Manifest()
    later = {name: value for e in reversed(engines) for name, value in e.manifest.extra.items()}
    versions = [engine.manifest.manifest_version for engine in engines]
    return Manifest(
        manifest_version=max(versions, key=_minor, default=MANIFEST_VERSION),
        config=first.config if engines else Config(),
        environment=first.environment,
        graphs=tuple(
            attrs.evolve(graph, extra={**graph.extra, "engines": traced[key]})
            for key, graph in graphs.items()
        ),
        extra={**later, "engines": {e.name: _summary(e, first) for e in engines}},
    )


def _minor(version: str) -> int:
    return int(version.partition(".")[2] or 0)


def _joined(known: Graph, other: Graph) -> Graph:
    """The one that the store could describe, with both's ranks."""
    base = known if known.neff_size is not None else other
    return attrs.evolve(base, ranks=tuple(sorted({*known.ranks, *other.ranks})))


def _summary(engine: Engine, first: Manifest) -> dict[str, Any]:
    manifest = engine.manifest
    # What was merged before has a summary of its own, which says nothing of this merge.
    mine, theirs = (
        {name: value for name, value in m.extra.items() if name != "engines"}
        for m in (first, manifest)
    )
    other = _different(mine, theirs)
    return {
        "graphs": len(manifest.graphs),
        "ranks": list(manifest.ranks),
        "config_differences": _different(to_json(first.config), to_json(manifest.config)),
        "environment_differences": _different(first.environment, manifest.environment),
        **({"other_differences": other} if other else {}),
    }


def _different(first: Any, other: Any) -> dict[str, Any]:
    a, b = dict(flatten(first)), dict(flatten(other))
    # What only the first has is told as null.
    return {path: b.get(path) for path in sorted({*a, *b}) if a.get(path) != b.get(path)}

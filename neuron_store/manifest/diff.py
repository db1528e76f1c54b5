"""What differs between two manifests."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.manifest.schema import Graph, Manifest, to_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["ManifestDiff", "diff_manifests", "flatten"]

_QUOTED = re.compile(r'[."]')

Change = tuple[Any, Any]
"""The value in the first manifest and in the second; `ABSENT` where there is none."""


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@attrs.frozen
class ManifestDiff:
    """From the first manifest to the second."""

    added: tuple[Graph, ...]
    gone: tuple[Graph, ...]
    changed: Mapping[str, Mapping[str, Change]]
    """Graph hash to the fields that differ."""
    config: Mapping[str, Change]
    """Dotted path to the values; `topology.world_size`, `vllm_config.model_config.seed`."""
    environment: Mapping[str, Change]
    other: Mapping[str, Change] = attrs.field(factory=dict)
    """The manifest's version, and top-level fields of a later one."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        parts = (self.added, self.gone, self.changed, self.config, self.environment, self.other)
        return not any(parts)

    def plain(self) -> dict[str, Any]:
        """As JSON values; what is absent on one side is left out of its pair."""

        def pair(change: Change) -> dict[str, Any]:
            sides = zip(("before", "after"), change, strict=True)
            return {side: to_json(value) for side, value in sides if value is not ABSENT}

        return {
            "same": self.same,
            "added": [to_json(graph) for graph in self.added],
            "gone": [to_json(graph) for graph in self.gone],
            "changed": {
                key: {field: pair(change) for field, change in fields.items()}
                for key, fields in self.changed.items()
            },
            "config": {path: pair(change) for path, change in self.config.items()},
            "environment": {name: pair(change) for name, change in self.environment.items()},
            "other": {path: pair(change) for path, change in self.other.items()},
        }


def diff_manifests(
    before: Manifest, after: Manifest, *, ignore: Collection[str] = ()
) -> ManifestDiff:
    """Compare two manifests.

    Args:
        before: the first.
        after: the second.
        ignore: fields of a graph not to be compared, such as `created_timestamp`, which is another
            one wherever a graph was compiled anew.
    """
    old = {graph.graph_hash: graph for graph in before.graphs}
    new = {graph.graph_hash: graph for graph in after.graphs}
    changed: dict[str, dict[str, Change]] = {}
    for key, graph in old.items():
        if key in new and graph != new[key]:
            a, b = to_json(graph), to_json(new[key])
            fields = _changes(a, b)
            fields = {name: fields[name] for name in fields if name not in ignore}
            if fields:
                changed[key] = fields
    return ManifestDiff(
        added=tuple(graph for key, graph in new.items() if key not in old),
        gone=tuple(graph for key, graph in old.items() if key not in new),
        changed=changed,
        config=_sorted(_changes(_flat(to_json(before.config)), _flat(to_json(after.config)))),
        environment=_sorted(_changes(before.environment, after.environment)),
        other=_sorted(_changes(_other(before), _other(after))),
    )


def _other(manifest: Manifest) -> dict[str, Any]:
    return {"manifest_version": manifest.manifest_version, **_flat(manifest.extra)}


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flatten(value))


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Change]:
    sides = {name: (a.get(name, ABSENT), b.get(name, ABSENT)) for name in [*a, *b]}
    return {name: change for name, change in sides.items() if not _equal(*change)}


def _sorted(changes: Mapping[str, Change]) -> dict[str, Change]:
    return dict(sorted(changes.items()))


def _equal(a: Any, b: Any) -> bool:
    """As JSON has it: Python takes true for 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf; lists are leaves, and so are empty objects.

    A name that has a dot in it, or is empty, stands in quotes, so that no two paths are one.
    """
    if isinstance(value, dict) and value:
        for name, item in value.items():
            step = name if name and not _QUOTED.search(name) else json.dumps(name)
            yield from flatten(item, f"{prefix}.{step}" if prefix else step)
    elif prefix:
        yield prefix, value

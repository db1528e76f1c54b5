"""What differs between two manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.manifest.schema import Graph, Manifest, to_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["ManifestDiff", "diff_manifests", "flatten"]

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

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.gone or self.changed or self.config or self.environment)

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
            fields = {
                name: (a.get(name, ABSENT), b.get(name, ABSENT))
                for name in dict.fromkeys([*a, *b])
                if name not in ignore and a.get(name, ABSENT) != b.get(name, ABSENT)
            }
            if fields:
                changed[key] = fields
    return ManifestDiff(
        added=tuple(graph for key, graph in new.items() if key not in old),
        gone=tuple(graph for key, graph in old.items() if key not in new),
        changed=changed,
        config=_differences(to_json(before.config), to_json(after.config)),
        environment=_differences(before.environment, after.environment),
    )


def _differences(before: Any, after: Any) -> dict[str, Change]:
    a, b = dict(flatten(before)), dict(flatten(after))
    return {
        path: (a.get(path, ABSENT), b.get(path, ABSENT))
        for path in sorted({*a, *b})
        if a.get(path, ABSENT) != b.get(path, ABSENT)
    }


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf; lists are leaves, and so are empty objects."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flatten(item, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, value

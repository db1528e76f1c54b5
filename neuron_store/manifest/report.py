"""One HTML page that shows manifests: self-contained, and safe to open whatever they hold.

Text from a manifest is never markup: it stands in a JSON block in which `<`, `>` and `&` are
escaped, and the page's script only makes text nodes of it. A Content-Security-Policy allows this
one script and this one style by their hashes and nothing else, so that no request leaves the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from neuron_store.byte_sizes import human_bytes
from neuron_store.counting import counted
from neuron_store.manifest.coverage import Coverage
from neuron_store.manifest.diff import ABSENT, diff_manifests, flatten
from neuron_store.manifest.schema import to_json
from neuron_store.manifest.shapes import shapes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from neuron_store.manifest.reader import Engine
    from neuron_store.manifest.schema import Graph

__all__ = ["render_report"]

MAX_SHAPE_NUMBERS = 800_000
"""Shapes told in all; longer lists are cut evenly, so that ten thousand graphs stay below 10 MB."""
MAX_VALUE = 2000
"""Characters of one configuration value."""
MAX_DIFFERENCES = 20_000
MAX_UNSEEN = 4096
"""Ranks that traced nothing and are drawn, of each engine; how many more there are is said."""
_PLACEHOLDER = re.compile(r"\{\{([a-z_]+)\}\}")


def render_report(engines: Sequence[Engine], *, title: str = "", footer: str = "") -> str:
    """The page as text.

    Args:
        engines: one manifest or more; with exactly two their differences are shown side by side.
        title: of the page; None: the first model's name.
        footer: a line at its end, such as when and from what it was made.
    """
    model = next((e.manifest.config.model for e in engines if e.manifest.config.model), None)
    data = _Encoder(engines).data()
    assets = resources.files("neuron_store.manifest")
    style = assets.joinpath("report.css").read_text(encoding="utf-8")
    script = assets.joinpath("report.js").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(title or f"Compiled graphs{f' of {model}' if model else ''}"),
        "lead": html.escape(_lead(engines)),
        "totals": _totals(engines, data),
        "footer": html.escape(footer or "Made by neuron-store manifest report."),
        "style": style,
        "script": script,
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "data": _json_in_html(data),
    }
    page = resources.files("neuron_store.manifest").joinpath("report.html")
    # One pass, so that a placeholder in a manifest's text stays text.
    return _PLACEHOLDER.sub(lambda m: parts[m[1]], page.read_text(encoding="utf-8"))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json_in_html(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _lead(engines: Sequence[Engine]) -> str:
    configs = [engine.manifest.config for engine in engines]
    facts: list[Iterable[Any]] = [
        (engine.name for engine in engines[:8]),
        (config.target for config in configs),
        (config.dtype for config in configs),
        (f"max_model_len {c.max_model_len}" for c in configs if c.max_model_len),
        (f"max_num_seqs {c.max_num_seqs}" for c in configs if c.max_num_seqs),
    ]
    said = [", ".join(dict.fromkeys(str(v) for v in values if v)) for values in facts]
    return " · ".join(text for text in said if text)


def _totals(engines: Sequence[Engine], data: dict[str, Any]) -> str:
    # Two are compared: their sum would be of no deployment.
    groups = [[engine] for engine in engines] if len(engines) == 2 else [engines]
    sides = [_Side(group) for group in groups]
    flags = counted(len(data["flags"]), "set") + " of flags"
    seen = [sum(e["seen"] for e in data["engines"][at :: len(groups)]) for at in range(len(groups))]
    whole = [
        sum(e["seen"] + e["unseen"] for e in data["engines"][at :: len(groups)])
        for at in range(len(groups))
    ]
    lost = [side.lost for side in sides]
    rows = [
        ("Graphs", [f"{side.count:,}" for side in sides], flags, False),
        (
            "Executables",
            [human_bytes(sum(side.sizes)) for side in sides],
            _largest([size for side in sides for size in side.sizes]),
            False,
        ),
        (
            "Ranks that traced",
            [f"{a:,} of {b:,}" for a, b in zip(seen, whole, strict=True)],
            "",
            seen != whole,
        ),
        (
            "Without executable",
            [f"{number:,}" for number in lost],
            "gone from the store" if any(lost) else "",
            any(lost),
        ),
    ]
    if len(engines) > 2:
        rows.insert(0, ("Manifests", [f"{len(engines):,}"], "", False))
    if any(side.times for side in sides):
        last = max(side.times[-1] for side in sides if side.times)
        first = [side.times[0] if side.times else "unknown" for side in sides]
        rows.append(("Compiled (UTC)", first, f"to {last}", False))
    names = [engine.name for engine in engines] if len(groups) == 2 else [""]
    return "".join(
        f"<div{' class=alarm' if alarm else ''}><dt>{html.escape(title)}</dt>"
        + ("<dd class=pair>" if len(names) == 2 else "<dd>")
        + "".join(_valued(name, value) for name, value in zip(names, values, strict=True))
        + (f"<small>{html.escape(more)}</small>" if more else "")
        + "</dd></div>"
        for title, values, more, alarm in rows
    )


def _valued(name: str, value: str) -> str:
    if not name:
        return html.escape(value)
    return f"<span><small>{html.escape(name[:60])}</small>{html.escape(value)}</span>"


class _Side:
    """What the totals tell of some manifests together."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        graphs = {g.graph_hash: g for e in engines for g in e.manifest.graphs}
        self.count = len(graphs)
        self.sizes = [g.neff_size for g in graphs.values() if g.neff_size is not None]
        self.lost = self.count - len(self.sizes)
        self.times = sorted(
            g.created_timestamp[:16].replace("T", " ")
            for g in graphs.values()
            if g.created_timestamp
        )


def _largest(sizes: list[int]) -> str:
    return f"largest {human_bytes(max(sizes))}" if sizes else ""


class _Table:
    """Values by number, so that what repeats is written once."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list[Any]:
        return list(self.numbers)


class _Encoder:
    """Manifests as the page's compact data."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.strings, self.lists, self.flags, self.placements = (_Table() for _ in range(4))
        total = sum(
            len(graph.input_shapes) + len(graph.output_shapes or ())
            for engine in engines
            for graph in engine.manifest.graphs
        )
        count = 2 * sum(len(engine.manifest.graphs) for engine in engines)
        self.limit = 1 << 30 if total <= MAX_SHAPE_NUMBERS else max(4, MAX_SHAPE_NUMBERS // count)

    def data(self) -> dict[str, Any]:
        graphs: dict[str, Graph] = {}
        places: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for at, engine in enumerate(self.engines):
            for graph in engine.manifest.graphs:
                known = graphs.get(graph.graph_hash)
                if known is None or known.neff_size is None:
                    graphs[graph.graph_hash] = graph
                places.setdefault(graph.graph_hash, []).append((at, graph.ranks))
        rows = [self._graph(graph, places[key]) for key, graph in graphs.items()]
        columns, unseen, told = self._columns()
        covered = [Coverage.of(engine.manifest) for engine in self.engines]
        return {
            "engines": [
                {**self._engine(engine), **told[at], "stages": covered[at].period[0]}
                for at, engine in enumerate(self.engines)
            ],
            "graphs": rows,
            "strings": self.strings.values(),
            "lists": self.lists.values(),
            "flags": self.flags.values(),
            "placements": self.placements.values(),
            "holes": [
                [[at, found] for at, ranks in placed if (found := covered[at].holes(ranks))]
                for placed in self.placements.values()
            ],
            "columns": columns,
            "unseen": unseen,
            "config": self._config(),
            "diff": self._diff() if len(self.engines) == 2 else None,
        }

    def _graph(self, graph: Graph, placed: list[tuple[int, tuple[int, ...]]]) -> list[Any]:
        return [
            graph.graph_hash,
            graph.neff_size,
            graph.created_timestamp,
            self._shapes(graph.input_shapes),
            None if graph.output_shapes is None else self._shapes(graph.output_shapes),
            self.flags.number(graph.compiler_flags),
            self.placements.number(tuple(placed)),
            graph.neff_path,
        ]

    def _shapes(self, shapes: tuple[str, ...]) -> int:
        shown = tuple(self.strings.number(shape[:200]) for shape in shapes[: self.limit])
        return self.lists.number((shown, len(shapes) - len(shown)))

    @staticmethod
    def _engine(engine: Engine) -> dict[str, Any]:
        manifest = engine.manifest
        return {
            "name": engine.name,
            "model": manifest.config.model,
            "target": manifest.config.target,
            "world": manifest.config.topology.world_size,
            "graphs": len(manifest.graphs),
            "ranks": list(manifest.ranks),
            "bytes": sum(graph.neff_size or 0 for graph in manifest.graphs),
        }

    def _columns(self) -> tuple[list[tuple[int, int]], list[int], list[dict[str, int]]]:
        """Engine and rank of each column; those of ranks that traced nothing; counts by engine."""
        seen = [set(engine.manifest.ranks) for engine in self.engines]
        anywhere = set().union(*seen) if seen else set()
        columns: list[tuple[int, int]] = []
        unseen: list[int] = []
        counts = []
        for at, engine in enumerate(self.engines):
            size = engine.manifest.config.topology.world_size or 0
            # A rank below the world size that only another engine saw is that engine's, unless two
            # are compared.
            others = seen[at] if len(self.engines) == 2 and seen[0] & seen[1] else anywhere
            lost = {r for r in range(min(size, MAX_UNSEEN)) if r not in others}
            for rank in sorted(seen[at] | lost):
                if rank in lost:
                    unseen.append(len(columns))
                columns.append((at, rank))
            number = max(0, size - sum(rank < size for rank in others))
            counts.append({"seen": len(seen[at]), "unseen": number, "undrawn": number - len(lost)})
        return columns, unseen, counts

    def _config(self) -> list[list[Any]]:
        """Setting, the first engine's value, and what others have instead."""
        told = []
        for engine in self.engines:
            manifest = engine.manifest
            values = dict(flatten(to_json(manifest.config)))
            values.update({f"environment.{k}": v for k, v in manifest.environment.items()})
            told.append({path: _shown(value) for path, value in values.items()})
        rows = []
        for path in sorted(set().union(*told)):
            first = told[0].get(path)
            others = [
                [at, values.get(path)]
                for at, values in enumerate(told[1:], 1)
                if values.get(path) != first
            ]
            rows.append([path, first, others])
        return rows

    def _diff(self) -> dict[str, Any]:
        before, after = self.engines
        diff = diff_manifests(before.manifest, after.manifest)
        rows: list[list[str | None]] = []
        rows += [["graph added", g.graph_hash, None, _told(g)] for g in diff.added]
        rows += [["graph gone", g.graph_hash, _told(g), None] for g in diff.gone]
        for key, fields in diff.changed.items():
            rows += [
                ["graph changed", f"{key} {field}", _side(old), _side(new)]
                for field, (old, new) in fields.items()
            ]
        parts = (
            *(("config", diff.config), ("environment", diff.environment)),
            ("manifest", diff.other),
        )
        for what, changes in parts:
            rows += [[what, path, _side(old), _side(new)] for path, (old, new) in changes.items()]
        counts = (
            f"{counted(len(diff.added), 'graph')} added, {len(diff.gone)} gone, "
            f"{len(diff.changed)} changed; {counted(len(diff.config), 'setting')} and "
            f"{counted(len(diff.environment), 'package')} "
            + ("differs." if len(diff.config) + len(diff.environment) == 1 else "differ.")
        )
        return {
            "names": [before.name, after.name],
            "rows": rows[:MAX_DIFFERENCES],
            "counts": counts,
        }


def _told(graph: Graph) -> str:
    inputs, outputs = (
        "unknown" if shapes is None else shapes_text(shapes, limit=6)
        for shapes in (graph.input_shapes, graph.output_shapes)
    )
    many = len(graph.ranks) > 8
    ranks = counted(len(graph.ranks), "rank") if many else f"ranks {list(graph.ranks)}"
    return f"{inputs} → {outputs}, {ranks}"[:MAX_VALUE]


def _side(value: Any) -> str | None:
    return None if value is ABSENT else _shown(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}… ({len(text)} characters)"

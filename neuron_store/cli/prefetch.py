"""`neuron-store prefetch --manifest`, and what `promote --manifest` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from neuron_store.abc import Publication
from neuron_store.cli._printing import bytes_text, given_store, print_json, progress, say
from neuron_store.errors import ConfigError
from neuron_store.manifest.prefetch import prefetch as bring
from neuron_store.manifest.prefetch import promote_manifest
from neuron_store.manifest.reader import graph_ranks, read_engines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.manifest.prefetch import Promotes

__all__ = ["prefetch", "promote_by_manifest"]

_PATH = click.Path(exists=True, path_type=Path)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@click.command()
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    required=True,
    type=_PATH,
    metavar="MANIFEST",
    help="A manifest or a directory of them. May be repeated.",
)
@click.option("--tier", "tiers", multiple=True, metavar="URL", help="Instead of the settings'.")
@click.option("--workers", type=click.IntRange(1, 256), default=16, show_default=True)
@click.option("--budget", metavar="BYTES", help="Fetch no more than this; K, M, G and T are known.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def prefetch(
    ctx: click.Context,
    manifests: tuple[Path, ...],
    *,
    tiers: tuple[str, ...],
    workers: int,
    budget: str | None,
    as_json: bool,
) -> None:
    """Bring all graphs of manifests into the local tier, before a server starts.

    However many ranks of a node call it, each graph is fetched once. Exit status 1 when a graph
    could not be brought.
    """
    limit = None if budget is None else _parse_bytes(budget)
    engines = read_engines(manifests)
    total = len(graph_ranks(engines))
    with (
        given_store(ctx) or _open(ctx, tiers) as store,
        progress("fetching", total, as_json) as step,
    ):
        found = bring(
            store, engines, workers=workers, budget=limit, progress=lambda graph: step(graph.size)
        )
    if as_json:
        print_json(found.plain())
    else:
        for graph in found.graphs:
            if graph.outcome in {"missing", "error", "skipped"}:
                say(f"{graph.outcome} {graph.key}: {graph.detail}")
        say(
            f"{len(found.of('present'))} present, {len(found.of('fetched'))} fetched "
            f"({bytes_text(found.size)} in {found.seconds:.1f} s), "
            f"{len(found.of('missing'))} missing, {len(found.of('error'))} failed, "
            f"{len(found.of('skipped'))} over budget"
        )
    if not found.complete:
        ctx.exit(1)


def promote_by_manifest(
    store: Promotes, manifests: Sequence[Path], *, workers: int = 8, as_json: bool = False
) -> bool:
    """Promote every graph of the manifests and say what became of each.

    Returns:
        Whether every graph reached every tier without a conflict.
    """
    engines = read_engines(manifests)
    total = len(graph_ranks(engines))
    with progress("promoting", total, as_json) as step:
        done = promote_manifest(store, engines, workers=workers, progress=lambda _: step())
    good = all(one.error is None and Publication.CONFLICT not in one.tiers.values() for one in done)
    if as_json:
        print_json(
            {
                "promoted": good,
                "graphs": [
                    {
                        "key": one.key,
                        "tiers": {tier: value.value for tier, value in one.tiers.items()},
                        "error": None if one.error is None else str(one.error),
                    }
                    for one in done
                ],
            }
        )
        return good
    for one in done:
        for tier, value in one.tiers.items():
            say(f"{value.value} {one.key} {tier}")
        if one.error is not None:
            say(f"failed {one.key}: {one.error}")
    say(f"{sum(one.error is None for one in done)} of {len(done)} graphs promoted")
    return good


def _open(ctx: click.Context, tiers: Sequence[str]) -> ArtifactStore:
    session = ctx.find_root().obj
    if not tiers and hasattr(session, "store"):
        # The program's own options before the command, `--local` and `--tier`, say which store.
        opened: ArtifactStore = session.store()
        return opened
    from neuron_store import open_store  # noqa: PLC0415  (reads the settings)

    store: ArtifactStore = open_store(list(tiers)) if tiers else open_store()
    return store


def _parse_bytes(text: str) -> int:
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = plain[-1:] if plain[-1:] in _UNITS else ""
    try:
        size = float(plain.removesuffix(unit)) * _UNITS[unit]
        if not 0 <= size < float(1 << 63):
            raise ValueError(text)  # noqa: TRY301  (one message for all)
    except ValueError:
        raise ConfigError(f"--budget {text!r} is no size; write 2000000000, 500M or 20G") from None
    return int(size)

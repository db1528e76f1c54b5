"""`neuron-store prefetch --manifest`: all graphs of a deployment, before a server starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from neuron_store.cli.exits import NO
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from neuron_store.cli.session import Session

__all__ = ["prefetch"]

_COLUMNS = (Column("key"), Column("outcome", "outcome"), Column("size", "bytes"))


@click.command()
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    required=True,
    type=click.Path(exists=True, allow_dash=True, path_type=Path),
    metavar="PATH",
    help="A manifest, - for the standard input, or a directory of them. Repeatable.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="Fetches at once in each process.",
)
@click.option(
    "--processes",
    metavar="N",
    type=click.IntRange(1, 64),
    help="Processes that share the work; by default as many as there are cores, up to 4.",
)
@click.option("--budget", metavar="BYTES", help="Fetch no more than this, such as 20G or 500M.")
@json_option
@pass_session
@click.pass_context
def prefetch(
    context: click.Context,
    session: Session,
    *,
    manifests: tuple[Path, ...],
    workers: int,
    processes: int | None,
    budget: str | None,
) -> None:
    """Bring all graphs of manifests into the local tier, before a server starts.

    However many ranks of a node call it, each graph is fetched once. Exit status 1 when a graph
    could not be brought.
    """
    from neuron_store.byte_sizes import human_bytes, parse_bytes  # noqa: PLC0415  (takes cattrs)
    from neuron_store.manifest.prefetch import prefetch as bring  # noqa: PLC0415
    from neuron_store.manifest.reader import graph_ranks, read_engines  # noqa: PLC0415

    limit = None if budget is None else parse_bytes(budget, option="--budget")
    out, engines = session.out, read_engines(manifests)
    if not graph_ranks(engines):
        out.say("the manifests list no graph")
    _require_tier(session, graph_ranks(engines))
    with out.progress("fetching", len(graph_ranks(engines))) as bar:
        found = bring(
            session.store(),
            engines,
            workers=workers,
            processes=processes or min(4, len(os.sched_getaffinity(0))),
            budget=limit,
            progress=lambda graph: bar.end(graph.key),
        )
    if out.json:
        out.document(ok=found.complete, **found.plain())
    else:
        out.table(_COLUMNS, [(graph.key, graph.outcome, graph.size) for graph in found.graphs])
    for graph in found.graphs:
        if graph.detail:
            out.say(f"{graph.outcome}: {graph.key}: {graph.detail}")
    told = [f"{len(found.of(outcome))} {outcome}" for outcome in ("present", "fetched", "missing")]
    if waited := found.of("waited"):
        told.insert(2, f"{len(waited)} waited for")
    if refused := len(found.of("refused")):
        told.append(f"{refused} refused")
    told += [f"{len(found.of('error'))} failed", f"{len(found.of('skipped'))} over budget"]
    out.say(f"{', '.join(told)}; {human_bytes(found.size)} in {found.seconds:.1f} s")
    if not found.complete:
        context.exit(NO)


def _require_tier(session: Session, keys: Iterable[str]) -> None:
    """Refuse to look for graphs nowhere."""
    from neuron_store.errors import ConfigError, NeuronStoreError  # noqa: PLC0415

    store = session.store()
    if store.shared:
        return
    for key in keys:
        try:
            here = store.path_of(key) is not None
        except NeuronStoreError:
            here = False
        if not here:
            raise ConfigError(
                f"which tier? there is no shared tier to fetch {key} from; set NEURON_STORE_TIERS, "
                "or give a URL before the command: neuron-store --tier URL prefetch ..."
            )

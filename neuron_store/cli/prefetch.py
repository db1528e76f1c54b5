"""`neuron-store prefetch --manifest`: all graphs of a deployment, before a server starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from neuron_store.cli.exits import NO
from neuron_store.cli.output import Column, Output
from neuron_store.cli.session import json_option, pass_session
from neuron_store.cli.terminating import terminable
from neuron_store.counting import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from neuron_store.cli.session import Session
    from neuron_store.manifest.prefetch import Fetched, Prefetch

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
    with _progress(out, len(graph_ranks(engines))) as ended:
        found = bring(
            session.store(),
            engines,
            workers=workers,
            processes=processes or min(4, len(os.sched_getaffinity(0))),
            budget=limit,
            progress=ended,
        )
    if out.json:
        out.document(ok=found.complete, **found.plain())
    else:
        out.table(_COLUMNS, [(graph.key, graph.outcome, graph.size) for graph in found.graphs])
    for graph in found.graphs:
        if graph.detail and graph.outcome != "skipped":
            out.say(f"{graph.outcome}: {graph.key}: {graph.detail}")
    skipped = found.of("skipped")
    if skipped:
        # The table has the others; of a tight budget they may be thousands.
        more = f", and {counted(len(skipped) - 1, 'more graph')}" if len(skipped) > 1 else ""
        out.say(f"skipped: {skipped[0].key}: {skipped[0].detail}{more}")
    out.say(f"{_told(found)}; {human_bytes(found.size)} in {found.seconds:.1f} s")
    if found.of("missing"):
        _tell_unmounted(session)
    if not found.complete:
        context.exit(NO)


def _tell_unmounted(session: Session) -> None:
    """A share that is not mounted has no graph either, and that is no answer."""
    from neuron_store.errors import TierError  # noqa: PLC0415
    from neuron_store.mounted import require_mounted  # noqa: PLC0415

    for tier in session.store().shared:
        try:
            require_mounted(tier.location)
        except TierError as error:
            session.out.say(f"error: {error}")


@contextlib.contextmanager
def _progress(out: Output, total: int) -> Iterator[Callable[[Fetched], None]]:
    """What to call with each graph; who interrupts the block is told how far it came."""
    here = 0

    def ended(graph: Fetched) -> None:
        nonlocal here
        here += graph.is_here
        bar.end(graph.key)

    try:
        with terminable(), out.progress("fetching", total) as bar:
            yield ended
    except (KeyboardInterrupt, SystemExit):
        out.say(f"interrupted: {here} of {counted(total, 'graph')} are here")
        raise


def _told(found: Prefetch) -> str:
    """How many graphs had which outcome; those that are rare only where there are some."""
    from neuron_store.manifest.prefetch import OUTCOMES  # noqa: PLC0415

    names = {"waited": "waited for", "error": "failed", "skipped": "over budget"}
    rare = {"waited", "corrupt", "refused"}
    counts = {outcome: len(found.of(outcome)) for outcome in OUTCOMES}
    return ", ".join(
        f"{count} {names.get(outcome, outcome)}"
        for outcome, count in counts.items()
        if count or outcome not in rare
    )


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

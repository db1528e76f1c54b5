"""`neuron-store compile`: a graph through the store, compiled only when no tier has it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from neuron_store.cli.session import Session

__all__ = ["compile_"]

_OUTCOMES = {"hits": "hit", "waited": "waited", "fetched": "fetched", "compiled": "compiled"}


@click.command("compile")
@click.argument("graph", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--compiler", default="iree", show_default=True, help="The compiler's name.")
@click.option(
    "--flag",
    "flags",
    metavar="FLAG",
    multiple=True,
    help="A flag for the compiler, such as --flag=--optlevel=1. Repeatable, order kept.",
)
@json_option
@pass_session
def compile_(session: Session, graph: Path, compiler: str, flags: tuple[str, ...]) -> None:
    """Get the artifact of GRAPH: from a tier, from whoever compiles it, or compile it here."""
    from neuron_store.coordinator import CompileCoordinator  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.registry import get_compiler  # noqa: PLC0415

    out = session.out
    job = get_compiler(compiler).job(graph, flags=flags)
    coordinator = CompileCoordinator(session.store())
    began = time.perf_counter()
    with out.progress(f"{graph.name}", 1) as begin:
        begin(job.key)
        path = coordinator.get_or_compile(job)
    seconds = time.perf_counter() - began
    counts = coordinator.counts
    outcome = next((word for name, word in _OUTCOMES.items() if counts.get(name)), "hit")
    if out.json:
        out.document(
            "compile",
            ok=True,
            key=job.key,
            outcome=outcome,
            path=str(path),
            seconds=seconds,
            compiler=compiler,
            components=dict(job.components),
        )
        return
    columns = (
        Column("key"),
        Column("outcome", "outcome"),
        Column("time", "seconds"),
        Column("path"),
    )
    out.table(columns, [(job.key, outcome, seconds, str(path))])

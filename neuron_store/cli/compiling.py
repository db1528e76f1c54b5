"""`neuron-store compile`: graphs through the store, compiled only where no tier has them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neuron_store.cli.exits import exit_status
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.cli.output import Output
    from neuron_store.cli.session import Session
    from neuron_store.job import CompileJob
    from neuron_store.precompile import JobOutcome, Precompiled, Progress

__all__ = ["compile_"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_COLUMNS = (
    Column("key"),
    Column("outcome", "outcome"),
    Column("time", "seconds"),
    Column("path"),
)


@click.command("compile")
@click.argument("graph", type=_FILE, required=False)
@click.option("--compiler", help="The compiler's name.  [default: iree]")
@click.option(
    "--flag",
    "flags",
    metavar="FLAG",
    multiple=True,
    help="A flag for the compiler, such as --flag=--optlevel=1. Repeatable, order kept.",
)
@click.option(
    "--jobs",
    metavar="FILE",
    type=_FILE,
    help='Many graphs: a line each, such as {"compiler": "iree", "graph": "prefill.mlir", '
    '"flags": []}; paths are relative to the file.',
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1, 10_000),
    help="Compiles at once, memory permitting.  [default: a setting, at most the cores]",
)
@json_option
@pass_session
@click.pass_context
def compile_(
    context: click.Context,
    session: Session,
    *,
    graph: Path | None,
    compiler: str | None,
    flags: tuple[str, ...],
    jobs: Path | None,
    workers: int | None,
) -> None:
    """Get the artifact of GRAPH, or of many: from a tier, from whoever compiles it, or made here.

    Exit status 1 when a compile failed; one that fails stops no other.
    """
    from neuron_store.precompile import precompile  # noqa: PLC0415  (`--help` needs none)

    if (graph is None) == (jobs is None):
        raise click.UsageError("give either GRAPH or --jobs FILE")
    if jobs is not None and (compiler is not None or flags):
        raise click.UsageError("--compiler and --flag are for GRAPH; a jobs file has its own")
    out = session.out
    wanted = _jobs(graph, compiler or "iree", flags, jobs)
    with out.progress("compiling", len(wanted)) as bar:

        def tell(now: Progress) -> None:
            bar.at(now.done, _standing(now), now.eta)
            if jobs is not None and not out.interactive and now.last is not None:
                out.say(f"{now.done}/{now.total} {now.last.key} {now.last.outcome}")

        done = precompile(wanted, workers=workers, store=session.store(), progress=tell)
    _print(out, done, {job.key: job for job in wanted})
    if jobs is not None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(done.counts.items()))
        out.say(f"{counts}; in {done.seconds:.1f} s, at most {done.workers} at once")
    if done.failed:
        context.exit(max(exit_status(o.error) for o in done.failed if o.error is not None))


def _jobs(
    graph: Path | None, compiler: str, flags: Sequence[str], jobs: Path | None
) -> list[CompileJob]:
    from neuron_store.precompile import read_jobs  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.registry import get_compiler  # noqa: PLC0415

    if jobs is not None:
        return read_jobs(jobs)
    assert graph is not None
    return [get_compiler(compiler).job(graph, flags=flags)]


def _standing(now: Progress) -> str:
    facts = [f"{now.running} running"] if now.running else []
    facts += [f"{now.failed} failed"] if now.failed else []
    return ", ".join(facts)


def _print(out: Output, done: Precompiled, jobs: dict[str, CompileJob]) -> None:
    if out.json:
        out.document(
            ok=not done.failed,
            artifacts=[_plain(each, jobs[each.key]) for each in done.outcomes],
            seconds=done.seconds,
            workers=done.workers,
        )
    else:
        rows = [(d.key, d.outcome, d.seconds, d.path) for d in done.outcomes]
        out.table(_COLUMNS, rows)
    for failed in done.failed:
        out.say(f"error: {failed.error}")


def _plain(each: JobOutcome, job: CompileJob) -> dict[str, Any]:
    return {
        "key": each.key,
        "outcome": each.outcome,
        "seconds": each.seconds,
        "path": str(each.path) if each.path is not None else None,
        "error": str(each.error) if each.error is not None else None,
        "components": dict(job.components),
    }

"""`neuron-store compile`: graphs through the store, compiled only where no tier has them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from neuron_store.cli.exits import exit_status
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.batch import JobOutcome, Precompiled, Progress
    from neuron_store.cli.output import Output
    from neuron_store.cli.session import Session
    from neuron_store.job import CompileJob

__all__ = ["compile_"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_COLUMNS = (
    Column("key"),
    Column("outcome", "outcome"),
    Column("time", "seconds"),
    Column("path"),
)


# `--auto-cast=none -O1`. A value that itself starts as a flag does is one whose flags belong
# together: `--tensorizer-options=--a=1 --b`.
_SEVERAL = re.compile(r"-[^\s=]*(?:\s|=(?!-)\S*\s+-)")


def _one_flag_each(
    context: click.Context, parameter: click.Parameter, flags: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse what the shell cannot have been meant to hand over as one word."""
    for flag in flags:
        wrong = None
        if not flag.strip():
            wrong = "is empty"
        elif _SEVERAL.match(flag):
            wrong = "holds more than one word of a command line; give each word its own --flag"
        else:
            try:
                shlex.split(flag)
            except ValueError as error:
                wrong = f"has a quote that does not close ({error})"
        if wrong is not None:
            raise click.BadParameter(f"{flag!r} {wrong}", context, parameter)
    return flags


@click.command("compile")
@click.argument("graph", type=_FILE, required=False)
@click.option("--compiler", help="The compiler's name.  [default: iree]")
@click.option(
    "--flag",
    "flags",
    metavar="FLAG",
    multiple=True,
    callback=_one_flag_each,
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
@click.option(
    "--executor",
    metavar="NAME",
    help="Hand the jobs to a cluster: ray or dask. Results meet in the shared tiers.",
)
@click.option(
    "--address",
    metavar="ADDRESS",
    help="The cluster's.  [default: RAY_ADDRESS or DASK_SCHEDULER_ADDRESS]",
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
    executor: str | None,
    address: str | None,
) -> None:
    """Get the artifact of GRAPH, or of many: from a tier, from whoever compiles it, or made here.

    Exit status 1 when a compile failed; one that fails stops no other.
    """
    if (graph is None) == (jobs is None):
        raise click.UsageError("give either GRAPH or --jobs FILE")
    if jobs is not None and (compiler is not None or flags):
        raise click.UsageError("--compiler and --flag are for GRAPH; a jobs file has its own")
    if executor is not None and (jobs is None or workers is not None):
        raise click.UsageError("--executor goes with --jobs; its cluster says how many run at once")
    if address is not None and executor is None:
        raise click.UsageError("--address is that of an --executor's cluster")
    out = session.out
    # The graphs travel in the jobs to a cluster, whose hosts may not have the files.
    wanted = _jobs(graph, compiler or "iree", flags, jobs, inline=executor is not None)
    with out.progress("compiling", len(wanted)) as bar:

        def tell(now: Progress) -> None:
            bar.at(now.done, _standing(now), now.eta)
            if jobs is not None and not out.interactive and now.last is not None:
                out.say(f"{now.done}/{now.total} {now.last.key} {now.last.outcome}")

        if executor is not None:
            from neuron_store.executors import precompile_on  # noqa: PLC0415  (rarely needed)

            tiers = session.tier_urls()
            done = precompile_on(executor, wanted, tiers=tiers, address=address, progress=tell)
        else:
            from neuron_store.batch import precompile  # noqa: PLC0415  (`--help` needs none)

            done = precompile(wanted, workers=workers, store=session.store(), progress=tell)
            done = _kept(out, done)
    _print(out, done, {job.key: job for job in wanted}, executor)
    if jobs is not None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(done.counts.items()))
        how = f"on {executor}" if executor is not None else f"at most {done.workers} at once"
        out.say(f"{counts}; in {done.seconds:.1f} s, {how}")
    if done.failed:
        context.exit(max(exit_status(o.error) for o in done.failed if o.error is not None))


def _jobs(
    graph: Path | None, compiler: str, flags: Sequence[str], jobs: Path | None, *, inline: bool
) -> list[CompileJob]:
    from neuron_store.batch import read_jobs  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.registry import get_compiler  # noqa: PLC0415

    if jobs is not None:
        return read_jobs(jobs, inline=inline)
    assert graph is not None
    return [get_compiler(compiler).job(graph, flags=flags)]


def _kept(out: Output, done: Precompiled) -> Precompiled:
    """The summary as it holds when this process has ended."""
    from neuron_store.policy import CompilePolicy  # noqa: PLC0415  (`--help` needs none)

    if not CompilePolicy.load().disabled:
        return done
    out.say(
        "warning: NEURON_LIBTORCH_DISABLE_COMPILE_CACHE switches the cache off: "
        "what was compiled is not kept"
    )
    return attrs.evolve(done, outcomes=tuple(attrs.evolve(o, path=None) for o in done.outcomes))


def _standing(now: Progress) -> str:
    facts = [f"{now.running} running"] if now.running else []
    facts += [f"{now.failed} failed"] if now.failed else []
    return ", ".join(facts)


def _print(
    out: Output, done: Precompiled, jobs: dict[str, CompileJob], executor: str | None
) -> None:
    if out.json:
        out.document(
            ok=not done.failed,
            artifacts=[_plain(each, jobs[each.key]) for each in done.outcomes],
            seconds=done.seconds,
            workers=None if executor is not None else done.workers,
            executor=executor,
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

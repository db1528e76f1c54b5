"""`neuron-store demo`: the whole point, on this machine, in about a minute."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from neuron_store.cli.exits import NO
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session
from neuron_store.cli.terminating import terminable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from neuron_store.cli.output import Output
    from neuron_store.cli.session import Session
    from neuron_store.demo.scenario import Report

__all__ = ["demo"]

# Module to the package that brings it.
_NEEDS = {
    "iree.compiler": "iree-base-compiler",
    "iree.runtime": "iree-base-runtime",
    "numpy": "numpy",
    "botocore": "botocore",
    "moto": "moto",
    "flask": "moto[server]",
}


@click.command()
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Work in this new or empty directory, and leave everything there.",
)
@json_option
@pass_session
@click.pass_context
def demo(context: click.Context, session: Session, keep: Path | None) -> None:
    """Show it all: twelve ranks on three nodes, two graphs, two compiles.

    Node A compiles and promotes to an S3 server and to a directory; node B fetches and runs; the S3
    server is stopped, and node C still comes up. Real compiles, processes and results; settings of
    the environment are ignored. Exit status 1 when anything is not as it should be.
    """
    from neuron_store.demo.scenario import STEPS, play  # noqa: PLC0415  (`--help` needs none)

    if session.local is not None or session.tiers:
        raise click.UsageError("demo makes its own tiers; leave --local and --tier out")
    _check_extra()
    out = session.out
    with terminable(), _tree(keep) as tree, out.progress("", STEPS) as bar:

        def tell(step: str) -> None:
            bar.begin(step)
            if not out.interactive:
                out.say(f"{step} ...")

        report = play(tree, tell)
    _print(out, report, keep)
    if not report.ok:
        context.exit(NO)


def _check_extra() -> None:
    from importlib.util import find_spec  # noqa: PLC0415  (`--help` needs none)

    from neuron_store.errors import MissingExtra  # noqa: PLC0415

    for module, package in _NEEDS.items():
        try:
            found = find_spec(module)
        except ImportError:
            found = None
        if found is None:
            raise MissingExtra("neuron-store demo", "demo", package)


@contextlib.contextmanager
def _tree(keep: Path | None) -> Iterator[Path]:
    from neuron_store.errors import ConfigError  # noqa: PLC0415  (`--help` needs none)

    if keep is None:
        tree = Path(tempfile.mkdtemp(prefix="neuron-store-demo-"))
        try:
            yield tree
        finally:
            shutil.rmtree(tree, ignore_errors=True)
        return
    tree = keep.expanduser().absolute()
    try:
        tree.mkdir(parents=True, exist_ok=True)
        if any(tree.iterdir()):
            raise ConfigError(f"--keep {tree} is not empty; name a new directory")
    except OSError as error:
        raise ConfigError(
            f"--keep {tree}: {error.strerror}; name a directory that you can write to"
        ) from error
    yield tree


def _print(out: Output, report: Report, keep: Path | None) -> None:
    if out.json:
        out.document(
            ok=report.ok,
            seconds=report.seconds,
            steps=[attrs.asdict(step) for step in report.steps],
            claims=[attrs.asdict(claim) for claim in report.claims],
            tree=str(keep.expanduser().absolute()) if keep is not None else None,
        )
        return
    columns = (
        Column("step"),
        Column("compiled", "count"),
        Column("waited", "count"),
        Column("hits", "count"),
        Column("fetched", "count"),
        Column("bytes", "bytes"),
        Column("time", "seconds"),
        Column("detail"),
    )
    out.table(columns, [attrs.astuple(step) for step in report.steps], aligned=True)
    out.write("\n")
    out.table(
        (Column("outcome", "outcome"), Column("claim"), Column("detail")),
        [("ok" if c.holds else "FAILED", c.text, c.detail) for c in report.claims],
        aligned=True,
    )
    verdict = "all as it should be" if report.ok else "NOT as it should be"
    out.write(f"\n{verdict}, in {report.seconds:.1f} s\n")
    if keep is not None:
        out.say(f"left in {keep}: each node's tier, the shared directory, logs")

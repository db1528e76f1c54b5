"""`neuron-store manifest ...`: show, compare, merge, check and report what engines compiled."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from neuron_store.cli._printing import (
    bytes_text,
    given_store,
    print_json,
    print_table,
    progress,
    ranks_text,
    say,
    shapes_text,
)
from neuron_store.errors import ConfigError, ManifestError
from neuron_store.manifest.diff import diff_manifests
from neuron_store.manifest.emitter import write_manifest
from neuron_store.manifest.merge import merge_engines
from neuron_store.manifest.plan import FlagChange, plan_upgrade
from neuron_store.manifest.reader import Engine, graph_ranks, read_engines, read_manifest
from neuron_store.manifest.ready import check_ready
from neuron_store.manifest.report import render_report
from neuron_store.manifest.schema import Graph, dump_manifest, to_json
from neuron_store.registry import open_tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from neuron_store.manifest.diff import ManifestDiff
    from neuron_store.manifest.plan import Plan
    from neuron_store.manifest.ready import Readiness

__all__ = ["manifest"]

_PATH = click.Path(exists=True, path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_MANY = click.argument("manifests", nargs=-1, required=True, type=_PATH, metavar="MANIFEST...")


@click.group()
def manifest() -> None:
    """What engines compiled: show, compare, merge, check and report.

    MANIFEST is a manifest.json, or a directory that is searched for them, such as the one that
    VLLM_NEURON_MANIFEST_DIR named.
    """


@manifest.command()
@_MANY
@_JSON
def show(manifests: tuple[Path, ...], *, as_json: bool) -> None:
    """Print the graphs of manifests."""
    engines = read_engines(manifests)
    if as_json:
        values = [{"engine": e.name, "path": str(e.path), **to_json(e.manifest)} for e in engines]
        print_json(values)
        return
    for engine in engines:
        _show_engine(engine)


def _show_engine(engine: Engine) -> None:
    config = engine.manifest.config
    facts = [config.model, config.target, config.dtype, f"world size {config.topology.world_size}"]
    say(f"{engine.name}: {', '.join(fact for fact in facts if fact)}")
    rows = [
        (
            graph.graph_hash,
            bytes_text(graph.neff_size),
            graph.created_timestamp or "-",
            ranks_text(graph.ranks),
            shapes_text(graph.input_shapes),
            "?" if graph.output_shapes is None else shapes_text(graph.output_shapes),
        )
        for graph in engine.manifest.graphs
    ]
    print_table(("graph", "size", "compiled", "ranks", "inputs", "outputs"), rows, right={1})


@manifest.command()
@click.argument("before", type=_PATH)
@click.argument("after", type=_PATH)
@click.option(
    "--ignore",
    multiple=True,
    metavar="FIELD",
    help="A graph's field not to compare, such as created_timestamp. May be repeated.",
)
@_JSON
@click.pass_context
def diff(
    ctx: click.Context, before: Path, after: Path, *, ignore: tuple[str, ...], as_json: bool
) -> None:
    """Tell what differs between two manifests. Exit status 1 when something does."""
    known = {field.name for field in attrs.fields(Graph)} - {"extra"}
    for field in ignore:
        if field not in known:
            raise ConfigError(f"--ignore {field}: no such field; known: {', '.join(sorted(known))}")
    found = diff_manifests(_single(before), _single(after), ignore=ignore)
    if as_json:
        print_json(found.plain())
    else:
        _show_diff(found)
    if not found.same:
        ctx.exit(1)


def _single(path: Path) -> Any:
    if not path.is_dir():
        return read_manifest(path)
    engines = read_engines([path])
    if len(engines) > 1:
        names = ", ".join(engine.name for engine in engines)
        raise ManifestError(
            f"it holds the manifests of several engines ({names}); name one, or merge them first",
            source=str(path),
        )
    return engines[0].manifest


def _show_diff(found: ManifestDiff) -> None:
    if found.same:
        say("no difference")
        return
    for graph in found.added:
        say(f"+ graph {graph.graph_hash} ranks {ranks_text(graph.ranks)}")
    for graph in found.gone:
        say(f"- graph {graph.graph_hash} ranks {ranks_text(graph.ranks)}")
    for key, fields in found.changed.items():
        for field, (old, new) in fields.items():
            say(f"~ graph {key} {field}: {_value(old)} -> {_value(new)}")
    for what, changes in (("config", found.config), ("environment", found.environment)):
        for path, (old, new) in changes.items():
            say(f"~ {what} {path}: {_value(old)} -> {_value(new)}")


@manifest.command()
@click.argument("directory", type=_PATH)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to a file.")
def merge(directory: Path, *, output: Path | None) -> None:
    """Merge the manifests of all engines below DIRECTORY into one."""
    engines = read_engines([directory])
    merged = merge_engines(engines)
    if output is None:
        sys.stdout.write(dump_manifest(merged).decode())
        return
    with _writing(output):
        write_manifest(merged, output.absolute())
    say(f"{len(engines)} manifests, {len(merged.graphs)} graphs -> {output}")


@manifest.command()
@_MANY
@click.option("--tier", required=True, metavar="URL", help="The tier that nodes will fetch from.")
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks that must have traced.")
@click.option("--no-verify", is_flag=True, help="Only look whether they are there; read no bytes.")
@click.option(
    "--strict", is_flag=True, help="Not ready, too, when ranks traced different numbers of graphs."
)
@click.option("--workers", type=click.IntRange(1, 256), default=8, show_default=True)
@_JSON
@click.pass_context
def ready(
    ctx: click.Context,
    manifests: tuple[Path, ...],
    *,
    tier: str,
    world_size: int | None,
    no_verify: bool,
    strict: bool,
    workers: int,
    as_json: bool,
) -> None:
    """Tell whether every graph of every rank is in a tier and verifies. Exit status 1 when not."""
    engines = read_engines(manifests)
    total = len(graph_ranks(engines))
    with given_store(ctx) or open_tier(tier) as store, progress("checking", total, as_json) as step:
        found = check_ready(
            engines,
            store,
            world_size=world_size,
            verify=not no_verify,
            workers=workers,
            progress=lambda _: step(),
        )
    if as_json:
        print_json(found.plain())
    else:
        _show_readiness(found)
    if not found.ready or (strict and found.partial):
        ctx.exit(1)


def _show_readiness(found: Readiness) -> None:
    for graph in found.missing:
        detail = f" ({graph.detail})" if graph.detail else ""
        say(f"{graph.state} {graph.key} needed by ranks {ranks_text(graph.ranks)}{detail}")
    if found.unseen_ranks:
        say(f"no graph was traced by ranks {ranks_text(found.unseen_ranks)}: a manifest is missing")
    for told in found.partial:
        say(f"note: {told}")
    if not found.graphs:
        say("the manifests list no graph")
    verdict = "ready" if found.ready else "NOT ready"
    count = len(found.graphs) - len(found.missing)
    say(
        f"{verdict}: {count} of {len(found.graphs)} graphs of {found.world_size} ranks "
        f"in {found.location}"
    )


@manifest.command()
@_MANY
@click.option("--upgrade", multiple=True, metavar="PACKAGE=VERSION", help="May be repeated.")
@click.option("--add-flag", multiple=True, metavar="FLAG", help="A compiler option added or set.")
@click.option("--remove-flag", multiple=True, metavar="NAME", help="A compiler option taken out.")
@_JSON
def plan(
    manifests: tuple[Path, ...],
    *,
    upgrade: tuple[str, ...],
    add_flag: tuple[str, ...],
    remove_flag: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tell which keys will miss after a change of compiler, framework or flags."""
    upgrades = {}
    for text in upgrade:
        name, equals, version = (part.strip() for part in text.partition("="))
        if not (name and equals and version):
            raise ConfigError(f"--upgrade {text!r}: write PACKAGE=VERSION, as in neuronx-cc=2.32")
        upgrades[name] = version.lstrip("=")
    if not (upgrades or add_flag or remove_flag):
        raise ConfigError("nothing changes: give --upgrade, --add-flag or --remove-flag")
    change = FlagChange(add_flag, remove_flag) if add_flag or remove_flag else None
    found = plan_upgrade(read_engines(manifests), upgrades=upgrades, flags=change)
    if as_json:
        print_json(found.plain())
    else:
        _show_plan(found)


def _show_plan(found: Plan) -> None:
    rows = [
        (g.outcome, g.key, bytes_text(g.size), ranks_text(g.ranks), "; ".join(g.reasons))
        for g in found.graphs
        if g.outcome != "hit"
    ]
    if rows:
        print_table(("outcome", "graph", "size", "ranks", "because"), rows, right={2})
    miss, may, hit = (len(found.of(outcome)) for outcome in ("miss", "may miss", "hit"))
    cost = sum(graph.size or 0 for graph in found.of("miss"))
    say(f"{miss} keys miss ({bytes_text(cost)} to compile anew), {may} may miss, {hit} stay")


@manifest.command()
@_MANY
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option("--title", default="", help="Of the page; else the model's name.")
def report(manifests: tuple[Path, ...], *, output: Path, title: str) -> None:
    """Write one self-contained HTML page; with two manifests it shows their differences."""
    engines = read_engines(manifests)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = render_report(
        engines,
        title=title,
        footer=f"Made by neuron-store from {len(engines)} manifest(s), {made}.",
    )
    staged = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with _writing(output):
        try:
            staged.write_text(page, encoding="utf-8")
            staged.replace(output)
        finally:
            staged.unlink(missing_ok=True)
    say(f"{output}: {len(page):,} characters")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another") from error


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

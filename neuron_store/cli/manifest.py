"""`neuron-store manifest ...`: show, compare, merge, check and report what engines compiled."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from neuron_store.byte_sizes import human_bytes
from neuron_store.cli.exits import NO
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session
from neuron_store.cli.writing import write_named
from neuron_store.counting import counted, ranks_text
from neuron_store.errors import ConfigError, ManifestError
from neuron_store.manifest.diff import ABSENT, diff_manifests
from neuron_store.manifest.merge import merge_engines
from neuron_store.manifest.plan import FlagChange, plan_upgrade
from neuron_store.manifest.reader import Engine, graph_ranks, read_engines, read_manifest
from neuron_store.manifest.ready import MAX_WORLD_SIZE, check_ready
from neuron_store.manifest.report import render_report
from neuron_store.manifest.schema import Graph, dump_manifest, to_json
from neuron_store.manifest.shapes import shapes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.cli.output import Output
    from neuron_store.cli.session import Session
    from neuron_store.manifest.diff import ManifestDiff
    from neuron_store.manifest.plan import Plan
    from neuron_store.manifest.ready import Readiness

__all__ = ["manifest"]

_PATH = click.Path(exists=True, allow_dash=True, path_type=Path)
_OUTPUT = click.Path(allow_dash=True, path_type=Path)
_MANY = click.argument("manifests", nargs=-1, required=True, type=_PATH, metavar="MANIFEST...")
_GRAPHS = (
    Column("graph"),
    Column("size", "bytes"),
    Column("compiled", "time"),
    Column("ranks"),
    Column("inputs"),
    Column("outputs"),
)
_DIFFERENCES = (
    Column("change"),
    Column("where"),
    Column("name"),
    Column("before"),
    Column("after"),
)
_STATES = (Column("key"), Column("outcome", "outcome"), Column("ranks"), Column("detail"))
_UPGRADE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*={1,3}\s*([A-Za-z0-9][A-Za-z0-9._+!-]*)")
_PLANNED = (
    Column("key"),
    Column("outcome", "outcome"),
    Column("size", "bytes"),
    Column("ranks"),
    Column("because"),
)


@click.group()
def manifest() -> None:
    """What engines compiled: show, compare, merge, check and report.

    MANIFEST is a manifest.json, - for the standard input, or a directory that is searched for
    them, such as the one that VLLM_NEURON_MANIFEST_DIR named. Each command takes --json.
    """


@manifest.command()
@_MANY
@json_option
@pass_session
def show(session: Session, manifests: tuple[Path, ...]) -> None:
    """Print the graphs of manifests."""
    out, engines = session.out, read_engines(manifests)
    if out.json:
        values = [
            {"engine": e.name, "path": str(e.path), "manifest": to_json(e.manifest)}
            for e in engines
        ]
        out.document(ok=True, engines=values)
    elif out.terminal:
        for engine in engines:
            out.table(_GRAPHS, _graph_rows(engine), title=_heading(engine))
    else:
        rows = [(engine.name, *row) for engine in engines for row in _graph_rows(engine)]
        out.table((Column("engine"), *_GRAPHS), rows)
    if not any(engine.manifest.graphs for engine in engines):
        out.say("the manifests list no graph")


def _heading(engine: Engine) -> str:
    config = engine.manifest.config
    facts = [config.model, config.target, config.dtype, f"world size {config.topology.world_size}"]
    return f"{engine.name}: {', '.join(fact for fact in facts if fact)}"


def _graph_rows(engine: Engine) -> list[tuple[Any, ...]]:
    return [
        (
            graph.graph_hash,
            graph.neff_size,
            graph.created_timestamp,
            ranks_text(graph.ranks),
            shapes_text(graph.input_shapes),
            None if graph.output_shapes is None else shapes_text(graph.output_shapes),
        )
        for graph in engine.manifest.graphs
    ]


@manifest.command()
@click.argument("before", type=_PATH)
@click.argument("after", type=_PATH)
@click.option(
    "--ignore",
    multiple=True,
    metavar="FIELD",
    help="A graph's field not to compare, such as created_timestamp. Repeatable.",
)
@json_option
@pass_session
@click.pass_context
def diff(
    context: click.Context, session: Session, before: Path, after: Path, *, ignore: tuple[str, ...]
) -> None:
    """Tell what differs between two manifests. Exit status 1 when something does."""
    known = {field.name for field in attrs.fields(Graph)} - {"extra"}
    for field in ignore:
        if field not in known:
            raise ConfigError(f"--ignore {field}: no such field; known: {', '.join(sorted(known))}")
    found = diff_manifests(_single(before), _single(after), ignore=ignore)
    out = session.out
    if out.json:
        out.document(ok=found.same, **found.plain())
    else:
        out.table(_DIFFERENCES, _difference_rows(found))
    if found.same:
        out.say("no difference")
    else:
        context.exit(NO)


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


def _difference_rows(found: ManifestDiff) -> list[tuple[str | None, ...]]:
    rows: list[tuple[str | None, ...]] = [
        ("added", g.graph_hash, "ranks", None, ranks_text(g.ranks)) for g in found.added
    ]
    rows += [("gone", g.graph_hash, "ranks", ranks_text(g.ranks), None) for g in found.gone]
    parts = [*found.changed.items(), ("config", found.config), ("environment", found.environment)]
    parts.append(("manifest", found.other))
    for where, changes in parts:
        rows += [
            ("changed", where, name, _value(old), _value(new))
            for name, (old, new) in changes.items()
        ]
    return rows


@manifest.command()
@click.argument("directory", type=_PATH)
@click.option("-o", "--output", type=_OUTPUT, help="Write it to a file; -: to the standard output.")
@json_option
@pass_session
def merge(session: Session, directory: Path, *, output: Path | None) -> None:
    """Merge the manifests of all engines below DIRECTORY into one."""
    out, engines = session.out, read_engines([directory])
    merged = merge_engines(engines)
    if output is not None and str(output) == "-":
        output = None
    if output is not None:
        write_named(output, dump_manifest(merged), sources=[e.path for e in engines])
    elif not out.json:
        out.write(dump_manifest(merged).decode())
    if out.json:
        out.document(
            ok=True,
            output=None if output is None else str(output),
            manifests=len(engines),
            graphs=len(merged.graphs),
            manifest=to_json(merged) if output is None else None,
        )
    said = f"{counted(len(engines), 'manifest')}, {counted(len(merged.graphs), 'graph')}"
    out.say(f"{said} -> {output or 'stdout'}")


@manifest.command()
@_MANY
@click.option(
    "--tier",
    metavar="URL",
    help="The tier that nodes will fetch from: a URL, or a shared tier by its name.  "
    "[default: the only shared tier]",
)
@click.option(
    "--world-size",
    type=click.IntRange(1, MAX_WORLD_SIZE),
    help="Ranks that must have traced; more than these must not.",
)
@click.option("--no-verify", is_flag=True, help="Only look whether they are there; read no bytes.")
@click.option(
    "--strict", is_flag=True, help="Not ready, too, when ranks traced different numbers of graphs."
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Look-ups at once.",
)
@json_option
@pass_session
@click.pass_context
def ready(
    context: click.Context,
    session: Session,
    *,
    manifests: tuple[Path, ...],
    tier: str | None,
    world_size: int | None,
    no_verify: bool,
    strict: bool,
    workers: int,
) -> None:
    """Tell whether every graph of every rank is in a tier and verifies. Exit status 1 when not."""
    out, engines = session.out, read_engines(manifests)
    with out.progress("checking", len(graph_ranks(engines))) as bar:
        found = check_ready(
            engines,
            session.settings().trust.reader(session.shared_tier(tier)),
            world_size=world_size,
            verify=not no_verify,
            workers=workers,
            progress=lambda graph: bar.end(graph.key),
        )
    good = found.ready and not (strict and found.partial)
    if out.json:
        out.document(ok=good, **found.plain())
    else:
        rows = [(g.key, g.state, ranks_text(g.ranks), g.detail) for g in found.missing]
        if rows:
            out.table(_STATES, rows)
    _say_readiness(out, found, good=good)
    if not good:
        context.exit(NO)


def _say_readiness(out: Output, found: Readiness, *, good: bool) -> None:
    if found.unseen_ranks:
        out.say(f"no graph was traced by {_ranks(found.unseen_ranks)}: a manifest is missing")
    if found.beyond_ranks:
        out.say(
            f"graphs were traced by {_ranks(found.beyond_ranks)}, beyond the world size of "
            f"{found.world_size}: correct --world-size, or take away the manifests of another "
            "deployment"
        )
    for told in found.partial:
        out.say(f"note: {told}")
    if not found.graphs:
        out.say("the manifests list no graph")
    count = len(found.graphs) - len(found.missing)
    if len(found.graphs) > 1 and all(graph.state == "missing" for graph in found.graphs):
        out.say(f"none of them is there: is {found.location} the right place, and mounted?")
    out.say(
        f"{'ready' if good else 'NOT ready'}: {count} of {counted(len(found.graphs), 'graph')} of "
        f"{counted(found.world_size, 'rank')} in {found.location}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"


@manifest.command()
@_MANY
@click.option("--upgrade", multiple=True, metavar="PACKAGE=VERSION", help="Repeatable.")
@click.option("--add-flag", multiple=True, metavar="FLAG", help="A compiler option added or set.")
@click.option(
    "--remove-flag",
    multiple=True,
    metavar="NAME",
    help="A compiler option taken out; with a value only where it has that value.",
)
@json_option
@pass_session
def plan(
    session: Session,
    manifests: tuple[Path, ...],
    *,
    upgrade: tuple[str, ...],
    add_flag: tuple[str, ...],
    remove_flag: tuple[str, ...],
) -> None:
    """Tell which keys will miss after a change of compiler, framework or flags."""
    upgrades = {}
    for text in upgrade:
        parts = _UPGRADE.fullmatch(text.strip())
        if parts is None:
            raise ConfigError(
                f"--upgrade {text!r}: write PACKAGE=VERSION with the exact version, as in "
                "neuronx-cc=2.32"
            )
        upgrades[parts[1]] = parts[2]
    if not (upgrades or add_flag or remove_flag):
        raise ConfigError("nothing changes: give --upgrade, --add-flag or --remove-flag")
    for option, texts in (("--add-flag", add_flag), ("--remove-flag", remove_flag)):
        if not all(text.strip() for text in texts):
            raise ConfigError(f"{option} is empty; name a flag")
    change = FlagChange(add_flag, remove_flag) if add_flag or remove_flag else None
    out, found = session.out, plan_upgrade(read_engines(manifests), upgrades=upgrades, flags=change)
    if out.json:
        out.document(ok=True, **found.plain())
    else:
        rows = [
            (g.key, g.outcome, g.size, ranks_text(g.ranks), "; ".join(g.reasons))
            for g in found.graphs
            if g.outcome != "hit"
        ]
        if rows:
            out.table(_PLANNED, rows)
    for note in found.notes:
        out.say(f"note: {note}")
    out.say(_cost(found))


def _cost(found: Plan) -> str:
    miss, may, hit = (len(found.of(outcome)) for outcome in ("miss", "may miss", "hit"))
    cost = human_bytes(sum(graph.size or 0 for graph in found.of("miss")))
    misses = f"{counted(miss, 'key')} {'misses' if miss == 1 else 'miss'}"
    return f"{misses} ({cost} to compile anew), {may} may miss, {hit} stay"


@manifest.command()
@_MANY
@click.option(
    "-o", "--output", required=True, type=_OUTPUT, help="The page's file; -: the standard output."
)
@click.option("--title", default="", help="Of the page; else the model's name.")
@json_option
@pass_session
def report(session: Session, manifests: tuple[Path, ...], *, output: Path, title: str) -> None:
    """Write one self-contained HTML page; with two manifests it shows their differences."""
    out, engines = session.out, read_engines(manifests)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = render_report(
        engines,
        title=title,
        footer=f"Made by neuron-store from {counted(len(engines), 'manifest')}, {made}.",
    )
    # A manifest may hold halves of characters.
    data = page.encode("utf-8", "replace")
    if str(output) == "-":
        if out.json:
            raise ConfigError("--json needs the standard output for itself; name a file for -o")
        out.write(data.decode())
        return
    write_named(output, data, sources=[engine.path for engine in engines])
    if out.json:
        out.document(ok=True, output=str(output), manifests=len(engines), bytes=len(data))
    out.say(f"{output}: {human_bytes(len(data))}")


def _value(value: Any) -> str | None:
    if value is ABSENT:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."

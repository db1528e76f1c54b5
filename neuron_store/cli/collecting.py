"""`neuron-store gc`: frees space in the tiers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from neuron_store.cli.exits import NO, YES, exit_status
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.cli.output import Bar
    from neuron_store.cli.session import Session
    from neuron_store.collecting import Collected

__all__ = ["gc"]

_COLUMNS = (
    Column("tier"),
    Column("kind"),
    Column("name"),
    Column("outcome", "outcome"),
    Column("size", "bytes"),
    Column("reason"),
)


@attrs.frozen
class _Done:
    tier: ArtifactStore
    found: Collected | None = None
    error: str = ""
    status: int = YES


@click.command()
@click.option("--older-than", metavar="AGE", help="Artifacts unused for so long go, such as 30d.")
@click.option(
    "--max-size",
    metavar="BYTES",
    help="Least recently used artifacts go until the rest is no more, such as 200GiB.",
)
@click.option(
    "--keep-manifest",
    "manifests",
    metavar="PATH",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Keep the graphs of this manifest, or of all below this directory. Repeatable.",
)
@click.option(
    "--tier",
    "names",
    metavar="NAME",
    multiple=True,
    help="Only this tier, by its name or location, or 'local'. Repeatable.",
)
@click.option(
    "--grace",
    metavar="AGE",
    default="1d",
    show_default=True,
    help="Leftovers that nothing changed for so long are garbage.",
)
@click.option(
    "--min-age",
    metavar="AGE",
    default="1h",
    show_default=True,
    help="Artifacts published or used since then stay whatever else is said.",
)
@click.option("--dry-run", is_flag=True, help="Remove and write nothing; tell what would go.")
@json_option
@pass_session
@click.pass_context
def gc(
    context: click.Context,
    session: Session,
    *,
    older_than: str | None,
    max_size: str | None,
    manifests: tuple[Path, ...],
    names: tuple[str, ...],
    grace: str,
    min_age: str,
    dry_run: bool,
) -> None:
    """Free space: leftovers that no artifact needs and, with a criterion, old artifacts.

    Without --older-than and --max-size no artifact goes. Artifacts of a shared tier go only when
    --tier names it, since this node does not know what other nodes use. Exit status 1 when a tier
    is in trouble, another collector is at work, or more than --max-size had to stay.
    """
    from neuron_store.byte_sizes import human_bytes, parse_bytes  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.durations import parse_duration  # noqa: PLC0415

    limits: dict[str, Any] = {
        "older_than": _parsed(parse_duration, older_than, "--older-than"),
        "max_size": _parsed(parse_bytes, max_size, "--max-size"),
    }
    common = {
        "grace": parse_duration(grace, option="--grace"),
        "min_age": parse_duration(min_age, option="--min-age"),
        "pinned": _pinned(manifests),
        "dry_run": dry_run,
    }
    out, store, done = session.out, session.store(), list[_Done]()
    tiers = list(dict.fromkeys(session.chosen(names)))
    with out.progress("collecting", len(tiers)) as bar:
        uses = _uses(store.local)
        for number, tier in enumerate(tiers):
            spare = tier is not store.local and not names
            if spare and any(limit is not None for limit in limits.values()):
                out.say(f"artifacts in {tier.name} stay: add --tier {tier.name} to collect them")
            chosen = dict.fromkeys(limits) if spare else limits
            result = _collect(tier, (bar, number), named=bool(names), uses=uses, **chosen, **common)
            if result is not None:
                done.append(result)
            elif not names:
                out.say(f"{tier.name} is left alone: it cannot be collected, or is read-only")
    good = all(each.status == YES for each in done)
    freed = sum(each.found.freed for each in done if each.found is not None)
    if out.json:
        out.document(ok=good, dry_run=dry_run, freed=freed, tiers=[_plain(d) for d in done])
    else:
        out.table(_COLUMNS, [row for each in done for row in _rows(each)])
    for each in done:
        _tell(session, each)
    out.say(f"{human_bytes(freed)} {'would be freed' if dry_run else 'freed'}")
    if not good:
        context.exit(max(each.status for each in done))


def _parsed(parse: Any, text: str | None, option: str) -> Any:
    return None if text is None else parse(text, option=option)


def _pinned(manifests: Sequence[Path]) -> frozenset[str]:
    if not manifests:
        return frozenset()
    from neuron_store.manifest.reader import graph_ranks, read_engines  # noqa: PLC0415  (takes cattrs)

    return frozenset(graph_ranks(read_engines(manifests)))


def _uses(local: ArtifactStore) -> Mapping[str, float]:
    """What this node knows of the use of artifacts, wherever they came from."""
    from neuron_store.errors import NeuronStoreError  # noqa: PLC0415  (`--help` needs none)

    try:
        return local.collector().uses()
    except NeuronStoreError:
        return {}


def _collect(tier: ArtifactStore, bar: tuple[Bar, int], *, named: bool, **how: Any) -> _Done | None:
    """None where the tier was not meant in the first place."""
    from neuron_store.collecting import collect  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.errors import (  # noqa: PLC0415
        NeuronStoreError,
        ReadOnlyTier,
        Unsupported,
    )

    def tell(name: str) -> None:
        bar[0].at(bar[1], f"{tier.name}: {name}")

    tell("looking")
    try:
        found = collect(tier, progress=tell, **how)
    except (ReadOnlyTier, Unsupported) as error:
        return _Done(tier, None, str(error), exit_status(error)) if named else None
    except NeuronStoreError as error:
        # The other tiers are collected all the same.
        return _Done(tier, None, str(error), exit_status(error))
    return _Done(tier, found, "", YES if found.complete else NO)


def _rows(each: _Done) -> list[tuple[Any, ...]]:
    if each.found is None:
        return [(each.tier.name, "tier", None, "error", None, each.error)]
    return [
        (each.tier.name, r.kind, r.name, r.outcome, r.size, r.detail or r.reason)
        for r in each.found.removals
    ]


def _tell(session: Session, each: _Done) -> None:
    from neuron_store.byte_sizes import human_bytes  # noqa: PLC0415  (`--help` needs none)

    if each.found is None:
        session.out.say(f"error: {each.error}")
        return
    for removal in each.found.removals:
        if removal.outcome == "error":
            session.out.say(f"error: {each.tier.name}: {removal.name}: {removal.detail}")
    if each.found.over:
        session.out.say(
            f"error: {each.tier.name} holds {human_bytes(each.found.size)}, "
            f"{human_bytes(each.found.over)} more than --max-size: the rest is pinned, or was used "
            "or published too recently (--min-age), or could not be removed"
        )


def _plain(each: _Done) -> dict[str, Any]:
    found = each.found
    return {
        "tier": each.tier.name,
        "location": each.tier.location,
        "error": each.error or None,
        "artifacts": None if found is None else found.artifacts,
        "bytes": None if found is None else found.size,
        "freed": 0 if found is None else found.freed,
        "over": 0 if found is None else found.over,
        "removals": [
            {
                "kind": r.kind,
                "name": r.name,
                "key": r.key,
                "outcome": r.outcome,
                "bytes": r.size,
                "age_seconds": r.age,
                "reason": r.reason,
                "detail": r.detail,
            }
            for r in (() if found is None else found.removals)
        ],
    }

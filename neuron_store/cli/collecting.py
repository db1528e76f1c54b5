"""`neuron-store gc`: frees space in the tiers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from neuron_store.cli.exits import NO, YES, exit_status
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session
from neuron_store.cli.terminating import terminable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.cli.output import Bar
    from neuron_store.cli.session import Session
    from neuron_store.collecting import Collected, Removal

__all__ = ["gc"]

_COLUMNS = (
    Column("tier"),
    Column("kind"),
    Column("name"),
    Column("outcome", "outcome"),
    Column("size", "bytes"),
    Column("reason"),
)


_STOPPED = "stopped before everything was looked at; what went stays gone, the next gc goes on"


@attrs.define
class _Done:
    """What became of one tier."""

    tier: ArtifactStore
    removals: list[Removal] = attrs.field(factory=list)
    found: Collected | None = None
    """None: it was not collected to the end."""
    error: str = ""
    status: int = YES
    unfit: bool = False
    """It has no collection, or is read-only."""

    @property
    def freed(self) -> int:
        from neuron_store.collecting import freed_by  # noqa: PLC0415  (`--help` needs none)

        return freed_by(self.removals)


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
    help="Artifacts published or used since then stay whatever else is said; 1m at least where "
    "the local tier is in use.",
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
    from neuron_store.byte_sizes import parse_bytes  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.durations import parse_duration  # noqa: PLC0415

    limits: dict[str, Any] = {
        "older_than": _parsed(parse_duration, older_than, "--older-than"),
        "max_size": _parsed(parse_bytes, max_size, "--max-size"),
    }
    spared = parse_duration(min_age, option="--min-age")
    common = {
        "grace": parse_duration(grace, option="--grace"),
        "min_age": spared,
        "pinned": _pinned(manifests),
        "dry_run": dry_run,
    }
    out, store, done = session.out, session.store(), list[_Done]()
    tiers = list(dict.fromkeys(session.chosen(names)))
    if store.local in tiers and any(limit is not None for limit in limits.values()):
        _warn_of(spared, session)
    with terminable():
        try:
            with out.progress("collecting", len(tiers)) as bar:
                uses = _uses(store.local)
                for number, tier in enumerate(tiers):
                    spare = tier is not store.local and not names
                    if spare and any(limit is not None for limit in limits.values()):
                        how = f"add --tier {tier.name} to collect them"
                        out.say(f"artifacts in {tier.name} stay: {how}")
                    chosen = dict.fromkeys(limits) if spare else limits
                    bar.at(number, f"{tier.name}: looking")
                    done.append(_Done(tier))
                    _collect(done[-1], (bar, number), uses=uses, **chosen, **common)
                    if done[-1].unfit and not names:
                        done.pop()
                        out.say(
                            f"{tier.name} is left alone: it cannot be collected, or is read-only"
                        )
        except (KeyboardInterrupt, SystemExit):
            if done and done[-1].found is None and not done[-1].error:
                done[-1].error, done[-1].status = f"{done[-1].tier.name}: {_STOPPED}", NO
            _report(session, done, good=False, dry_run=dry_run)
            raise
        good = all(each.status == YES for each in done)
        _report(session, done, good=good, dry_run=dry_run)
    if not good:
        context.exit(max(each.status for each in done))


def _report(session: Session, done: Sequence[_Done], *, good: bool, dry_run: bool) -> None:
    from neuron_store.byte_sizes import human_bytes  # noqa: PLC0415  (`--help` needs none)

    out, freed = session.out, sum(each.freed for each in done)
    if out.json:
        out.document(ok=good, dry_run=dry_run, freed=freed, tiers=[_plain(d) for d in done])
    else:
        out.table(_COLUMNS, [row for each in done for row in _rows(each)])
    for each in done:
        _tell(session, each)
    out.say(f"{human_bytes(freed)} {'would be freed' if dry_run else 'freed'}")


def _warn_of(min_age: float, session: Session) -> None:
    from neuron_store.collector import NOTED_EACH  # noqa: PLC0415  (`--help` needs none)

    if min_age < NOTED_EACH:
        session.out.say(
            "warning: --min-age is below 1m, and a process notes its use of an artifact once a "
            "minute: what one is about to load may go from the local tier; on a node at work give "
            "1m or more"
        )


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


def _collect(done: _Done, bar: tuple[Bar, int], **how: Any) -> None:
    from neuron_store.collecting import collect  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.errors import (  # noqa: PLC0415
        NeuronStoreError,
        ReadOnlyTier,
        Unsupported,
    )

    def tell(name: str) -> None:
        bar[0].at(bar[1], f"{done.tier.name}: {name}")

    try:
        done.found = collect(done.tier, progress=tell, told=done.removals.append, **how)
    except NeuronStoreError as error:
        # The other tiers are collected all the same.
        done.error, done.status = str(error), exit_status(error)
        done.unfit = isinstance(error, ReadOnlyTier | Unsupported)
    else:
        done.status = YES if done.found.complete else NO


def _rows(each: _Done) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [
        (each.tier.name, r.kind, r.name, r.outcome, r.size, r.detail or r.reason)
        for r in each.removals
    ]
    if each.found is None:
        rows.append((each.tier.name, "tier", None, "error", None, each.error))
    return rows


def _tell(session: Session, each: _Done) -> None:
    from neuron_store.byte_sizes import human_bytes  # noqa: PLC0415  (`--help` needs none)

    for removal in each.removals:
        if removal.outcome == "error":
            session.out.say(f"error: {each.tier.name}: {removal.name}: {removal.detail}")
    if each.found is None:
        session.out.say(f"error: {each.error}")
    elif each.found.over:
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
        "freed": each.freed,
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
            for r in each.removals
        ],
    }

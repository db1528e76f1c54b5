"""`neuron-store verify`: reads everything, and repairs what is damaged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from neuron_store.cli.exits import NO
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.cli.output import Output
    from neuron_store.cli.session import Session
    from neuron_store.scrub import Pace, Scrubbed
    from neuron_store.scrub_progress import ScrubProgress

__all__ = ["verify"]

_COLUMNS = (
    Column("tier"),
    Column("key"),
    Column("outcome", "outcome"),
    Column("size", "bytes"),
    Column("detail"),
)
_BAD = frozenset({"corrupt", "error", "refused"})


@click.command()
@click.argument("keys", nargs=-1)
@click.option(
    "--tier",
    "names",
    metavar="NAME",
    multiple=True,
    help="Only this tier, by its name or location (or 'local'). Repeatable.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Set damaged entries aside, and replace them from another tier's whole copy.",
)
@click.option("--rate", metavar="SIZE", help="Read no faster than this, such as 200MiB/s.")
@click.option(
    "--resume",
    metavar="FILE",
    help="Keep the progress in FILE, and go on where a run that left it there stopped.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Keys read at once.",
)
@json_option
@pass_session
@click.pass_context
def verify(
    context: click.Context,
    session: Session,
    *,
    keys: tuple[str, ...],
    names: tuple[str, ...],
    repair: bool,
    rate: str | None,
    resume: str | None,
    workers: int,
) -> None:
    """Read every byte and check every digest; with --repair put damaged entries right.

    Without KEYS: everything in each tier. A key that one tier lacks is no fault as long as another
    has it, unless --tier names the tier. Exit status 1 when anything is damaged, refused or
    missing, and was not repaired.
    """
    from neuron_store.artifact import check_key  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.scrub import Scrub, by_key  # noqa: PLC0415
    from neuron_store.scrub_progress import ScrubProgress  # noqa: PLC0415

    for key in keys:
        check_key(key)
    pace, out, began = _pace(rate), session.out, time.monotonic()
    tiers = session.chosen(names)
    if resume is not None:
        progress = ScrubProgress.resume(resume)
    else:
        progress = ScrubProgress.begin(session.local_root(), repair=repair)
        if repair and progress.path is None:
            out.say(
                "warning: no progress note can be kept in the local tier: an entry whose repair is "
                "cut off now is missing until its key is published again"
            )
    pairs, found = _work(session, tiers, keys, progress)
    scrub = Scrub(session.store(), by_key(pairs), progress=progress, repair=repair, pace=pace)
    _show(out, found)
    try:
        with out.progress("verifying", len(pairs)) as bar:
            for entries in scrub.run(workers):
                found += entries
                _show(out, entries)
                bar.at(len(found) + scrub.resumed, entries[-1].key or "" if entries else "")
    except BaseException:
        progress.close()
        if progress.path is not None:
            out.say(f"stopped; to go on: the same command with --resume {progress.path}")
        raise
    progress.finish()
    missing = _missing(found, progress, named=bool(names))
    good = not missing and not any(seen.outcome in _BAD for seen in found)
    size = sum(seen.artifact.size for seen in found if seen.artifact is not None)
    _report(
        out,
        found,
        missing,
        good=good,
        facts={
            "checked": sum(seen.key is not None for seen in found),
            "resumed": scrub.resumed,
            "repaired": sum(seen.outcome == "repaired" for seen in found),
            "beyond_repair": sum(seen.outcome == "corrupt" for seen in found) if repair else None,
            "bytes": size,
            "seconds": round(time.monotonic() - began, 3),
        },
    )
    if not good:
        context.exit(NO)


def _pace(rate: str | None) -> Pace | None:
    from neuron_store.byte_sizes import parse_bytes  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.errors import ConfigError  # noqa: PLC0415
    from neuron_store.scrub import Pace  # noqa: PLC0415

    if rate is None:
        return None
    size = parse_bytes(rate.strip().removesuffix("/s"), option="--rate")
    if size == 0:
        raise ConfigError("--rate 0 would never end; write 50M or 200MiB/s")
    return Pace(size)


def _work(
    session: Session,
    tiers: Sequence[ArtifactStore],
    keys: Sequence[str],
    progress: ScrubProgress,
) -> tuple[list[tuple[ArtifactStore, str]], list[Scrubbed]]:
    """What to read, and the tiers that could not say what they have."""
    from neuron_store.asking import Trouble, ask  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.mounted import require_mounted  # noqa: PLC0415
    from neuron_store.scrub import Scrubbed  # noqa: PLC0415

    seconds = session.settings().tier_deadline
    pairs: list[tuple[ArtifactStore, str]] = []
    troubled: list[Scrubbed] = []
    local = session.store().local
    for tier in tiers:

        def look(tier: ArtifactStore = tier) -> Collection[str]:
            if tier is not local:
                require_mounted(tier.location)
            return keys or {*tier.keys(), *tier.damaged()}

        listed = ask(tier.location, look, seconds=seconds)
        if isinstance(listed, Trouble):
            troubled.append(Scrubbed(tier.name, tier.location, None, "error", listed.detail))
            continue
        begun = [] if keys else progress.damaged(tier.location)
        wanted = keys or sorted({*listed, *begun})
        pairs += [(tier, key) for key in dict.fromkeys(wanted)]
    return pairs, troubled


def _missing(found: Sequence[Scrubbed], progress: ScrubProgress, *, named: bool) -> list[str]:
    """Keys that a tier lacks and should have: those that no tier has, or all where one is named."""
    whole = {seen.key for seen in found if seen.outcome in {"ok", "repaired"}}
    lacking = dict.fromkeys(seen.key for seen in found if seen.outcome == "missing")
    return [
        key
        for key in lacking
        if key is not None and (named or (key not in whole and not progress.is_done_anywhere(key)))
    ]


def _show(out: Output, entries: Sequence[Scrubbed]) -> None:
    """Piped, each line as it comes; the whole table at the end is for a terminal."""
    if not out.json and not out.terminal and entries:
        _table(out, entries)
    for seen in entries:
        if seen.outcome in _BAD:
            what = "is in trouble" if seen.key is None else f"{seen.key} is {seen.outcome}"
            out.say(f"error: {seen.location}: {what}: {seen.detail}")
        elif seen.outcome == "repaired":
            out.say(f"repaired: {seen.location}: {seen.key}: {seen.detail}")


def _table(out: Output, entries: Sequence[Scrubbed]) -> None:
    rows = [
        (s.tier, s.key, s.outcome, s.artifact.size if s.artifact is not None else None, s.detail)
        for s in entries
        if s.key is not None
    ]
    out.table(_COLUMNS, rows)


def _report(
    out: Output,
    found: Sequence[Scrubbed],
    missing: Sequence[str],
    *,
    good: bool,
    facts: dict[str, Any],
) -> None:
    if out.json:
        out.document(ok=good, artifacts=[_plain(seen) for seen in found], **facts)
    elif out.terminal:
        _table(out, found)
    for key in missing:
        out.say(f"error: no artifact {key} in the tiers that were asked")
    if facts["resumed"] or facts["repaired"] or facts["beyond_repair"]:
        told = f"{facts['checked']} checked, {facts['repaired']} repaired"
        told += f", {facts['beyond_repair']} beyond repair" if facts["beyond_repair"] else ""
        told += f", {facts['resumed']} checked before" if facts["resumed"] else ""
        out.say(told)


def _plain(seen: Scrubbed) -> dict[str, Any]:
    artifact = seen.artifact
    names = ("size", "created", "compiler", "compiler_version", "executable")
    return {
        "tier": seen.tier,
        "location": seen.location,
        "outcome": seen.outcome,
        "detail": seen.detail,
        "key": seen.key,
        **{name: getattr(artifact, name) if artifact is not None else None for name in names},
    }

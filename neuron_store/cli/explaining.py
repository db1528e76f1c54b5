"""`neuron-store why`: what tells a missing artifact from the ones that are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from neuron_store.cli.exits import NO
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.cli.output import Output
    from neuron_store.cli.session import Session
    from neuron_store.explain import Difference, Explanation

__all__ = ["why"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_ANSWERS = (Column("tier"), Column("outcome", "outcome"), Column("detail"))


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY [OTHER]]")
@click.option(
    "--components",
    metavar="FILE",
    type=_FILE,
    help="What the key is computed from, a JSON object, instead of KEY or beside it.",
)
@click.option(
    "--jobs", metavar="FILE", type=_FILE, help="Explain every job of a jobs file (see compile)."
)
@click.option(
    "--records",
    metavar="N",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Records to read at most in search of the nearest artifact.",
)
@json_option
@pass_session
@click.pass_context
def why(
    context: click.Context,
    session: Session,
    *,
    keys: tuple[str, ...],
    components: Path | None,
    jobs: Path | None,
    records: int,
) -> None:
    """Tell what each tier answers for KEY, and what the nearest stored artifact differs in.

    With OTHER: in which components the two keys differ. Nothing is fetched. Exit status 1 when
    there is nothing to tell: no tier has the key, and nothing near it is stored.
    """
    sources = [bool(keys) or components is not None, jobs is not None]
    if sources.count(True) != 1 or len(keys) > 2 or (len(keys) == 2 and components is not None):
        raise click.UsageError("give KEY, two keys, --components FILE or --jobs FILE")
    from neuron_store.explain import explain  # noqa: PLC0415  (`--help` needs none)

    asked = _asked(keys, components, jobs)
    # A comparison needs the two keys' own records only.
    limit = 0 if len(keys) == 2 else records
    found: list[Explanation] = []
    with session.out.progress("looking", len(asked)) as bar:
        for key, known in asked:
            bar.begin(key)
            seconds = session.settings().tier_deadline
            store = session.store()
            tiers = [store.local, *map(store.trust.reader, store.shared)]
            found.append(explain(key, tiers, components=known, seconds=seconds, records=limit))
    tell = _compare if len(keys) == 2 else _explain
    good = tell(session.out, found)
    if not good:
        context.exit(NO)


def _asked(
    keys: Sequence[str], components: Path | None, jobs: Path | None
) -> list[tuple[str, Mapping[str, Any] | None]]:
    if jobs is not None:
        from neuron_store.batch import read_jobs  # noqa: PLC0415  (`--help` needs none)

        return list({job.key: (job.key, job.components) for job in read_jobs(jobs)}.values())
    if components is not None:
        from neuron_store.key import compute_key  # noqa: PLC0415  (`--help` needs none)

        known = _read_components(components)
        return [(keys[0] if keys else compute_key(known), known)]
    return [(key, None) for key in keys]


def _read_components(path: Path) -> dict[str, Any]:
    from neuron_store._strict_json import (  # noqa: PLC0415  (`--help` needs none)
        load_written_json,
    )
    from neuron_store.errors import ConfigError  # noqa: PLC0415  (as above)

    try:
        value = load_written_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"components file {path} cannot be read: {error}") from error
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"components file {path} is no JSON object of named components")
    return value


def _explain(out: Output, found: Sequence[Explanation]) -> bool:
    good = all(each.found or each.nearest is not None for each in found)
    if out.json:
        out.document(ok=good, keys=[_plain(each) for each in found])
    for each in found:
        if not out.json:
            rows = [(a.location, a.outcome, a.detail) for a in each.tiers]
            out.table(_ANSWERS, rows, title=each.key)
            if each.nearest is not None:
                _table(out, each.nearest.differences, "asked for", "stored")
        _say(out, each)
    return good


def _say(out: Output, each: Explanation) -> None:
    if each.found:
        out.say(f"{each.key} is there")
    elif each.nearest is not None:
        near, count = each.nearest, len(each.nearest.differences)
        what = f"differs in {count} component{'s' * (count != 1)}" if count else "differs in none"
        out.say(f"{each.key} is missing; the nearest, {near.key} in {near.location}, {what}")
    elif each.components is None:
        out.say(
            f"error: {each.key} is unknown, and so is what it was computed from; give --components"
        )
    else:
        out.say(f"error: {each.key} is missing, and none of {each.records} records is near it")
    if each.more:
        out.say(f"note: only {each.records} records were read; --records reads more")


def _compare(out: Output, found: Sequence[Explanation]) -> bool:
    from neuron_store.explain import compare  # noqa: PLC0415  (`--help` needs none)

    one, other = found
    unknown = [each.key for each in found if not each.components]
    differences = compare(one.components or {}, other.components or {})
    if out.json:
        out.document(
            ok=not unknown,
            keys=[_plain(each) for each in found],
            differences=None if unknown else [d.plain() for d in differences],
        )
    elif not unknown:
        _table(out, differences, one.key, other.key)
    for key in unknown:
        out.say(f"error: no tier knows what {key} was computed from")
    if not unknown and not differences:
        out.say("the components are the same")
    return not unknown


def _table(out: Output, differences: Sequence[Difference], before: str, after: str) -> None:
    rows = [(d.name, _shown(d.before), _shown(d.after)) for d in differences]
    out.table((Column("component"), Column(before), Column(after)), rows)


def _shown(value: tuple[Any, ...]) -> str | None:
    if not value:
        return None
    return value[0] if isinstance(value[0], str) else json.dumps(value[0])


def _plain(each: Explanation) -> dict[str, Any]:
    near = each.nearest
    return {
        "key": each.key,
        "found": each.found,
        "tiers": [attrs.asdict(answer) for answer in each.tiers],
        "components": None if each.components is None else dict(each.components),
        "nearest": None
        if near is None
        else {
            "key": near.key,
            "location": near.location,
            "created": near.created,
            "differences": [d.plain() for d in near.differences],
        },
        "records": each.records,
        "more": each.more,
    }

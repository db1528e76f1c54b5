"""`neuron-store ls`, `show` and `verify`: what is where, and whether it is whole."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import click

from neuron_store.cli.exits import NO
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.artifact import Artifact
    from neuron_store.cli.session import Session

__all__ = ["ls", "show", "verify"]

# Look-ups in a shared tier wait for the network, not for this machine.
_LOOKS_AT_ONCE = 8
_READS_AT_ONCE = 4

_tier_option = click.option(
    "--tier",
    "names",
    metavar="NAME",
    multiple=True,
    help="Only this tier, by its name or location (or 'local'). Repeatable.",
)


@attrs.frozen
class _Seen:
    """What one tier says of one key."""

    tier: str
    location: str
    key: str | None
    """None: the tier as a whole is in trouble."""
    outcome: str
    detail: str = ""
    artifact: Artifact | None = None


@click.command()
@_tier_option
@click.option("-q", "--quiet", is_flag=True, help="Keys only, without looking each one up.")
@json_option
@pass_session
@click.pass_context
def ls(context: click.Context, session: Session, names: tuple[str, ...], quiet: bool) -> None:
    """List the artifacts in each tier."""
    out = session.out
    found = [seen for tier in session.chosen(names) for seen in _list(session, tier, quiet=quiet)]
    troubled = any(seen.outcome in {"error", "corrupt"} for seen in found)
    if out.json:
        fields = [_plain(seen, brief=True) for seen in found]
        out.document(ok=not troubled, artifacts=fields)
    elif quiet:
        keys = dict.fromkeys(seen.key for seen in found if seen.key is not None)
        out.write("".join(f"{key}\n" for key in keys))
    else:
        columns = (
            Column("tier"),
            Column("key"),
            Column("outcome", "outcome"),
            Column("size", "bytes"),
            Column("created", "time"),
            Column("compiler"),
            Column("executable"),
        )
        rows = [
            (seen.tier, seen.key, seen.outcome, *_facts(seen.artifact))
            for seen in found
            if seen.key is not None
        ]
        out.table(columns, rows)
    _tell(session, found)
    if troubled:
        context.exit(NO)


def _facts(artifact: Artifact | None) -> tuple[Any, ...]:
    if artifact is None:
        return (None,) * 4
    compiler = " ".join(filter(None, (artifact.compiler, artifact.compiler_version)))
    created = None if artifact.compiled is None else artifact.compiled[:19]
    return artifact.size, created, compiler or None, artifact.executable


def _list(session: Session, tier: ArtifactStore, *, quiet: bool) -> Iterator[_Seen]:
    from neuron_store.pooling import each  # noqa: PLC0415  (`--help` needs none)

    keys, trouble = _keys(session, tier)
    if trouble is not None:
        yield trouble
    if quiet:
        yield from (_Seen(tier.name, tier.location, key, "listed") for key in keys)
        return
    looks = each(functools.partial(_look, session, tier), keys, workers=_LOOKS_AT_ONCE)
    # It was there when it was listed; it may be gone by now.
    yield from (seen for seen in looks if seen.outcome != "miss")


def _keys(session: Session, tier: ArtifactStore) -> tuple[Sequence[str], _Seen | None]:
    """All keys of a tier, damaged entries too, sorted; and its trouble, if there is any."""
    from neuron_store.asking import Trouble, ask  # noqa: PLC0415  (`--help` needs none)

    seconds = session.settings().tier_deadline
    keys = ask(tier.location, lambda: sorted({*tier.keys(), *tier.damaged()}), seconds=seconds)
    if isinstance(keys, Trouble):
        return [], _Seen(tier.name, tier.location, None, "error", keys.detail)
    return keys, None


def _look(session: Session, tier: ArtifactStore, key: str) -> _Seen:
    from neuron_store.asking import Trouble, ask  # noqa: PLC0415  (`--help` needs none)

    seconds = session.settings().tier_deadline
    answer = ask(tier.location, functools.partial(tier.find, key), seconds=seconds)
    if answer is None:
        return _Seen(tier.name, tier.location, key, "miss")
    if isinstance(answer, Trouble):
        return _Seen(tier.name, tier.location, key, answer.outcome, answer.detail)
    return _Seen(tier.name, tier.location, key, "hit", artifact=answer)


@click.command()
@click.argument("key")
@json_option
@pass_session
@click.pass_context
def show(context: click.Context, session: Session, key: str) -> None:
    """Show an artifact's record, and what each tier answers for it.

    Exit status 1 when no tier has it whole.
    """
    from neuron_store.artifact import check_key  # noqa: PLC0415  (`--help` needs none)

    check_key(key)
    out, store = session.out, session.store()
    seen = [_look(session, tier, key) for tier in store.tiers]
    artifact = next((each.artifact for each in seen if each.artifact is not None), None)
    seen = [_compared(each, artifact) for each in seen]
    path = store.local.path_of(key) if seen[0].outcome == "hit" else None
    if out.json:
        out.document(
            ok=artifact is not None,
            key=key,
            path=str(path) if path is not None else None,
            artifact=_record(artifact) if artifact is not None else None,
            tiers=[_plain(each) for each in seen],
        )
    else:
        if artifact is not None:
            out.table((Column("fact"), Column("value")), _described(artifact, path))
            columns = (Column("file"), Column("size", "bytes"), Column("sha256"))
            out.table(columns, [(f.name, f.size, f.sha256) for f in artifact.files])
        columns = (Column("tier"), Column("outcome", "outcome"), Column("detail"))
        out.table(columns, [(each.tier, each.outcome, each.detail) for each in seen])
    _tell(session, seen)
    if artifact is None:
        out.say(f"error: no tier has a whole artifact {key}")
        context.exit(NO)


def _compared(seen: _Seen, first: Artifact | None) -> _Seen:
    theirs = seen.artifact
    if theirs is None or first is None or not (theirs.has_digests and first.has_digests):
        return seen
    if theirs.same_bytes(first):
        return seen
    return attrs.evolve(seen, detail="other bytes than the record shown")


def _described(artifact: Artifact, path: Any) -> list[tuple[str, str]]:
    rows = [
        ("key", artifact.key),
        ("path", str(path) if path is not None else ""),
        ("created", artifact.compiled or ""),
        ("size", str(artifact.size)),
        ("compiler", artifact.compiler or ""),
        ("compiler version", artifact.compiler_version or ""),
        ("executable", artifact.executable or ""),
    ]
    rows += [(f"component {name}", _text(v)) for name, v in sorted(artifact.components.items())]
    rows += [(f"host {name}", value) for name, value in sorted(artifact.host.items())]
    return [(name, value) for name, value in rows if value]


def _text(value: Any) -> str:
    import json  # noqa: PLC0415  (`--help` needs none)

    return value if isinstance(value, str) else json.dumps(value)


@click.command()
@click.argument("keys", nargs=-1)
@_tier_option
@json_option
@pass_session
@click.pass_context
def verify(
    context: click.Context, session: Session, keys: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """Read every byte and check every digest.

    Without KEYS: everything in each tier. A key that one tier lacks is no fault as long as another
    has it, unless --tier names the tier. Exit status 1 when anything is damaged or missing.
    """
    from neuron_store.artifact import check_key  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.pooling import each  # noqa: PLC0415

    for key in keys:
        check_key(key)
    out, found = session.out, list[_Seen]()
    work: list[tuple[ArtifactStore, str]] = []
    for tier in session.chosen(names):
        listed, trouble = (keys, None) if keys else _keys(session, tier)
        found += [trouble] if trouble is not None else []
        work += [(tier, key) for key in dict.fromkeys(listed)]
    with out.progress("verifying", len(work)) as bar:

        def check(item: tuple[ArtifactStore, str]) -> _Seen:
            bar.begin(item[1])
            return _verify(*item)

        found += each(check, work, workers=_READS_AT_ONCE)
    good = not any(seen.outcome in {"corrupt", "error"} for seen in found)
    whole = {seen.key for seen in found if seen.outcome == "ok"}
    missing = [seen for seen in found if seen.outcome == "missing"]
    good = good and all(seen.key in whole and not names for seen in missing)
    if out.json:
        out.document(ok=good, artifacts=[_plain(seen, brief=True) for seen in found])
    else:
        columns = (
            Column("tier"),
            Column("key"),
            Column("outcome", "outcome"),
            Column("size", "bytes"),
            Column("detail"),
        )
        rows = [
            (
                s.tier,
                s.key,
                s.outcome,
                s.artifact.size if s.artifact is not None else None,
                s.detail,
            )
            for s in found
            if s.key is not None
        ]
        out.table(columns, rows)
    _tell(session, found)
    for absent in dict.fromkeys(seen.key for seen in missing if seen.key not in whole):
        out.say(f"error: no artifact {absent} in the tiers that were asked")
    if not good:
        context.exit(NO)


def _verify(tier: ArtifactStore, key: str) -> _Seen:
    from neuron_store.asking import Trouble, ask  # noqa: PLC0415  (`--help` needs none)

    answer = ask(tier.location, functools.partial(tier.verify, key), seconds=None)
    if not isinstance(answer, Trouble):
        return _Seen(tier.name, tier.location, key, "ok", artifact=answer)
    outcome = "missing" if answer.outcome == "miss" else answer.outcome
    return _Seen(tier.name, tier.location, key, outcome, answer.detail)


def _tell(session: Session, found: Sequence[_Seen]) -> None:
    """Trouble as messages too: a pipe that reads keys or a table should not be the only witness."""
    for seen in found:
        if seen.outcome in {"error", "corrupt"}:
            what = "is in trouble" if seen.key is None else f"{seen.key} is {seen.outcome}"
            session.out.say(f"error: {seen.location}: {what}: {seen.detail}")


def _record(artifact: Artifact) -> dict[str, Any]:
    return {**attrs.asdict(artifact), "size": artifact.size}


def _plain(seen: _Seen, *, brief: bool = False) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tier": seen.tier,
        "location": seen.location,
        "outcome": seen.outcome,
        "detail": seen.detail,
    }
    if brief:
        artifact = seen.artifact
        document["key"] = seen.key
        document["size"] = artifact.size if artifact is not None else None
        document["created"] = artifact.compiled if artifact is not None else None
        document["compiler"] = artifact.compiler if artifact is not None else None
        document["compiler_version"] = artifact.compiler_version if artifact is not None else None
        document["executable"] = artifact.executable if artifact is not None else None
    return document

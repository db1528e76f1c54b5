"""`neuron-store ls` and `show`: what is where."""

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

__all__ = ["ls", "show"]

# Look-ups in a shared tier wait for the network, not for this machine.
_LOOKS_AT_ONCE = 8

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
    troubled = any(seen.outcome in {"error", "corrupt", "refused"} for seen in found)
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
    trust, outcome, detail = session.settings().trust, "hit", ""
    if tier is not session.store().local:
        # As the fetch would decide.
        refusal = ask(
            tier.location, functools.partial(trust.accept, answer, tier.location), seconds=None
        )
        if isinstance(refusal, Trouble):
            outcome, detail = refusal.outcome, refusal.detail
    return _Seen(tier.name, tier.location, key, outcome, detail, artifact=answer)


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
    usable = (each.artifact for each in seen if each.outcome == "hit")
    artifact = next(usable, None)
    seen = [_compared(session, each, artifact) for each in seen]
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
            rows = _described(artifact, path)
            if artifact.signatures:
                rows.append(("signature", _signers(session, artifact)))
            out.table((Column("fact"), Column("value")), rows)
            columns = (Column("file"), Column("size", "bytes"), Column("sha256"))
            out.table(columns, [(f.name, f.size, f.sha256) for f in artifact.files])
        columns = (Column("tier"), Column("outcome", "outcome"), Column("detail"))
        out.table(columns, [(each.tier, each.outcome, each.detail) for each in seen])
    _tell(session, seen)
    if artifact is None:
        out.say(f"error: no tier has a whole artifact {key}")
        context.exit(NO)


def _compared(session: Session, seen: _Seen, first: Artifact | None) -> _Seen:
    theirs = seen.artifact
    if theirs is None or seen.outcome != "hit":
        return seen
    details = []
    if first is not None and theirs.has_digests and first.has_digests:
        details += [] if theirs.same_bytes(first) else ["other bytes than the record shown"]
    details += _forms(theirs)
    if theirs.signatures:
        details.append(_signers(session, theirs))
    return attrs.evolve(seen, detail="; ".join(details))


def _forms(artifact: Artifact) -> list[str]:
    """How a tier stores the files that it does not store as they are."""
    from neuron_store.artifact import BUNDLE  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.byte_sizes import human_bytes  # noqa: PLC0415  (`--help` needs none)

    told = [
        f"{file.name} stored as {file.stored.encoding}: "
        f"{human_bytes(file.stored.size)} of {human_bytes(file.size)}"
        for file in artifact.files
        if file.stored is not None and file.stored.encoding != BUNDLE
    ]
    bundled = [f.stored for f in artifact.files if f.stored and f.stored.encoding == BUNDLE]
    if bundled:
        many, size = len(set(bundled)), sum(form.size for form in set(bundled))
        objects = "one object" if many == 1 else f"{many} objects"
        told.append(f"{len(bundled)} small files together in {objects}: {human_bytes(size)}")
    return told


def _signers(session: Session, artifact: Artifact) -> str:
    """Who signed a record, and what that is worth here."""
    trust = session.settings().trust
    if not trust.keys:
        ids = ", ".join(dict.fromkeys(s.key_id for s in artifact.signatures))
        return f"signed by {ids} (not checked: no key is trusted)"
    verdict = trust.judge(artifact)
    return f"signed by {verdict.signer}, trusted" if verdict.signer else verdict.detail


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


def _tell(session: Session, found: Sequence[_Seen]) -> None:
    """Trouble as messages too: a pipe that reads keys or a table should not be the only witness."""
    for seen in found:
        if seen.outcome in {"error", "corrupt", "refused"}:
            what = "is in trouble" if seen.key is None else f"{seen.key} is {seen.outcome}"
            session.out.say(f"error: {seen.location}: {what}: {seen.detail}")


def _record(artifact: Artifact) -> dict[str, Any]:
    # How the one tier stores it is said of that tier.
    return {**attrs.asdict(artifact.without_forms()), "size": artifact.size}


def _plain(seen: _Seen, *, brief: bool = False) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tier": seen.tier,
        "location": seen.location,
        "outcome": seen.outcome,
        "detail": seen.detail,
    }
    artifact = seen.artifact
    if not brief:
        document["stored_size"] = artifact.stored_size if artifact is not None else None
        document["stored"] = {
            file.name: attrs.asdict(file.stored)
            for file in (artifact.files if artifact is not None else ())
            if file.stored is not None
        }
    if brief:
        document["key"] = seen.key
        document["size"] = artifact.size if artifact is not None else None
        document["created"] = artifact.compiled if artifact is not None else None
        document["compiler"] = artifact.compiler if artifact is not None else None
        document["compiler_version"] = artifact.compiler_version if artifact is not None else None
        document["executable"] = artifact.executable if artifact is not None else None
    return document

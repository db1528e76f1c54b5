"""`neuron-store fetch` and `promote`: artifacts into the local tier, and out of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from neuron_store.cli.exits import NO, YES, exit_status
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.cli.session import Session
    from neuron_store.signing import Signer
    from neuron_store.tiered import TieredStore

__all__ = ["fetch", "promote"]

_PROMOTIONS_AT_ONCE = 4
_FAILURES = frozenset({"missing", "corrupt", "error"})


@attrs.frozen
class _Fetched:
    key: str
    outcome: str
    """`present`, `fetched`, `missing`, `corrupt`, `refused` or `error`."""
    tier: str | None = None
    path: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    detail: str = ""


@click.command()
@click.argument("keys", nargs=-1, required=True)
@json_option
@pass_session
@click.pass_context
def fetch(context: click.Context, session: Session, keys: tuple[str, ...]) -> None:
    """Bring artifacts from the shared tiers into the local one.

    Exit status 1 when one of them could not be had.
    """
    from neuron_store.artifact import check_key  # noqa: PLC0415  (`--help` needs none)

    wanted = [check_key(key) for key in dict.fromkeys(keys)]
    out, store, done = session.out, session.store(), list[_Fetched]()
    with out.progress("fetching", len(wanted)) as bar:
        for key in wanted:
            bar.begin(key)
            done.append(_fetch(store, key))
    good = all(each.path is not None for each in done)
    if out.json:
        out.document(ok=good, artifacts=[attrs.asdict(each) for each in done])
    else:
        columns = (
            Column("key"),
            Column("outcome", "outcome"),
            Column("tier"),
            Column("size", "bytes"),
            Column("time", "seconds"),
            Column("path"),
        )
        rows = [(d.key, d.outcome, d.tier, d.bytes, d.seconds, d.path) for d in done]
        out.table(columns, rows)
    for each in done:
        if each.path is None:
            out.say(f"error: {each.detail}")
    if not good:
        context.exit(NO)


def _fetch(store: TieredStore, key: str) -> _Fetched:
    from neuron_store.errors import NeuronStoreError, fetch_outcome  # noqa: PLC0415  (not for help)

    before = store.counters()
    began = time.perf_counter()
    try:
        path = store.get(key)
    except NeuronStoreError as error:
        return _Fetched(key, fetch_outcome(error), detail=str(error))
    seconds = time.perf_counter() - began
    after = store.counters()
    for tier in store.shared:
        if after[tier.name].hits > before[tier.name].hits:
            size = after[tier.name].bytes - before[tier.name].bytes
            return _Fetched(key, "fetched", tier.name, str(path), size, seconds)
    return _Fetched(key, "present", store.local.name, str(path), 0, seconds)


@attrs.frozen
class _Promoted:
    key: str
    tier: str
    outcome: str
    """`created`, `present`, `conflict`, `repaired`, `missing`, `corrupt` or `error`."""
    detail: str = ""
    status: int = attrs.field(default=YES, repr=False)
    """The exit status that it calls for."""


@click.command()
@click.argument("keys", nargs=-1)
@click.option(
    "--manifest",
    "manifests",
    metavar="PATH",
    multiple=True,
    type=click.Path(exists=True, allow_dash=True, path_type=Path),
    help="The graphs that this manifest lists, or all below this directory. Repeatable.",
)
@click.option("--all", "everything", is_flag=True, help="Everything in the local tier.")
@click.option(
    "--to",
    metavar="NAME",
    multiple=True,
    help="Only to this shared tier, by its name or location. Repeatable.",
)
@click.option("--sign", is_flag=True, help="Sign the records, so that nodes may require it.")
@click.option(
    "--key",
    "key_file",
    metavar="FILE",
    help="The private key, instead of NEURON_STORE_SIGNING_KEY; implies --sign.",
)
@json_option
@pass_session
@click.pass_context
def promote(
    context: click.Context,
    session: Session,
    *,
    keys: tuple[str, ...],
    manifests: tuple[Path, ...],
    everything: bool,
    to: tuple[str, ...],
    sign: bool,
    key_file: str | None,
) -> None:
    """Publish local artifacts in the shared tiers.

    The first writer wins: when a tier has other bytes under a key (`conflict`), they stay, and that
    is no failure. Exit status 1 when an artifact did not reach a tier it was meant for. With --sign
    (or NEURON_STORE_SIGNING_KEY set) a tier where the artifact is not signed afterwards is not
    reached.
    """
    if [bool(keys), bool(manifests), everything].count(True) != 1:
        raise click.UsageError("give either KEYS, --manifest PATH or --all")
    from neuron_store.pooling import each  # noqa: PLC0415  (`--help` needs none)

    out, store = session.out, session.store()
    signer = _signer(session, key_file, sign=sign)
    wanted = _to_promote(store, keys, manifests)
    if not wanted:
        what = "the manifests list no graph" if manifests else "there is no artifact"
        out.say(f"nothing to promote from {store.local.location}: {what}")
    done: list[_Promoted] = []
    with out.progress("promoting", len(wanted)) as bar:

        def one(key: str) -> list[_Promoted]:
            bar.begin(key)
            return _promote(store, key, to, signer)

        for answers in each(one, wanted, workers=_PROMOTIONS_AT_ONCE):
            done += answers
    good = _FAILURES.isdisjoint(a.outcome for a in done)
    if out.json:
        out.document(ok=good, artifacts=[_plain(a) for a in done])
    else:
        columns = (Column("key"), Column("tier"), Column("outcome", "outcome"))
        out.table(columns, [(a.key, a.tier, a.outcome) for a in done])
    for answer in done:
        if answer.detail:
            out.say(f"error: {answer.detail}")
    if not good:
        context.exit(max(a.status for a in done))


def _plain(answer: _Promoted) -> dict[str, str]:
    return {name: getattr(answer, name) for name in ("key", "tier", "outcome", "detail")}


def _signer(session: Session, key_file: str | None, *, sign: bool) -> Signer | None:
    """The key that the command line means; None: the settings have the word."""
    if key_file is not None:
        from neuron_store.signing import Signer  # noqa: PLC0415  (`--help` needs none)

        return Signer.load(key_file, what="--key")
    if sign and session.settings().values["NEURON_STORE_SIGNING_KEY"][0] is None:
        raise click.UsageError("--sign: with which key? give --key FILE (`neuron-store keygen`)")
    return None


def _promote(
    store: TieredStore, key: str, to: Sequence[str], signer: Signer | None
) -> list[_Promoted]:
    from neuron_store.errors import (  # noqa: PLC0415  (`--help` needs none)
        ArtifactCorrupt,
        ArtifactNotFound,
        ArtifactUntrusted,
        PromoteError,
        ReadOnlyTier,
        TierError,
    )

    local = store.local.name
    try:
        done, failures = store.promote(key, to=list(to) or None, signer=signer), {}
    except PromoteError as error:
        done, failures = error.done, error.failures
    except ArtifactNotFound as error:
        return [_Promoted(key, local, "missing", str(error), NO)]
    except ArtifactCorrupt as error:
        return [_Promoted(key, local, "corrupt", str(error), NO)]
    except ArtifactUntrusted as error:
        return [_Promoted(key, local, "error", str(error), NO)]
    except ReadOnlyTier:
        raise
    except TierError as error:
        return [_Promoted(key, local, "error", str(error), NO)]
    return [
        *(_Promoted(key, tier, answer.value) for tier, answer in done.items()),
        *(
            # A read-only tier is a matter of settings, whether it was named or is all there is.
            _Promoted(key, tier, "error", f"{tier}: {error}", exit_status(error))
            for tier, error in failures.items()
        ),
    ]


def _to_promote(
    store: TieredStore, keys: Sequence[str], manifests: Sequence[Path]
) -> Sequence[str]:
    """The keys that the options name; everything local when they name none."""
    from neuron_store.artifact import check_key  # noqa: PLC0415  (`--help` needs none)

    if manifests:
        from neuron_store.manifest.reader import (  # noqa: PLC0415  (takes cattrs)
            graph_ranks,
            read_engines,
        )

        return list(graph_ranks(read_engines(manifests)))
    if keys:
        return [check_key(key) for key in dict.fromkeys(keys)]
    return sorted(store.local.keys())

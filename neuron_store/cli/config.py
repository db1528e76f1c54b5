"""`neuron-store config`: every setting, its value and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from neuron_store.cli.exits import USAGE
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.cli.session import Session
    from neuron_store.tier_url import TierURL

__all__ = ["config"]

_COLUMNS = (Column("setting"), Column("value"), Column("from"), Column("in the file"))


@click.command()
@json_option
@pass_session
@click.pass_context
def config(context: click.Context, session: Session) -> None:
    """Print every setting, its value and where it came from.

    Exit status 2 when one of the tiers has an address that no installed package serves.
    """
    from neuron_store.variables import VARIABLES  # noqa: PLC0415  (`--help` needs none)

    settings, urls, root = session.settings(), session.tier_urls(), session.local_root()
    values = dict(settings.values)
    if session.tiers:
        values["NEURON_STORE_TIERS"] = (
            tuple((text, {}) for text in session.tiers),
            "command line",
        )
        values["NEURON_LIBTORCH_REMOTE_CACHE"] = (None, "command line")
    out, faults = session.out, [_fault(url) for url in urls]
    for url, fault in zip(urls, faults, strict=True):
        if fault is not None:
            out.say(f"error: {url.location}: {fault}")
    if out.json:
        out.document(
            ok=not any(faults),
            settings=[
                {
                    "name": name,
                    "field": VARIABLES[name].field,
                    "value": _plain(value),
                    "source": source,
                    "about": VARIABLES[name].about,
                }
                for name, (value, source) in values.items()
            ],
            file=settings.file,
            local_root=str(root),
            tiers=[_tier(url) | {"error": fault} for url, fault in zip(urls, faults, strict=True)],
        )
    else:
        rows: list[Sequence[Any]] = [
            (name, _shown(value), source, VARIABLES[name].field)
            for name, (value, source) in values.items()
        ]
        rows.append(("local tier", str(root), "command line" if session.local else "", None))
        rows += [(f"shared tier {i}", _address(url), "", None) for i, url in enumerate(urls, 1)]
        out.table(_COLUMNS, rows)
    if any(faults):
        context.exit(USAGE)


def _fault(url: TierURL) -> str | None:
    """Why the tier cannot be opened, as far as its address alone tells."""
    from neuron_store.errors import ConfigError  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.registry import check_tier_url  # noqa: PLC0415

    try:
        check_tier_url(url)
    except ConfigError as error:
        return str(error)
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and not _is_words(value):
        return [{"url": text, "options": dict(options)} for text, options in value]
    return list(value) if isinstance(value, tuple) else value


def _is_words(value: tuple[Any, ...]) -> bool:
    return all(isinstance(entry, str) for entry in value) and bool(value)


def _shown(value: Any) -> str | None:
    if isinstance(value, tuple) and _is_words(value):
        return " ".join(value)
    if isinstance(value, tuple):
        return " ".join(_with_options(text, options) for text, options in value) or None
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value:g}" if isinstance(value, float) else None if value is None else str(value)


def _with_options(text: str, options: Any) -> str:
    told = "&".join(f"{name}={value}" for name, value in options.items())
    return text + (("&" if "?" in text else "?") + told if told else "")


def _address(url: TierURL) -> str:
    facts = [f"{name}={value}" for name, value in url.options.items()]
    facts += ["read_only=1"] if url.read_only else []
    facts += [f"name={url.name}"] if url.name else []
    return " ".join([url.location, *facts])


def _tier(url: TierURL) -> dict[str, Any]:
    return {
        "location": url.location,
        "scheme": url.scheme,
        "name": url.name or url.location,
        "options": dict(url.options),
        "read_only": url.read_only,
    }

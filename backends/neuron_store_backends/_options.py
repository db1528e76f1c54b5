"""Options of a tier's URL that several clouds share."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from neuron_store.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TIMES", "Times", "check_root", "compression", "require_module", "times"]

import attrs

TIMES = ("connect_timeout", "read_timeout", "stall_timeout", "timeout")


@attrs.frozen
class Times:
    """Deadlines, in seconds."""

    connect_timeout: float = 5.0
    """To connect."""
    read_timeout: float = 15.0
    """Of silence, before a request is given up."""
    timeout: float = 25.0
    """For a small request, all its tries included."""
    stall_timeout: float = 60.0
    """For a piece of 8 MiB, all its tries included."""


def times(options: Mapping[str, str], where: str) -> Times:
    """The deadlines that a URL sets; raises `ConfigError` for what is no time."""
    found = {}
    for name in TIMES:
        if name not in options:
            continue
        try:
            number = float(options[name])
        except ValueError:
            number = 0.0
        if not 0 < number < 86_400:
            raise ConfigError(f"{where}: {name}={options[name]!r} is not a time in seconds")
        found[name] = number
    return Times(**found)


def compression(options: Mapping[str, str], where: str) -> str | None:
    """The encoding that a URL's `compress` asks for; raises `ConfigError` for an unknown one."""
    wanted = options.get("compress", "none").strip().lower()
    if wanted not in {"none", "zstd"}:
        raise ConfigError(f"{where}: compress={options['compress']!r}; use zstd or none")
    return None if wanted == "none" else wanted


def check_root(address: str, location: str) -> str:
    """Bucket and prefix without slashes around them, or a `ConfigError`."""
    root = address.strip("/")
    bad = not root or "//" in root or not {".", ".."}.isdisjoint(root.split("/"))
    if bad or address.startswith("/"):
        scheme = location.split("://", 1)[0]
        raise ConfigError(f"tier {location}: write {scheme}://bucket or {scheme}://bucket/prefix")
    return root


def require_module(module: str, extra: str, location: str) -> None:
    """Raise `MissingExtra` unless `module` is installed; does not import it."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ValueError:  # what a test puts in its place, or half an import
        found = False
    if not found:
        raise MissingExtra(f"tier {location}", extra, module)

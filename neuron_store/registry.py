"""Finds tiers by URL scheme and compilers by name, through entry points, loaded at first use."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import TYPE_CHECKING, Any, Protocol, cast

from neuron_store.errors import ConfigError, MissingExtra, UnknownScheme
from neuron_store.tier_url import TierURL, parse_tier_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.compilers import Compiler

__all__ = ["check_tier_url", "get_compiler", "known_compilers", "known_schemes", "open_tier"]

TIERS = "neuron_store.tiers"
COMPILERS = "neuron_store.compilers"
# Schemes that a package known to us serves, for the remedy in the message.
_ELSEWHERE = {
    "az": "pip install 'neuron-store[azure]'",
    "abfs": "pip install 'neuron-store[azure]'",
    "gs": "pip install 'neuron-store[gcs]'",
    "gcs": "write gs://",
    "file": "write the bare path, or posix:///path",
    "http": "object stores are s3://, az:// and gs://",
    "https": "object stores are s3://, az:// and gs://",
}


class TierFactory(Protocol):
    """What an entry point of `neuron_store.tiers` gives: usually the tier's class."""

    def from_url(self, url: TierURL) -> ArtifactStore:
        """Open the tier; raises `ConfigError` for options it does not know."""


@functools.cache
def _installed() -> Any:  # `SelectableGroups` before Python 3.12; both have `select`
    # Of all groups at once: with one group or with all, every distribution's file is read.
    return importlib.metadata.entry_points()


@functools.cache
def _entries(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in _installed().select(group=group):
        other = found.get(entry.name)
        # An editable install beside its own wheel metadata lists the same object twice.
        if other is not None and other.value != entry.value:
            raise ConfigError(
                f"{group}: {entry.name!r} is provided twice, by {_origin(other)} and by "
                f"{_origin(entry)}; uninstall one of them"
            )
        found[entry.name] = entry
    return found


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    distribution = entry.dist.name if entry.dist is not None else "an unknown distribution"
    return f"{distribution} ({entry.value})"


def _load(group: str, name: str, what: str) -> Any:
    entry = _entries(group)[name]
    try:
        return entry.load()
    except MissingExtra:
        raise
    except ImportError as error:
        # First-party ones name their extra themselves; what a third party's package lacks, only
        # its own metadata could say.
        raise ConfigError(
            f"{what}: {_origin(entry)} cannot be imported: {error}; install what it needs, or "
            "uninstall it"
        ) from error


def known_schemes() -> Sequence[str]:
    """URL schemes that installed packages serve."""
    return sorted(_entries(TIERS))


def known_compilers() -> Sequence[str]:
    """Names of installed compilers' adapters."""
    return sorted(_entries(COMPILERS))


def check_tier_url(url: str | TierURL) -> TierURL:
    """The address, judged without importing or opening anything.

    Raises:
        UnknownScheme: no installed package serves the scheme; lists those that are.
        ConfigError: the URL or one of its options is unusable.
    """
    if isinstance(url, str):
        url = parse_tier_url(url)
    if url.scheme not in _entries(TIERS):
        raise UnknownScheme(url.scheme, known_schemes(), _ELSEWHERE.get(url.scheme, ""))
    return url


def open_tier(url: str | TierURL) -> ArtifactStore:
    """Open one tier by its URL or absolute path.

    Raises:
        UnknownScheme: no installed package serves the scheme; lists those that are.
        MissingExtra: the package's optional dependency is not installed.
        ConfigError: the URL or one of its options is unusable.
    """
    url = check_tier_url(url)
    factory = cast("TierFactory", _load(TIERS, url.scheme, f"tier {url.location}"))
    store = factory.from_url(url)
    if url.read_only:
        from neuron_store.readonly import ReadOnlyStore  # noqa: PLC0415  (most tiers are not)

        return ReadOnlyStore(store)
    return store


def get_compiler(name: str) -> Compiler:
    """The compiler's adapter of that name, made with its defaults.

    Raises:
        ConfigError: there is none; lists those that are.
        MissingExtra: its optional dependency is not installed.
    """
    if name not in _entries(COMPILERS):
        raise ConfigError(f"no compiler {name!r}; known: {', '.join(known_compilers())}")
    return cast("Compiler", _load(COMPILERS, name, f"compiler {name}")())

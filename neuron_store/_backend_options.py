"""What `torch.compile(..., options={...})` may say, judged before anything is traced."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.abc import ArtifactStore
from neuron_store.compiler_flags import FlagDialect, check_flags
from neuron_store.errors import ConfigError, MissingExtra
from neuron_store.fx_key import extra_components
from neuron_store.registry import check_tier_url, get_compiler

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackendOptions"]


def _compiler(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(f"{value!r:.200} is {_kind(value)}; give the name of an adapter")
    get_compiler(value)
    return value


def _flags(value: Any) -> Sequence[str] | str:
    if value is None:
        return ()
    # What holds for any compiler; the rest is its adapter's to say.
    check_flags(value, FlagDialect())
    return value if isinstance(value, str) else tuple(value)


def _store(value: object) -> ArtifactStore | tuple[str | ArtifactStore, ...] | None:
    if value is None or isinstance(value, ArtifactStore):
        return value
    if isinstance(value, str | os.PathLike):
        return (_tier(value),)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise ConfigError(
            f"{_kind(value)} is no store; give an ArtifactStore, or the URLs or absolute paths of "
            "shared tiers"
        )
    return tuple(_tier(item) for item in value)


def _tier(value: object) -> str | ArtifactStore:
    if isinstance(value, ArtifactStore):
        return value
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise ConfigError(f"{_kind(value)} is no tier; give a URL or an absolute path")
    check_tier_url(text)
    return text


def _fallback(value: object) -> str:
    if value is None:
        return "eager"
    if value == "eager" or value == "error":  # noqa: PLR1714  (a set would hash what may be a list)
        return str(value)
    raise ConfigError(f"{value!r:.200} is neither 'eager' nor 'error'")


def _extra(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{value!r:.200} is {_kind(value)}; give a mapping of names to plain values"
        )
    extra_components(value)
    return value


def _kind(value: object) -> str:
    return f"a value of type {type(value).__name__}"


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "compiler": _compiler,
    "compiler_flags": _flags,
    "store": _store,
    "fallback": _fallback,
    "extra": _extra,
}


@attrs.frozen(kw_only=True)
class BackendOptions:
    """What `torch.compile(..., options={...})` may say."""

    compiler: str | None = None
    """Name of an adapter; None: `neuronx-cc` on a host with Neuron devices, else `iree`."""
    compiler_flags: Sequence[str] | str = ()
    store: ArtifactStore | Sequence[str | ArtifactStore] | None = None
    """A store, or the URLs of its shared tiers; None: what the settings say."""
    fallback: str = "eager"
    """`eager` or `error`: what happens to a graph that cannot be lowered."""
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    """More components of every key, such as digests of kernel sources."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """The options, judged as far as they can be without opening a tier.

        Raises:
            ConfigError: names an option that is unknown or cannot be used, and what it may be.
            MissingExtra: the compiler's package is not installed.
        """
        checked = {}
        for name, value in (options or {}).items():
            if name not in _CHECKS:
                raise ConfigError(
                    f"backend neuron_store: unknown option {name!r}; known: {', '.join(_CHECKS)}"
                )
            try:
                checked[name] = _CHECKS[name](value)
            except MissingExtra:
                raise
            except ConfigError as error:
                # Without the value: an address may carry credentials.
                raise ConfigError(f"backend neuron_store: option {name}: {error}") from error
        return cls(**checked)

"""The key of an artifact from named components.

A key names everything that decides what the compiler makes, and nothing that does not: no path of
this machine, no environment, no rank, no hash seed. Its components are flat and named, and kept in
the artifact's record, so that two keys can be compared component by component.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, TypeAlias

from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "EXTRA",
    "JSON",
    "compute_key",
    "digest",
    "with_extra",
]

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"

# Goes into every key. Raised when the same components must not name the same artifact any more.
_FORMAT = 1
EXTRA = "extra:"
"""Prefix of components that a caller adds: kernel sources, for one, which no graph holds."""


def compute_key(components: Mapping[str, JSON]) -> str:
    """The key, 32 lower-case hex digits, that follows from `components` and from nothing else.

    It is the MD5 of their canonical JSON: sorted, quoted (so that no two sets of components read
    the same) and with a format version. Lists and tuples are one; `1`, `1.0`, `true` and `"1"` are
    four different values. MD5 names artifacts here and protects nothing: 32 digits are what the
    Neuron stack's own keys have.

    Raises:
        ConfigError: no components, or one that is not a JSON value; the message names it.
    """
    if not components:
        raise ConfigError("a key needs at least one component, such as graph=<sha256>")
    for name, value in components.items():
        if type(name) is not str or not name:
            raise ConfigError(f"key component name {name!r} is not a non-empty string")
        _check_json(value, name, 0)
    text = json.dumps(
        {"neuron_store_key": _FORMAT, "components": components},
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        default=_listed,
    )
    return hashlib.md5(text.encode("ascii"), usedforsecurity=False).hexdigest()


def with_extra(components: Mapping[str, JSON], extra: Mapping[str, JSON] | None) -> dict[str, JSON]:
    """`components` and, each as `extra:<name>`, what the caller adds to them."""
    return {**components, **{f"{EXTRA}{name}": value for name, value in (extra or {}).items()}}


def digest(pieces: bytes | memoryview | Iterable[bytes | memoryview]) -> str:
    """Sha256 (hex) of one buffer, or of several as if they were one."""
    if isinstance(pieces, bytes | memoryview):
        pieces = (pieces,)
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()


def _check_json(value: object, where: str, depth: int) -> None:
    # json.dumps would turn a key 1 into "1" and an enum into its number, and so hide a difference.
    if depth > 32:
        raise ConfigError(f"key component {where} is nested more than 32 deep")
    if value is None or type(value) in {str, int, bool}:
        return
    if type(value) is float and value - value == 0.0:
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]", depth + 1)
        return
    if isinstance(value, dict):
        for name, item in value.items():
            if type(name) is not str:
                raise ConfigError(f"key component {where} has the name {name!r}; names are strings")
            _check_json(item, f"{where}.{name}", depth + 1)
        return
    raise ConfigError(
        f"key component {where} is {type(value).__name__} {str(value)[:80]!r}, which is not a "
        "JSON value; give its text, or a digest of it"
    )


def _listed(value: object) -> object:
    raise ConfigError(f"{type(value).__name__} in a key component is not a JSON value")

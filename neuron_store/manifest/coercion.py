"""Any live object as JSON values: deterministic, bounded, without secrets, and never raising.

Nothing of vLLM, torch, numpy or pydantic is imported; their objects are known by their shape.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import itertools
import json
import math
import os
import re
import sys
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from neuron_store.manifest.masking import MASK, is_bare_name, is_secret_name, mask_text

__all__ = ["Limits", "to_plain"]

# Values of the standard library whose text says all; a date's is ISO 8601.
_PRINTED = (
    *(dt.date, dt.time, dt.timedelta, dt.tzinfo, complex, uuid.UUID),
    *(decimal.Decimal, fractions.Fraction),
)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_MAX_INT = 1 << 63
_MOST_NAMES = 100_000


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a coerced object may grow to."""

    depth: int = 24
    opaque: int = 3
    """How deep objects within objects are looked into that declare no fields: a logger or a process
    group reaches everything."""
    items: int = 4096
    """Of one container."""
    values: int = 50_000
    """In all."""
    text: int = 8192
    """Characters of one string."""
    characters: int = 2 << 20
    """Of all names and strings together."""


def to_plain(value: Any, limits: Limits | None = None) -> Any:
    """`value` as JSON values.

    Dataclasses, attrs and pydantic objects become objects in the order of their fields, mappings
    objects in the order of their names, sets sorted lists, enums their values, paths and torch
    dtypes text, arrays and tensors a note of their type and shape, functions and classes their
    names, other objects their public attributes. Values under secret names are masked, cycles and
    what is beyond the limits are marked, and what raises is marked with the error's type.
    """
    return _Coercion(limits or Limits()).value(value, 0)


class _Coercion:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.values = limits.values
        self.characters = limits.characters
        self.opaque = 0
        self.open: set[int] = set()

    @property
    def spent(self) -> bool:
        return self.values < 0 or self.characters < 0

    def value(self, value: Any, depth: int) -> Any:
        self.values -= 1
        if self.spent:
            return _TOO_LARGE
        try:
            return self._value(value, depth)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (a foreign property may raise anything)
            return f"<unreadable: {type(error).__name__}>"

    def _value(self, value: Any, depth: int) -> Any:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, enum.Enum):
            return self.value(value.value, depth)
        if isinstance(value, (str, os.PathLike)):
            return self.text(os.fsdecode(os.fspath(value)))
        if isinstance(value, (int, float)):
            return _number(value)
        if isinstance(value, _PRINTED):
            return self.text(value.isoformat() if hasattr(value, "isoformat") else str(value))
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"<{len(value)} bytes>"
        known = _foreign(value)
        if known is not _UNKNOWN:
            return known
        if isinstance(value, types.ModuleType):
            return f"<module {value.__name__}>"
        if isinstance(value, type) or (callable(value) and not _fields(value)):
            return self.text(_name(value))
        return self._container(value, depth)

    def _container(self, value: Any, depth: int) -> Any:
        if depth >= self.limits.depth:
            return f"<left out: deeper than {self.limits.depth}>"
        if id(value) in self.open:
            return f"<cycle: {type(value).__name__}>"
        self.open.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._mapping(value, depth + 1)
            if isinstance(value, AbstractSet):
                items = self._items(value, depth + 1)
                return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
            if isinstance(value, (Sequence, Iterator)) or (
                isinstance(value, Iterable)
                and not _fields(value)
                and not hasattr(value, "__dict__")
            ):
                if isinstance(value, Iterator):
                    return f"<{_name(type(value))}>"  # Reading it would use it up.
                if isinstance(value, tuple) and hasattr(type(value), "_fields"):
                    return self._named(value, depth + 1)
                return self._items(value, depth + 1)
            declared = _fields(value)
            if declared is not None:
                return self._object(value, declared, depth + 1)
            return self._opaque(value, depth + 1)
        finally:
            self.open.discard(id(value))

    def _items(self, values: Iterable[Any], depth: int) -> list[Any]:
        plain: list[Any] = []
        secret_next = False
        pairs = isinstance(values, Sequence) and all(map(_is_pair, values))
        alone = isinstance(values, Sequence) and _is_pair(values)
        for count, item in enumerate(values):
            if count >= self.limits.items or self.spent:
                plain.append(_TOO_LARGE)
                break
            # An argument vector: ["--hf-token", "..."].
            if secret_next and type(item) is str and not item.startswith("-"):
                plain.append(MASK)
                secret_next = False
                continue
            if _is_pair(item) and _names_secret(item, bare=pairs):
                self.values -= 1
                plain.append([self.text(item[0]), MASK])
                continue
            plain.append(self.value(item, depth))
            secret_next = type(item) is str and (
                (item.startswith("-") and "=" not in item and is_secret_name(item))
                # ("HF_TOKEN", "..."), but not a list of such names.
                or (alone and count == 0 and _names_secret(values) and not _is_name(values))
            )
        return plain

    def _named(self, value: tuple[Any, ...], depth: int) -> list[Any]:
        """A named tuple is a list, as `json` has it, but its names say which item is a secret."""
        plain = self._items(value, depth)
        for at, (name, item) in enumerate(zip(type(value)._fields, value, strict=False)):  # type: ignore[attr-defined]  # seen by the caller
            if at < len(plain) and _hides(name, item):
                plain[at] = MASK
        return plain

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        named: list[tuple[str, str, Any]] = []
        # Sorted before it is cut off; but one that never ends has no order.
        for key, item in itertools.islice(value.items(), _MOST_NAMES):
            name = key if type(key) is str else self._key(key)
            named.append((name, type(key).__name__, item))
        named.sort(key=lambda entry: entry[:2])
        plain: dict[str, Any] = {}
        labelled = False
        for count, (name, kind, item) in enumerate(named):
            if count >= self.limits.items or self.spent:
                plain["<left out>"] = _TOO_LARGE
                break
            # 1 and "1" are two keys of a mapping, and one of a JSON object.
            unique = name if name not in plain else f"{name} ({kind})"
            labelled = labelled or _labels_secret(name, item)
            self._put(plain, unique, item, depth)
        return _mask_labelled(plain) if labelled else plain

    def _key(self, key: Any) -> str:
        if type(key) is bytes:
            return key[: self.limits.text].decode("ascii", "backslashreplace")
        plain = _Coercion(Limits(depth=4, items=16, values=64)).value(key, 0)
        return plain if isinstance(plain, str) else json.dumps(plain)

    def _opaque(self, value: Any, depth: int) -> Any:
        attributes = getattr(value, "__dict__", None)
        names = sorted(n for n in attributes if not n.startswith("_")) if attributes else []
        if not names or self.opaque >= self.limits.opaque or _is_machinery(value):
            return f"<{_name(type(value))}>"
        self.opaque += 1
        try:
            return self._object(value, names, depth)
        finally:
            self.opaque -= 1

    def _object(self, value: Any, names: list[str], depth: int) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        labelled = False
        for count, name in enumerate(names):
            if count >= self.limits.items or self.spent:
                plain["<left out>"] = _TOO_LARGE
                break
            try:
                item = getattr(value, name)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  (a property may raise anything)
                plain[name] = f"<unreadable: {type(error).__name__}>"
                continue
            labelled = labelled or _labels_secret(name, item)
            self._put(plain, name, item, depth)
        return _mask_labelled(plain) if labelled else plain

    def _put(self, plain: dict[str, Any], name: str, item: Any, depth: int) -> None:
        secret = _hides(name, item)
        name = self.text(name)
        if secret:
            self.values -= 1
            plain[name] = MASK
        else:
            plain[name] = self.value(item, depth)

    def text(self, text: str) -> str:
        limit = self.limits.text
        # Masked before it is cut, so that no half of a secret stays; what masking reads is bounded.
        shown = mask_text(text[: 4 * limit])
        if len(shown) > limit or len(text) > 4 * limit:
            shown = f"{shown[:limit]}… ({len(text)} characters)"
        self.characters -= len(shown)
        # Addresses differ from run to run; lone surrogates are no Unicode.
        return _ADDRESS.sub("", shown).encode("utf-8", "replace").decode()


def _hides(name: str, item: Any) -> bool:
    """Whether what stands under that name is not to be shown."""
    return item is not None and type(item) is not bool and is_secret_name(name, value=item)


# A setting told as an object: {"name": "api_key", "value": "..."}.
_LABELS = frozenset(
    {"name", "id", "key", "variable", "var", "env", "field", "header", "option", "setting"}
)
_LABELLED = frozenset({"value", "val", "values", "default", "content", "data"})


def _labels_secret(name: str, item: Any) -> bool:
    return type(item) is str and name.lower() in _LABELS and is_secret_name(item)


def _mask_labelled(plain: dict[str, Any]) -> dict[str, Any]:
    return {
        name: MASK if name.lower() in _LABELLED and value is not None else value
        for name, value in plain.items()
    }


def _is_pair(item: Any) -> bool:
    return type(item) in {tuple, list} and len(item) == 2 and type(item[0]) is str


def _names_secret(pair: Any, *, bare: bool = False) -> bool:
    """Whether a pair is a secret's name and value; a bare `key` or `token` only among pairs."""
    name, value = pair
    if value is None or type(value) is bool or (is_bare_name(name) and not bare):
        return False
    return is_secret_name(name, value=value)


def _is_name(pair: Any) -> bool:
    return type(pair[1]) is str and is_secret_name(pair[1])


_UNKNOWN = object()
_NAMESPACES = frozenset({"SimpleNamespace", "Namespace"})
_TOO_LARGE = "<left out: the configuration is too large>"


def _is_machinery(value: Any) -> bool:
    """Whether it is the standard library's: a logger, lock, thread or socket, not settings."""
    kind = type(value)
    module = (kind.__module__ or "").partition(".")[0]
    return module in sys.stdlib_module_names and kind.__name__ not in _NAMESPACES


def _foreign(value: Any) -> Any:
    """Values of numpy and torch, and secrets of pydantic, known by their module."""
    kind = type(value)
    module = (kind.__module__ or "").partition(".")[0]
    if module == "pydantic" and kind.__name__.startswith("Secret"):
        return MASK
    if module in {"torch", "numpy", "jax", "jaxlib", "ml_dtypes"}:
        shape = getattr(value, "shape", None)
        if module in {"numpy", "ml_dtypes"} and shape == () and hasattr(value, "item"):
            item = value.item()
            if isinstance(item, (int, float)):
                return item if isinstance(item, bool) else _number(item)
            return mask_text(str(item))
        if shape is not None and hasattr(value, "dtype"):
            return f"<{kind.__name__} {value.dtype} {list(map(int, shape))}>"
        if kind.__name__ in {"dtype", "device", "layout", "memory_format"} or (
            module in {"numpy", "ml_dtypes"} and "dtype" in kind.__name__.lower()
        ):
            return str(value)
    return _UNKNOWN


def _fields(value: Any) -> list[str] | None:
    """Names of the fields of a dataclass, attrs or pydantic object; None for anything else."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    declared = getattr(kind, "__attrs_attrs__", None)
    if declared is not None:
        return [field.name for field in declared]
    declared = getattr(kind, "model_fields", None)
    if isinstance(declared, Mapping) and hasattr(kind, "__pydantic_validator__"):
        extra = getattr(value, "model_extra", None)
        return [*declared, *sorted(extra or {})]
    return None


def _name(value: Any) -> str:
    for _ in range(4):
        # functools.partial and decorated functions are called by what they wrap.
        if hasattr(value, "__qualname__") or not hasattr(value, "func"):
            break
        value = value.func
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if module and module != "builtins" else str(name)


def _number(value: float) -> int | float | str:
    if isinstance(value, int):
        number = int(value)
        return number if -_MAX_INT <= number < _MAX_INT else hex(number)[:80]
    # JSON has no such numbers, and readers differ on the spelling that Python gives them.
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")

"""JSON as its specification has it: what is read can be written again, and read by others."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

__all__ = ["load_json", "load_written_json"]


def load_json(data: bytes | str) -> Any:
    """The value; numbers that are none (`NaN`, `Infinity`, `1e999`) are refused.

    Raises:
        ValueError: no JSON, or such a number.
        RecursionError: nested too deeply.
    """
    return _loads(data)


def load_written_json(data: bytes | str) -> Any:
    """As `load_json`; a name given twice in one object is refused, too.

    For what a person writes, who meant both, and for what decides: readers differ on which counts.

    Raises:
        ValueError: as `load_json`, or such a name.
        RecursionError: nested too deeply.
    """
    return _loads(data, object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]  # for its effect
        raise ValueError(f"{twice[:100]!r} is given twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is out of range")
    return number


_loads = functools.partial(json.loads, parse_constant=_refuse, parse_float=_finite)

"""Durations in seconds, as people read and write them."""

from __future__ import annotations

import re

from neuron_store.errors import ConfigError

__all__ = ["human_duration", "parse_duration"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])\s*", re.ASCII)
_MOST = 100 * 366 * 86400.0


def human_duration(seconds: float) -> str:
    """Seconds with the largest unit that gives at least 1: `30 d`, `4.5 h`, `12 s`."""
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS[unit]:
            return f"{round(seconds / _UNITS[unit], 1):g} {unit}"
    return f"{seconds:.0f} s"


def parse_duration(text: str, *, option: str) -> float:
    """The seconds that `30d`, `12h`, `1d 12h`, `90 m`, `2w` or `0s` say.

    Args:
        text: what was given. A unit is needed: a bare number could be seconds or days.
        option: whose value it is, named in the error.

    Raises:
        ConfigError: no duration, negative, without a unit, or more than a hundred years.
    """
    plain, total, end = text.strip().lower(), 0.0, 0
    while match := _PART.match(plain, end):
        total += float(match[1]) * _UNITS[match[2]]
        end = match.end()
    if not plain or end != len(plain) or total > _MOST:
        raise ConfigError(
            f"{option} {text[:80]!r} is no duration; write 30d, 12h, 90m, 2w or 45s (units s, m, "
            "h, d, w; at most 100 years)"
        )
    return total

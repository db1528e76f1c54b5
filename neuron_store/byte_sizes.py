"""Sizes in bytes, as people read and write them."""

from __future__ import annotations

from neuron_store.errors import ConfigError

__all__ = ["human_bytes", "parse_bytes"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def human_bytes(size: int) -> str:
    """Bytes with a binary unit."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def parse_bytes(text: str, *, option: str) -> int:
    """The number of bytes that `20G`, `500 MiB`, `0.5t` or `2000000000` say; units are binary.

    Args:
        text: what was given.
        option: whose value it is, named in the error.

    Raises:
        ConfigError: no size, negative, or beyond 2**63.
    """
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = plain[-1:] if plain[-1:] in _UNITS else ""
    try:
        size = float(plain.removesuffix(unit)) * _UNITS[unit]
        if not 0 <= size < float(1 << 63):
            raise ValueError(text)  # noqa: TRY301  (one message for all)
    except ValueError:
        raise ConfigError(
            f"{option} {text[:80]!r} is no size; write 2000000000, 500M or 20G"
        ) from None
    return int(size)

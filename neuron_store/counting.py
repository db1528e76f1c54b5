"""Numbers of things, as people write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["counted", "ranks_text"]


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 graph`, `2,048 graphs`; `many` where the plural is no plain -s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3,7`, of ascending ranks."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)

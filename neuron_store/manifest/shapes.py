"""Shapes as the manifest spells them.

Inputs are the inside of a tuple (`4,` and `4, 2048`), outputs the inside of a list (`4` and
`4, 2048`); a scalar is empty in both. Both forms are the vendor's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["input_shape", "input_shapes", "output_shape", "shapes_text"]


def _dimension(size: Any) -> str:
    # A symbolic size (torch.SymInt) prints as its expression; an integer-like one as a number.
    return str(size if type(size) is int or not hasattr(size, "__index__") else size.__index__())


def input_shape(value: Any) -> str:
    """The shape of a traced input: a tensor, a tuple of sizes, a number, or text that is ready."""
    if type(value) is str:
        return value
    shape = getattr(value, "shape", value)
    if not isinstance(shape, (tuple, list)):
        # jax and numpy give tuples; what has no shape (a number, None) is a scalar.
        return ""
    if len(shape) == 1:
        return _dimension(shape[0]) + ","
    return ", ".join(map(_dimension, shape))


def input_shapes(values: Iterable[Any]) -> list[str]:
    """`input_shape` of each."""
    return [value if type(value) is str else input_shape(value) for value in values]


def output_shape(dimensions: Iterable[int]) -> str:
    """A result's dimensions; a negative one is unbounded and prints as `?`."""
    return ", ".join("?" if size < 0 else str(size) for size in dimensions)


def shapes_text(shapes: Sequence[str], limit: int = 4) -> str:
    """`[4] [4, 2048] and 3 more`, for people."""
    shown = " ".join(f"[{shape.removesuffix(',')}]" for shape in shapes[:limit])
    return shown + (f" and {len(shapes) - limit} more" if len(shapes) > limit else "")

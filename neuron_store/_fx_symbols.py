"""Symbolic shapes in a form that does not depend on the names a tracer happened to give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuron_store.errors import Unkeyable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["Symbols", "concrete", "is_symbolic"]


def is_symbolic(value: Any) -> bool:
    """Whether a size is a symbolic expression rather than a number."""
    return hasattr(value, "node") and getattr(value.node, "expr", None) is not None


class Symbols:
    """Names symbols `d0`, `d1`, ... in the order in which they are met.

    Two traces of one model may call the same dimension `s77` and `s13`; only the order of first
    use and the range that the tracer's guards allow tell what the symbol means.
    """

    def __init__(self) -> None:
        self._named: dict[Any, Any] = {}
        self._shape_env: ShapeEnv | None = None

    def text(self, value: Any) -> str:
        """A number or a symbolic expression as text."""
        if isinstance(value, int):
            return str(value)
        expr = value.node.expr
        if self._shape_env is None:
            self._shape_env = getattr(value.node, "shape_env", None)
        if expr.is_Symbol:
            return str(self._name(expr))
        for symbol in sorted(expr.free_symbols, key=str):
            self._name(symbol)
        return str(expr.xreplace(self._named))

    def _name(self, symbol: Any) -> Any:
        named = self._named.get(symbol)
        if named is None:
            import sympy  # noqa: PLC0415  (only dynamic shapes need it)

            named = sympy.Symbol(f"d{len(self._named)}", **symbol.assumptions0)
            self._named[symbol] = named
        return named

    def ranges(self) -> Sequence[str]:
        """Each symbol with the range that the guards leave it, in order of first use."""
        if not self._named:
            return []
        if self._shape_env is None:
            raise Unkeyable("a symbolic shape", "its tracer kept no ranges")
        known: Mapping[Any, Any] = self._shape_env.var_to_range
        found = []
        for symbol, named in self._named.items():
            limits = known.get(symbol)
            found.append(
                f"{named}:[{limits.lower},{limits.upper}]" if limits is not None else f"{named}:?"
            )
        return found


def concrete(value: Any, bindings: Mapping[Any, int]) -> int:
    """The number that a size is under `bindings` of symbols.

    Raises:
        Unkeyable: a symbol of it is bound by no input (it depends on data).
    """
    if not is_symbolic(value):
        return int(value)
    expr = value.node.expr
    known = bindings.get(expr)
    if known is not None:
        return known
    number = expr.xreplace(bindings)
    if not number.is_number:
        raise Unkeyable(f"size {expr}", "it depends on data, not on the inputs' shapes")
    return int(number)

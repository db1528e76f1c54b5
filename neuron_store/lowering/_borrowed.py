"""Programs for IREE must not write into the tensors that they are given. Imports jaxlib.

IREE takes an argument's memory for its own where the first thing that happens to it is an update
in place: a scatter, a written slice, a sort (iree-org/iree#16168; measured with 3.13, also that
other uses of the argument, an optimization barrier on it or returning it do not help, and that a
written slice ends in PERMISSION_DENIED or "must not overlap"). So what is updated is made anew
before, by an operation that cannot be optimised away; it is fused with what made it, if anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["own_updates"]

# Results that are the program's own memory whatever becomes of their operands: an update's operand
# was made anew in turn.
_OWN = frozenset(
    f"stablehlo.{name}"
    for name in ("constant", "dot_general", "dynamic_update_slice", "iota", "scatter", "sort")
)


def own_updates(module: Any) -> None:
    """Change a module of StableHLO so that every update in place is on memory of its own."""
    from jaxlib.mlir import ir  # noqa: PLC0415  (only who compiles)
    from jaxlib.mlir.dialects import stablehlo  # noqa: PLC0415

    with module.context, ir.Location.unknown():
        for op in list(_operations(module.operation)):
            for position in _updated(op):
                value = op.operands[position]
                if _may_be_borrowed(ir, value):
                    with ir.InsertionPoint(op):
                        op.operands[position] = _made_anew(ir, stablehlo, value)


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield from _operations(inner.operation)
                yield inner.operation


def _updated(op: Any) -> range:
    """Positions of the operands that the operation may write into."""
    if op.name == "stablehlo.dynamic_update_slice":
        return range(1)
    if op.name == "stablehlo.scatter":
        return range((len(op.operands) - 1) // 2)
    return range(len(op.operands)) if op.name == "stablehlo.sort" else range(0)


def _may_be_borrowed(ir: Any, value: Any) -> bool:
    owner = value.owner
    return isinstance(owner, ir.Block) or owner.name not in _OWN


def _made_anew(ir: Any, dialect: Any, value: Any) -> Any:
    """`value`, chosen by a condition that the compiler cannot see through."""
    kind = ir.RankedTensorType(value.type)
    element = kind.element_type
    number = ir.IntegerAttr if isinstance(element, ir.IntegerType) else ir.FloatAttr
    zero = ir.DenseElementsAttr.get_splat(kind, number.get(element, 0))
    yes = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
    true = ir.DenseElementsAttr.get_splat(yes, ir.BoolAttr.get(True))
    condition = dialect.OptimizationBarrierOp([dialect.ConstantOp(true).result]).results[0]
    return dialect.SelectOp(condition, value, dialect.ConstantOp(zero).result).result

"""Traces an ATen graph through the rules and writes StableHLO and HLO. Imports JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import jax
import torch
from torch.fx import GraphModule, Node

from neuron_store._fx_outputs import output_plan
from neuron_store._fx_symbols import concrete, is_symbolic
from neuron_store.errors import UnsupportedOperator
from neuron_store.lowering import (  # noqa: F401  (importing a group registers its rules)
    attention,
    control_flow,
    elementwise,
    indexing,
    matmul,
    reductions,
    shape,
    transcendental,
)
from neuron_store.lowering._borrowed import own_updates
from neuron_store.lowering._jax_settings import pinned_settings
from neuron_store.lowering._rules import RULES, cast, constant_array, jax_dtype
from neuron_store.lowering.operators import OPERATORS, operator_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Exported", "TensorSpec", "export"]

_CONVERSIONS = ("aten._to_copy.default", "prims.convert_element_type.default")


@attrs.frozen
class TensorSpec:
    """Shape and type of an input tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Exported:
    """One graph in the two forms that compilers read. Neither holds a path of this machine."""

    stablehlo: bytes
    """MLIR as text, for IREE: it updates nothing that it is given."""
    hlo: bytes
    """A serialised HloModuleProto, its root a tuple."""


def export(
    gm: GraphModule, inputs: Sequence[TensorSpec | int | None], bindings: Mapping[Any, int]
) -> Exported:
    """Lower `gm`; its tensor inputs become the parameters of `main`, in order.

    The results of `main` are those of `output_plan`.

    Args:
        gm: a functional ATen graph, not changed.
        inputs: for each placeholder a tensor's description, or the number it stands for.
        bindings: symbols of symbolic shapes to the sizes to specialise for.

    Raises:
        UnsupportedOperator: an operator, or a form of one, that has no rule.
    """
    tensors = [spec for spec in inputs if isinstance(spec, TensorSpec)]
    plan = output_plan(gm)

    def main(*given: Any) -> Any:
        rest = iter(given)
        args = [next(rest) if isinstance(spec, TensorSpec) else spec for spec in inputs]
        values = _Interpreter(gm, bindings).values(*args)
        found = {o.result: values[o.node] for o in plan if o.result is not None and o.node}
        return tuple(jax.numpy.asarray(found[position]) for position in sorted(found))

    try:
        with pinned_settings():
            structs = [jax.ShapeDtypeStruct(t.shape, jax_dtype(t.dtype)) for t in tensors]
            traced = jax.jit(main, keep_unused=True).trace(*structs)
            module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
            hlo = _hlo(_text(module))
            own_updates(module)
            return Exported(_text(module).encode(), hlo)
    except (UnsupportedOperator, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedOperator("a graph", _unforeseen(error)) from error


def _text(module: Any) -> str:
    return str(module.operation.get_asm(enable_debug_info=False))


def _unforeseen(error: Exception) -> str:
    return f"lowering it fails: {type(error).__name__}: {error}".splitlines()[0]


def _hlo(stablehlo: str) -> bytes:
    # From the text, since Lowered.compiler_ir("hlo") would put source paths of this machine in it.
    from jaxlib import _jax  # noqa: PLC0415  (no public name for it)

    computation = _jax.mlir.mlir_module_to_xla_computation(
        stablehlo, use_tuple_args=False, return_tuple=True
    )
    return _without_id(computation.as_serialized_hlo_module_proto())


def _without_id(module: bytes) -> bytes:
    """The HloModuleProto without its `id` (field 5), which counts modules in this process.

    With it two ranks' compiles of one graph would differ, and the second be a conflict.
    """
    kept, at = bytearray(), 0
    while at < len(module):
        start = at
        tag, at = _varint(module, at)
        if tag & 7 == 2:
            length, at = _varint(module, at)
            at += length
        else:  # the message's other fields are numbers
            _, at = _varint(module, at)
        if tag >> 3 != 5:
            kept += module[start:at]
    return bytes(kept)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


class _Interpreter:
    """Runs a graph's nodes over JAX values."""

    def __init__(self, gm: GraphModule, bindings: Mapping[Any, int]) -> None:
        self._gm = gm
        self._bindings = bindings
        self._constants: set[Node] = set()

    def run(self, *args: Any) -> tuple[Any, ...]:
        """What the graph returns."""
        values = self.values(*args)
        returned = next(node for node in self._gm.graph.nodes if node.op == "output").args[0]
        found = self._resolved(returned, values)
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    def values(self, *args: Any) -> Mapping[Node, Any]:
        """The value of every node."""
        rest = iter(args)
        values: dict[Node, Any] = {}
        for node in self._gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "get_attr":
                values[node] = self._attribute(str(node.target))
            elif node.op != "output":
                values[node] = self._call(node, values)
            if node.op != "placeholder" and self._constants.issuperset(node.all_input_nodes):
                self._constants.add(node)
        return values

    def _resolved(self, value: Any, values: Mapping[Node, Any]) -> Any:
        if isinstance(value, Node):
            return values[value]
        if isinstance(value, list | tuple):
            return type(value)(self._resolved(item, values) for item in value)
        if isinstance(value, slice):
            return slice(
                *(self._resolved(part, values) for part in (value.start, value.stop, value.step))
            )
        return concrete(value, self._bindings) if is_symbolic(value) else value

    def _attribute(self, target: str) -> Any:
        value: Any = self._gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            return _Interpreter(value, self._bindings).run
        if isinstance(value, torch.Tensor):
            return constant_array(value)
        return value

    def _call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        args = self._resolved(node.args, values)
        kwargs = {name: self._resolved(value, values) for name, value in node.kwargs.items()}
        name = operator_name(node)
        rule: Callable[..., Any] | None = RULES.get(name)
        if rule is None:
            target = node.target
            if node.op != "call_function" or isinstance(target, torch._ops.OperatorBase):
                raise UnsupportedOperator(name)
            # Arithmetic on sizes, and getitem.
            assert callable(target)
            return target(*args, **kwargs)
        if name in OPERATORS["reductions"] and self._folds(node.args[0]):
            args = (jax.lax.optimization_barrier(args[0]), *args[1:])
        try:
            found = rule(*args, **kwargs)
        except (UnsupportedOperator, MemoryError):
            raise
        except Exception as error:
            # A case that the rule did not foresee; eager may well have it.
            raise UnsupportedOperator(name, _unforeseen(error)) from error
        return self._checked(name, node, found)

    def _folds(self, operand: Any) -> bool:
        """Whether IREE may find that all elements of what is reduced have one constant value.

        If it converts that value, too, IREE 3.13 reduces one element in the place of all.
        """
        if operand in self._constants:
            return True
        if not isinstance(operand, Node) or operator_name(operand) not in _CONVERSIONS:
            return False
        given = operand.args[0].meta.get("val") if isinstance(operand.args[0], Node) else None
        return isinstance(given, torch.Tensor) and not given.dtype.is_floating_point

    def _checked(self, name: str, node: Node, result: Any) -> Any:
        """The result in the type that the tracer says it has; another shape is a rule's mistake."""
        expected = node.meta.get("val")
        if isinstance(expected, list | tuple) and isinstance(result, tuple):
            pairs = zip(result, expected, strict=False)
            return tuple(self._as_expected(name, r, e) for r, e in pairs)
        return self._as_expected(name, result, expected)

    def _as_expected(self, name: str, result: Any, expected: Any) -> Any:
        if not isinstance(expected, torch.Tensor) or not isinstance(result, jax.Array):
            return result
        wanted = tuple(concrete(size, self._bindings) for size in expected.shape)
        if result.shape != wanted:
            raise UnsupportedOperator(name, f"its rule gives shape {result.shape}, not {wanted}")
        return cast(result, jax_dtype(expected.dtype))

"""An FX graph as text that is equal where graphs are, in any process, and only there.

Nodes are numbered in order, so their names do not count. What a graph refers to counts by value:
constants by their bytes, nested graph modules by their own text.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import operator
import re
import sys
import types
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from neuron_store._fx_symbols import Symbols, is_symbolic
from neuron_store.errors import Unkeyable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["GraphText", "normal_device"]

# Namespaces whose operators come with the framework, and so with its version.
_FRAMEWORK = frozenset(
    {
        "_c10d_functional",
        "_c10d_functional_autograd",
        "aten",
        "c10d_functional",
        "inductor_prims",
        "prim",
        "prims",
        "profiler",
        "quantized",
        "quantized_decomposed",
        "rngprims",
    }
)
# Higher-order operators whose meaning lies in their arguments alone. Others refer to tables of the
# process (Triton's wrapper holds a kernel's index), which a key cannot carry.
_HIGHER_ORDER = frozenset(
    {
        "associative_scan",
        "checkpoint",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "tag_activation_checkpoint",
        "while_loop",
        "wrap",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)
_DEVICE = re.compile(r"(neuron|xla|cuda|privateuseone|hpu|xpu|mps|npu|meta|cpu):\d+\Z")
_MODULES = frozenset({"_operator", "operator", "math", "builtins"})
_PLAIN_TENSORS = frozenset({"Tensor", "Parameter", "Buffer", "FakeTensor", "FunctionalTensor"})


def normal_device(device: torch.device | str) -> str:
    """The device with its index set to 0: ranks differ in it, and their artifacts do not."""
    text = str(device)
    return text.rsplit(":", 1)[0] + ":0" if _DEVICE.match(text) else text


class GraphText:
    """Writes graphs as text; collects inputs, symbols, operators and process groups on the way.

    Args:
        known_operators: `namespace::name` of custom operators whose source the caller's extra
            components cover.
    """

    def __init__(self, known_operators: Collection[str] = ()) -> None:
        self.symbols = Symbols()
        self.operators: Counter[str] = Counter()
        self.groups: list[tuple[int, ...]] = []
        self._known = frozenset(known_operators)
        self._targets: dict[Any, str] = {}
        self._group_args: dict[Any, tuple[int | None, str] | None] = {}
        self._writers: dict[type, Callable[[Any], str]] = {
            type(None): str,
            bool: str,
            int: str,
            float: float.hex,
            complex: lambda v: f"complex({v.real.hex()},{v.imag.hex()})",
            str: lambda v: json.dumps(normal_device(v)),
            bytes: lambda v: f"bytes({v.hex()})",
            torch.dtype: str,
            torch.layout: str,
            torch.memory_format: str,
            torch.device: lambda v: f"device({normal_device(v)})",
            type(...): lambda _: "...",
        }

    def inputs(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Sequence[str]:
        """Each input's dtype, shape, stride and device.

        The tracer's own record counts where it has symbols, since example inputs are concrete;
        elsewhere the example inputs count, since the record may be of an earlier trace.
        """
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        if example_inputs and len(example_inputs) != len(placeholders):
            raise Unkeyable(
                "the graph",
                f"it has {len(placeholders)} inputs and {len(example_inputs)} examples were given",
            )
        described = []
        for position, node in enumerate(placeholders):
            recorded = node.meta.get("val", node.meta.get("example_value"))
            given = example_inputs[position] if example_inputs else recorded
            described.append(self.input(recorded if _has_symbols(recorded) else given))
        return described

    def input(self, value: Any) -> str:
        """One input as text."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or isinstance(value, bool | int | float | complex | str):
            return f"{type(value).__name__} {self._literal(value)}"
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return f"{type(value).__name__} {self.symbols.text(value)}"
        raise Unkeyable(f"an input of type {type(value).__qualname__}", "its meaning is not known")

    def graph(self, gm: GraphModule) -> str:
        """The whole graph as text, nested graph modules in it."""
        lines = []
        numbers: dict[Node, str] = {}
        for node in gm.graph.nodes:
            line = self._node(gm, node, numbers)
            numbers[node] = f"%{len(numbers)}"
            lines.append(line)
        return "\n".join(lines)

    # -- nodes --------------------------------------------------------------------------------

    def _node(self, gm: GraphModule, node: Node, numbers: Mapping[Node, str]) -> str:
        if node.op == "placeholder":
            return f"in({self._sequence(node.args, numbers)})"
        if node.op == "output":
            return f"out({self._value(node.args[0], numbers)})"
        if node.op == "get_attr":
            return self._attribute(gm, str(node.target))
        if node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            if not isinstance(module, GraphModule):
                raise Unkeyable(
                    f"module {type(module).__qualname__}", "its code is outside the graph"
                )
            target = f"graph{{\n{self.graph(module)}\n}}"
        elif node.op == "call_method":
            target = f"method {node.target}"
        else:
            target = self._target(node.target)
        self.operators[target if len(target) < 200 else "graph"] += 1
        args, kwargs = self._without_groups(node)
        text = f"{target}({self._sequence(args, numbers)}"
        for name in sorted(kwargs):
            text += f",{name}={self._value(kwargs[name], numbers)}"
        return text + ")"

    def _target(self, target: Any) -> str:
        text = self._targets.get(target)
        if text is None:
            text = self._targets[target] = self._describe_target(target)
        return text

    def _describe_target(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            name = target._schema.name if isinstance(target, torch._ops.OpOverload) else None
            name = name or target._qualified_op_name
            if name.split("::")[0] not in _FRAMEWORK and name not in self._known:
                raise Unkeyable(
                    f"custom operator {name}",
                    "its source is not in the graph",
                    f'pass a digest of it as options={{"extra": {{"op:{name}": digest}}}}',
                )
            return str(target)
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target.name() not in _HIGHER_ORDER:
                raise Unkeyable(
                    f"higher-order operator {target.name()}", "it may refer to this process's state"
                )
            return f"higher_order.{target.name()}"
        return _importable(target)

    def _without_groups(self, node: Node) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The node's arguments, process groups replaced by their position among `groups`."""
        target = node.target
        if target not in self._group_args:
            self._group_args[target] = _group_argument(target)
        where = self._group_args[target]
        if where is None:
            return node.args, node.kwargs
        position, name = where
        args, kwargs = list(node.args), dict(node.kwargs)
        if name in kwargs:
            kwargs[name] = self._group(kwargs[name])
        elif position is not None and position < len(args):
            args[position] = self._group(args[position])
        return args, kwargs

    def _group(self, group: Any) -> str:
        ranks = tuple(group) if isinstance(group, list | tuple) else _ranks_of(str(group))
        if ranks not in self.groups:
            self.groups.append(ranks)
        return f"group {self.groups.index(ranks)}"

    def _attribute(self, gm: GraphModule, target: str) -> str:
        value: Any = gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            return f"graph{{\n{self.graph(value)}\n}}"
        if isinstance(value, torch.Tensor):
            return self._constant(value)
        return f"attribute {self._value(value, {})}"

    # -- values -------------------------------------------------------------------------------

    def _sequence(self, values: Sequence[Any], numbers: Mapping[Node, str]) -> str:
        return ",".join([self._value(value, numbers) for value in values])

    def _value(self, value: Any, numbers: Mapping[Node, str]) -> str:
        if isinstance(value, Node):
            return numbers[value]
        writer = self._writers.get(type(value))
        if writer is not None:
            return writer(value)
        if isinstance(value, list):
            return f"[{self._sequence(value, numbers)}]"
        if isinstance(value, tuple):
            # torch.Size and FX's immutable tuples mean what a tuple means; a named one may not.
            if hasattr(value, "_fields"):
                raise Unkeyable(f"a {type(value).__qualname__}", "its class is not in the graph")
            return f"({self._sequence(value, numbers)})"
        if isinstance(value, dict):
            return self._mapping(value, numbers)
        if isinstance(value, slice | range):
            parts = self._sequence((value.start, value.stop, value.step), numbers)
            return f"{type(value).__name__}({parts})"
        return self._literal(value)

    def _mapping(self, value: dict[Any, Any], numbers: Mapping[Node, str]) -> str:
        if not all(isinstance(name, str) for name in value):
            raise Unkeyable("a mapping", "one of its names is not a string")
        # Order counts: a model that returns a mapping returns it in this order.
        return (
            "{"
            + ",".join(f"{json.dumps(k)}:{self._value(v, numbers)}" for k, v in value.items())
            + "}"
        )

    def _literal(self, value: Any) -> str:
        writer = self._writers.get(type(value))
        if writer is not None:
            return writer(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.symbols.text(value)
        if isinstance(value, torch.Tensor):
            return self._constant(value)
        if isinstance(value, enum.Enum) and type(value).__module__.split(".")[0] == "torch":
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            return self._target(value)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return _importable(value)
        raise Unkeyable(f"a {type(value).__qualname__}", "its meaning is not known")

    def _tensor(self, value: torch.Tensor) -> str:
        kind = type(value).__name__
        if kind not in _PLAIN_TENSORS or value.layout is not torch.strided or value.is_quantized:
            raise Unkeyable(f"a tensor of kind {kind}, {value.layout}", "it is not a plain tensor")
        size = ",".join(map(self.symbols.text, value.shape))
        stride = ",".join(map(self.symbols.text, value.stride()))
        text = f"{str(value.dtype)[6:]}[{size}]({stride})@{normal_device(value.device)}"
        if value.dtype.is_complex and value.is_conj():
            text += " conj"
        return text + (" neg" if value.is_neg() else "")

    def _constant(self, value: torch.Tensor) -> str:
        if type(value).__name__ == "FakeTensor" or value.device.type == "meta":
            raise Unkeyable("a constant tensor", "it has no values here")
        # Tracing may go on around us, and would record what we do to the constant.
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            text = self._tensor(value)
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return f"constant {text} {hashlib.sha256(data).hexdigest()}"


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(map(is_symbolic, value.shape)) or any(map(is_symbolic, value.stride()))
    return is_symbolic(value)


def _importable(target: Any) -> str:
    """A function of the framework or of Python by name; others have code the key cannot see."""
    module = getattr(target, "__module__", None) or ""
    name = str(getattr(target, "__qualname__", "") or getattr(target, "__name__", ""))
    owner: Any = sys.modules.get(module)
    if module in _MODULES or module.split(".")[0] == "torch":
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if owner is target:
            return f"{module}.{name}"
    # Functions of torch's C extension know no module of their own.
    last = name.rsplit(".", 1)[-1]
    for home in (torch, torch.nn.functional, torch.Tensor, operator, math, torch._C._nn):
        if last and getattr(home, last, None) is target:
            return f"{home.__name__}.{last}"
    what = f"function {module}.{name}" if name else f"a {type(target).__qualname__}"
    raise Unkeyable(what, "its code is not in the graph")


def _group_argument(target: Any) -> tuple[int | None, str] | None:
    """Where an operator takes its process group, if it takes one."""
    schema = getattr(target, "_schema", None)
    if schema is None or "c10d" not in schema.name:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.name in {"group_name", "ranks"}:
            return (None if argument.kwarg_only else position), argument.name
    return None


def _ranks_of(group_name: str) -> tuple[int, ...]:
    # Swallowing a failure here would let two ranks disagree about the key without a word.
    import torch.distributed as dist  # noqa: PLC0415  (only graphs with collectives need it)

    try:
        group = dist.distributed_c10d._resolve_process_group(group_name)
        return tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, LookupError) as error:
        raise Unkeyable(
            f"process group {group_name!r}", f"it is not known here ({error})"
        ) from error

"""What a graph returns: results of its program, its own inputs, and plain numbers."""

from __future__ import annotations

import operator
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.fx import Node

from neuron_store._fx_symbols import concrete, is_symbolic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.fx import GraphModule

__all__ = ["Output", "View", "output_plan"]

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten.view.dtype,
    }
)


@attrs.frozen
class View:
    """One step from a tensor to a view of it."""

    target: Any
    args: tuple[Any, ...]
    """After the tensor; sizes may be symbolic."""
    kwargs: Mapping[str, Any]

    def of(self, value: Any, bindings: Mapping[Any, int]) -> Any:
        """The view of `value`, symbols of its sizes bound."""
        args = [_bound(arg, bindings) for arg in self.args]
        return self.target(
            value, *args, **{name: _bound(arg, bindings) for name, arg in self.kwargs.items()}
        )


@attrs.frozen
class Output:
    """One output of a graph. Exactly one of the first three says where it comes from."""

    result: int | None = None
    """Position among the results of the compiled program."""
    source: int | None = None
    """Position among the graph's inputs: passed through, not copied."""
    value: Any = None
    """A number, a symbolic one too, or None."""
    like: torch.Tensor | None = None
    """The tracer's record of a result: its shape, strides and type."""
    node: Node | None = None
    """Whose value the result is."""
    views: tuple[View, ...] = ()
    """From the result to the output, which shares its memory with another output."""


def output_plan(gm: GraphModule) -> Sequence[Output]:
    """The outputs of `gm` in their order.

    Outputs that are views of one tensor share one result, as they share memory in eager mode.
    """
    nodes = list(gm.graph.nodes)
    inputs = {n: i for i, n in enumerate(n for n in nodes if n.op == "placeholder")}
    returned: Any = nodes[-1].args[0]
    items = list(returned) if isinstance(returned, list | tuple) else [returned]
    sharing = Counter(_base(node) for node in {n for n in items if isinstance(n, Node)})
    plan: list[Output] = []
    results: dict[Node, int] = {}
    for item in items:
        if not isinstance(item, Node):
            plan.append(Output(value=item))
            continue
        recorded = item.meta.get("val")
        if item in inputs:
            plan.append(Output(source=inputs[item]))
        elif isinstance(recorded, torch.Tensor) or recorded is None:
            base = _base(item)
            # A view of an input is AOT Autograd's to make anew, and comes as a result.
            shared = sharing[base] > 1 and base not in inputs and base is not item
            node = base if shared else item
            plan.append(
                Output(
                    result=results.setdefault(node, len(results)),
                    like=node.meta.get("val"),
                    node=node,
                    views=tuple(_views(item)) if shared else (),
                )
            )
        else:
            plan.append(Output(value=recorded))
    return plan


def _seen_through(node: Node) -> Node | None:
    """The tensor, or list of tensors, that the node's value is a view of."""
    takes = node.target in _VIEWS or (
        node.target is operator.getitem
        and isinstance(node.args[0], Node)
        and node.args[0].target in _VIEWS
    )
    first = node.args[0] if node.op == "call_function" and takes else None
    return first if isinstance(first, Node) else None


def _base(node: Node) -> Node:
    while (before := _seen_through(node)) is not None:
        node = before
    return node


def _views(node: Node) -> Iterator[View]:
    before = _seen_through(node)
    if before is not None:
        yield from _views(before)
        rest = tuple(_plain(arg) for arg in node.args[1:])
        yield View(node.target, rest, {name: _plain(arg) for name, arg in node.kwargs.items()})


def _plain(arg: Any) -> Any:
    """An argument of the graph as a value: a size that was computed is a symbol by its record."""
    if isinstance(arg, Node):
        return arg.meta["val"]
    return [_plain(item) for item in arg] if isinstance(arg, list | tuple) else arg


def _bound(arg: Any, bindings: Mapping[Any, int]) -> Any:
    if isinstance(arg, list):
        return [_bound(item, bindings) for item in arg]
    return concrete(arg, bindings) if is_symbolic(arg) else arg

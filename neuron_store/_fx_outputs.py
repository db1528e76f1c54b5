"""What a graph returns: results of its program, its own inputs, and plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.fx import Node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule

__all__ = ["Output", "output_plan"]


@attrs.frozen
class Output:
    """One output of a graph. Exactly one of the three says where it comes from."""

    result: int | None = None
    """Position among the results of the compiled program."""
    source: int | None = None
    """Position among the graph's inputs: passed through, not copied."""
    value: Any = None
    """A number, a symbolic one too, or None."""
    like: torch.Tensor | None = None
    """The tracer's record of a result: its shape, strides and type."""


def output_plan(gm: GraphModule) -> Sequence[Output]:
    """The outputs of `gm` in their order."""
    nodes = list(gm.graph.nodes)
    inputs = {n: i for i, n in enumerate(n for n in nodes if n.op == "placeholder")}
    returned: Any = nodes[-1].args[0]
    plan: list[Output] = []
    results: dict[Node, int] = {}
    for item in returned if isinstance(returned, list | tuple) else (returned,):
        if not isinstance(item, Node):
            plan.append(Output(value=item))
            continue
        recorded = item.meta.get("val")
        if item in inputs:
            plan.append(Output(source=inputs[item]))
        elif isinstance(recorded, torch.Tensor) or recorded is None:
            plan.append(Output(result=results.setdefault(item, len(results)), like=recorded))
        else:
            plan.append(Output(value=recorded))
    return plan

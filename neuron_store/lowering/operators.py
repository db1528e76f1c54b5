"""Which operators the lowering has, known without importing JAX."""

from __future__ import annotations

import functools
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OPERATORS", "lowering_version", "missing_operators", "operator_name"]

OPERATORS: Mapping[str, frozenset[str]] = {
    "attention": frozenset(
        {
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        }
    ),
    "control_flow": frozenset(
        {
            "higher_order.cond",
            "higher_order.invoke_subgraph",
            "higher_order.wrap_with_set_grad_enabled",
        }
    ),
    "elementwise": frozenset(
        {
            "aten._to_copy.default",
            "aten.abs.default",
            "aten.add.Scalar",
            "aten.add.Tensor",
            "aten.addcmul.default",
            "aten.alias.default",
            "aten.bitwise_and.Scalar",
            "aten.bitwise_and.Tensor",
            "aten.bitwise_not.default",
            "aten.bitwise_or.Scalar",
            "aten.bitwise_or.Tensor",
            "aten.bitwise_xor.Scalar",
            "aten.bitwise_xor.Tensor",
            "aten.ceil.default",
            "aten.clamp.Tensor",
            "aten.clamp.default",
            "aten.clamp_max.Tensor",
            "aten.clamp_max.default",
            "aten.clamp_min.Tensor",
            "aten.clamp_min.default",
            "aten.clone.default",
            "aten.contiguous.default",
            "aten.copy.default",
            "aten.detach.default",
            "aten.div.Scalar",
            "aten.div.Scalar_mode",
            "aten.div.Tensor",
            "aten.div.Tensor_mode",
            "aten.eq.Scalar",
            "aten.eq.Tensor",
            "aten.erf.default",
            "aten.exp.default",
            "aten.exp2.default",
            "aten.expm1.default",
            "aten.floor.default",
            "aten.floor_divide.default",
            "aten.fmod.Scalar",
            "aten.fmod.Tensor",
            "aten.ge.Scalar",
            "aten.ge.Tensor",
            "aten.gelu.default",
            "aten.gt.Scalar",
            "aten.gt.Tensor",
            "aten.hardtanh.default",
            "aten.isinf.default",
            "aten.isnan.default",
            "aten.isneginf.default",
            "aten.isposinf.default",
            "aten.le.Scalar",
            "aten.le.Tensor",
            "aten.leaky_relu.default",
            "aten.lift_fresh_copy.default",
            "aten.log.default",
            "aten.log10.default",
            "aten.log1p.default",
            "aten.log2.default",
            "aten.logical_and.default",
            "aten.logical_not.default",
            "aten.logical_or.default",
            "aten.logical_xor.default",
            "aten.lt.Scalar",
            "aten.lt.Tensor",
            "aten.masked_fill.Scalar",
            "aten.masked_fill.Tensor",
            "aten.maximum.default",
            "aten.minimum.default",
            "aten.mul.Scalar",
            "aten.mul.Tensor",
            "aten.ne.Scalar",
            "aten.ne.Tensor",
            "aten.neg.default",
            "aten.reciprocal.default",
            "aten.relu.default",
            "aten.remainder.Scalar",
            "aten.remainder.Tensor",
            "aten.round.default",
            "aten.rsqrt.default",
            "aten.rsub.Scalar",
            "aten.rsub.Tensor",
            "aten.sgn.default",
            "aten.sigmoid.default",
            "aten.sign.default",
            "aten.silu.default",
            "aten.sqrt.default",
            "aten.square.default",
            "aten.sub.Scalar",
            "aten.sub.Tensor",
            "aten.threshold_backward.default",
            "aten.trunc.default",
            "aten.where.Scalar",
            "aten.where.ScalarOther",
            "aten.where.ScalarSelf",
            "aten.where.self",
            "prims.convert_element_type.default",
        }
    ),
    "indexing": frozenset(
        {
            "aten._unsafe_index_put.default",
            "aten.embedding.default",
            "aten.gather.default",
            "aten.index.Tensor",
            "aten.index_add.default",
            "aten.index_copy.default",
            "aten.index_put.default",
            "aten.index_select.default",
            "aten.scatter.src",
            "aten.scatter.value",
            "aten.scatter_add.default",
        }
    ),
    "matmul": frozenset(
        {
            "aten.addmm.default",
            "aten.baddbmm.default",
            "aten.bmm.default",
            "aten.dot.default",
            "aten.mm.default",
            "aten.mv.default",
        }
    ),
    "reductions": frozenset(
        {
            "aten._log_softmax.default",
            "aten._native_batch_norm_legit_no_training.default",
            "aten._softmax.default",
            "aten.all.default",
            "aten.all.dim",
            "aten.all.dims",
            "aten.amax.default",
            "aten.amin.default",
            "aten.any.default",
            "aten.any.dim",
            "aten.any.dims",
            "aten.argmax.default",
            "aten.argmin.default",
            "aten.cumprod.default",
            "aten.cumsum.default",
            "aten.linalg_vector_norm.default",
            "aten.logsumexp.default",
            "aten.max.default",
            "aten.max.dim",
            "aten.mean.default",
            "aten.mean.dim",
            "aten.min.default",
            "aten.min.dim",
            "aten.native_layer_norm.default",
            "aten.prod.default",
            "aten.prod.dim_int",
            "aten.sort.default",
            "aten.sort.stable",
            "aten.std.correction",
            "aten.sum.default",
            "aten.sum.dim_IntList",
            "aten.topk.default",
            "aten.var.correction",
            "aten.var_mean.correction",
        }
    ),
    "shape": frozenset(
        {
            "aten._unsafe_view.default",
            "aten.arange.default",
            "aten.arange.start",
            "aten.arange.start_step",
            "aten.cat.default",
            "aten.constant_pad_nd.default",
            "aten.empty.memory_format",
            "aten.empty_like.default",
            "aten.empty_strided.default",
            "aten.expand.default",
            "aten.eye.default",
            "aten.flip.default",
            "aten.full.default",
            "aten.full_like.default",
            "aten.new_empty.default",
            "aten.new_empty_strided.default",
            "aten.new_full.default",
            "aten.new_ones.default",
            "aten.new_zeros.default",
            "aten.ones.default",
            "aten.ones_like.default",
            "aten.permute.default",
            "aten.repeat.default",
            "aten.reshape.default",
            "aten.roll.default",
            "aten.scalar_tensor.default",
            "aten.select.int",
            "aten.select_scatter.default",
            "aten.slice.Tensor",
            "aten.slice_scatter.default",
            "aten.split.Tensor",
            "aten.split_with_sizes.default",
            "aten.squeeze.default",
            "aten.squeeze.dim",
            "aten.squeeze.dims",
            "aten.stack.default",
            "aten.t.default",
            "aten.transpose.int",
            "aten.tril.default",
            "aten.triu.default",
            "aten.unbind.int",
            "aten.unsqueeze.default",
            "aten.view.default",
            "aten.view.dtype",
            "aten.zeros.default",
            "aten.zeros_like.default",
        }
    ),
    "transcendental": frozenset(
        {
            "aten.atan2.default",
            "aten.cos.default",
            "aten.pow.Scalar",
            "aten.pow.Tensor_Scalar",
            "aten.pow.Tensor_Tensor",
            "aten.sin.default",
            "aten.tanh.default",
        }
    ),
}
"""Names of operators by the group (and module) that has their rules."""

_ALL = frozenset().union(*OPERATORS.values())


def operator_name(node: Node) -> str:
    """The operator of a node as `OPERATORS` and messages spell it."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, str | torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def missing_operators(gm: GraphModule) -> Sequence[str]:
    """Operators of the graph, and of graphs nested in it, that have no rule; each once."""
    missing: dict[str, None] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value: Any = gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if isinstance(value, GraphModule):
                missing.update(dict.fromkeys(missing_operators(value)))
        elif node.op not in {"placeholder", "output"}:
            name = operator_name(node)
            if name not in _ALL and not _works_on_sizes(node):
                missing[name] = None
    return list(missing)


def _works_on_sizes(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, torch._ops.OperatorBase):
        return False
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    return module in {"_operator", "math", "builtins"} or name.startswith(("sym_", "_sym_"))


@functools.cache
def lowering_version() -> str:
    """A digest of this package's source: other rules may make another artifact of one graph."""
    digest = hashlib.sha256()
    for file in sorted(files(__package__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".py"):
            data = file.read_bytes()
            digest.update(f"{file.name}:{len(data)}:".encode() + data)
    return digest.hexdigest()[:16]

"""What becomes of operators that have no rule of their own: others that have one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch._decomp import get_decompositions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["decompositions"]

_aten = torch.ops.aten
# Left to torch's own decompositions: gradients mostly.
_BY_TORCH = (
    _aten._log_softmax_backward_data,
    _aten._native_batch_norm_legit,
    _aten._native_batch_norm_legit_functional,
    _aten._prelu_kernel,
    _aten._prelu_kernel_backward,
    _aten._softmax_backward_data,
    _aten._unsafe_index,
    _aten._unsafe_masked_index,
    _aten._unsafe_masked_index_put_accumulate,
    _aten.addcdiv,
    _aten.binary_cross_entropy,
    _aten.binary_cross_entropy_backward,
    _aten.binary_cross_entropy_with_logits,
    _aten.celu,
    _aten.deg2rad,
    _aten.elu,
    _aten.elu_backward,
    _aten.embedding_dense_backward,
    _aten.fill,
    _aten.frac,
    _aten.gelu_backward,
    _aten.glu,
    _aten.glu_backward,
    _aten.hardshrink,
    _aten.hardsigmoid,
    _aten.hardsigmoid_backward,
    _aten.hardswish,
    _aten.hardswish_backward,
    _aten.hardtanh_backward,
    _aten.heaviside,
    _aten.huber_loss,
    _aten.huber_loss_backward,
    _aten.index_fill,
    _aten.leaky_relu_backward,
    _aten.lerp,
    _aten.log_sigmoid_backward,
    _aten.log_sigmoid_forward,
    _aten.logaddexp,
    _aten.logit,
    _aten.logit_backward,
    _aten.mish,
    _aten.mish_backward,
    _aten.mse_loss,
    _aten.mse_loss_backward,
    _aten.nan_to_num,
    _aten.native_batch_norm,
    _aten.native_batch_norm_backward,
    _aten.native_group_norm,
    _aten.native_group_norm_backward,
    _aten.native_layer_norm_backward,
    _aten.nll_loss_backward,
    _aten.nll_loss_forward,
    _aten.relu6,
    _aten.select_backward,
    _aten.sigmoid_backward,
    _aten.silu_backward,
    _aten.sinc,
    _aten.slice_backward,
    _aten.smooth_l1_loss,
    _aten.smooth_l1_loss_backward,
    _aten.soft_margin_loss,
    _aten.soft_margin_loss_backward,
    _aten.softplus,
    _aten.softplus_backward,
    _aten.softshrink,
    _aten.special_entr,
    _aten.std_mean,
    _aten.tanh_backward,
    _aten.threshold,
    _aten.unfold_backward,
    _aten.xlogy,
    _aten.zero,
)


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Operator to the function that says it in others, for AOT Autograd."""
    return {
        **get_decompositions(_BY_TORCH),
        _aten._native_multi_head_attention.default: _attention,
        _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    }


# The two fused operators of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in inference.
# torch has no decomposition of them. They follow native/transformers/{attention,transformer}.cpp,
# where a mask says which scores do NOT count, whatever its type.


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    batch, length, _ = query.shape
    width = embed_dim // num_head
    parts = zip(
        (query, key, value), qkv_weight.split(embed_dim), qkv_bias.split(embed_dim), strict=True
    )
    q, k, v = (
        F.linear(x, weight, bias).view(batch, -1, num_head, width).transpose(1, 2)
        for x, weight, bias in parts
    )
    scores = (q * width**-0.5) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_over_scores(mask, mask_type), float("-inf"))
    weights = scores.softmax(-1)
    mixed = (weights @ v).transpose(1, 2).reshape(batch, length, embed_dim)
    result = F.linear(mixed, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def _over_scores(mask: Tensor, mask_type: int | None) -> Tensor:
    """The mask, of shape (length, length), (batch, length) or that of the scores, for these."""
    mask = mask.to(torch.bool)
    if mask_type == 0:
        return mask[None, None]
    if mask_type == 1:
        return mask[:, None, None]
    return mask


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attend(x: Tensor) -> Tensor:
        qkv, proj = (qkv_weight, qkv_bias), (proj_weight, proj_bias)
        found, _ = _attention(
            x, x, x, embed_dim, num_heads, *qkv, *proj, mask, need_weights=False,
            mask_type=mask_type,
        )  # fmt: skip
        return found

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    if norm_first:
        src = src + attend(norm_1(src))
        return src + feed(norm_2(src))
    src = norm_1(src + attend(src))
    return norm_2(src + feed(src))

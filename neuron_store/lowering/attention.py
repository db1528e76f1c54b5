"""Scaled dot-product attention, as eager's CPU kernel defines it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from neuron_store.errors import UnsupportedOperator
from neuron_store.lowering._rules import lowers, widened

_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


@lowers(_FORWARD)
def _attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    if dropout_p:
        raise UnsupportedOperator(_FORWARD, "dropout")
    heads = query.shape[1] // key.shape[1]
    if heads > 1:  # grouped queries
        key, value = jnp.repeat(key, heads, 1), jnp.repeat(value, heads, 1)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(widened(query) * scale, jnp.swapaxes(widened(key), -1, -2))
    if is_causal:
        rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0)
        columns = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
        scores = jnp.where(columns <= rows, scores, -jnp.inf)
    if attn_mask is not None:
        if attn_mask.dtype == bool:
            scores = jnp.where(attn_mask, scores, -jnp.inf)
        else:
            scores = scores + widened(attn_mask)
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    # A row that may attend to nothing has only -inf, and gives zeros.
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, -1, keepdims=True)
    out = jnp.matmul(weights, widened(value)) / jnp.where(total == 0, 1, total)
    return out.astype(query.dtype), jnp.squeeze(jnp.log(total) + largest, -1)


@lowers(_BACKWARD)
def _attention_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    del out, logsumexp

    def forward(q: Any, k: Any, v: Any) -> Any:
        return _attention(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    return jax.vjp(forward, query, key, value)[1](grad)

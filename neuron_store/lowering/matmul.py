"""Matrix products. Half precision is accumulated in float32, as torch does it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from neuron_store.lowering._rules import lowers, widened


@lowers("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
def _product(x: Any, y: Any) -> Any:
    return _wide(x, y).astype(x.dtype)


def _wide(x: Any, y: Any) -> Any:
    # widened() of the result alone would be too late: its type is the one that is summed in.
    multiply = functools.partial(
        jnp.matmul, preferred_element_type=widened(jnp.zeros((), x.dtype)).dtype
    )
    if not x.shape[-1]:  # iree-compile divides by the size
        empty = jax.eval_shape(multiply, x, y)
        return jnp.zeros(empty.shape, empty.dtype)
    return multiply(x, y)


@lowers("aten.addmm.default", "aten.baddbmm.default")
def _addmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _wide(x, y)
    if alpha != 1:
        product = product * jnp.asarray(alpha, product.dtype)
    if beta == 0:  # then even a NaN in the bias counts for nothing
        return product.astype(x.dtype)
    bias = bias.astype(product.dtype)
    bias = bias if beta == 1 else bias * jnp.asarray(beta, product.dtype)
    return (product + bias).astype(x.dtype)

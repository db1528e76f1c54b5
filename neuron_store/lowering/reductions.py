"""Operators that reduce over dimensions, and the normalisations made of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from neuron_store.errors import UnsupportedOperator
from neuron_store.lowering._rules import cast, jax_dtype, lowers, widened

if TYPE_CHECKING:
    from collections.abc import Sequence


def _axes(dim: Any) -> Any:
    """Dimensions as JAX takes them: none given, or an empty list, means all."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return None
    return tuple(dim) if isinstance(dim, list | tuple) else (dim,)


def _accumulator(x: Any, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """The operand in the type to sum in, and the result's type."""
    given = x
    if dtype is not None:
        x = cast(x, jax_dtype(dtype))
    elif not jnp.issubdtype(x.dtype, jnp.floating):
        x = cast(x, jax_dtype(torch.int64))
    if not jnp.issubdtype(given.dtype, jnp.floating) and given.dtype != x.dtype:
        # IREE counts one element where it finds that all have one value, and converts in the sum.
        x = jax.lax.optimization_barrier(x)
    return widened(x), x.dtype


@lowers("aten.sum.default", "aten.sum.dim_IntList", vectors=True)
def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x, result = _accumulator(x, dtype)
    return jnp.sum(x, _axes(dim), keepdims=keepdim).astype(result)


@lowers("aten.prod.default", vectors=True)
def _prod(x: Any, *, dtype: Any = None) -> Any:
    x, result = _accumulator(x, dtype)
    return jnp.prod(x).astype(result)


@lowers("aten.prod.dim_int", vectors=True)
def _prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x, result = _accumulator(x, dtype)
    return jnp.prod(x, dim, keepdims=keepdim).astype(result)


@lowers("aten.mean.default", "aten.mean.dim", vectors=True)
def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x, result = _accumulator(x, dtype)
    return jnp.mean(x, _axes(dim), keepdims=keepdim).astype(result)


@lowers("aten.var.correction", vectors=True)
def _var(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@lowers("aten.var_mean.correction", vectors=True)
def _var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    wide, axes = widened(x), _axes(dim)
    count = math.prod(x.shape[a] for a in (range(x.ndim) if axes is None else axes))
    mean = jnp.mean(wide, axes, keepdims=True)
    squares = jnp.sum(jnp.square(wide - mean), axes, keepdims=keepdim)
    freedom = max(count - (1 if correction is None else correction), 0)
    mean = mean if keepdim else jnp.squeeze(mean, axes)
    return (squares / jnp.asarray(freedom, squares.dtype)).astype(x.dtype), mean.astype(x.dtype)


@lowers("aten.std.correction", vectors=True)
def _std(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    wide = widened(x)
    return jnp.sqrt(_var(wide, dim, correction=correction, keepdim=keepdim)).astype(x.dtype)


@lowers("aten.amax.default", "aten.max.default", vectors=True)
def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(x, _axes(dim), keepdims=keepdim)


@lowers("aten.amin.default", "aten.min.default", vectors=True)
def _amin(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.min(x, _axes(dim), keepdims=keepdim)


@lowers("aten.max.dim", vectors=True)
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.max(x, dim, keepdims=keepdim), _argmax(x, dim, keepdim)


@lowers("aten.min.dim", vectors=True)
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.min(x, dim, keepdims=keepdim), _argmin(x, dim, keepdim)


@lowers("aten.argmax.default", vectors=True)
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, dim, keepdims=keepdim).astype(jax_dtype(torch.int64))


@lowers("aten.argmin.default", vectors=True)
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, dim, keepdims=keepdim).astype(jax_dtype(torch.int64))


@lowers("aten.any.default", "aten.any.dim", "aten.any.dims", vectors=True)
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x, _axes(dim), keepdims=keepdim)


@lowers("aten.all.default", "aten.all.dim", "aten.all.dims", vectors=True)
def _all(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x, _axes(dim), keepdims=keepdim)


@lowers("aten.cumsum.default", vectors=True)
def _cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    x, result = _accumulator(x, dtype)
    return jnp.cumsum(x, dim).astype(result)


@lowers("aten.cumprod.default", vectors=True)
def _cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    x, result = _accumulator(x, dtype)
    return jnp.cumprod(x, dim).astype(result)


@lowers("aten.logsumexp.default", vectors=True)
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = cast(x, jax_dtype(torch.float32))
    return jax.nn.logsumexp(widened(x), _axes(dim), keepdims=keepdim).astype(x.dtype)


@lowers("aten.linalg_vector_norm.default", vectors=True)
def _vector_norm(
    x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if order != 2:
        raise UnsupportedOperator("aten.linalg_vector_norm.default", f"order {order}")
    x, result = _accumulator(x, dtype)
    return jnp.sqrt(jnp.sum(jnp.square(x), _axes(dim), keepdims=keepdim)).astype(result)


@lowers("aten._softmax.default", vectors=True)
def _softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    wide = widened(x)
    return jax.nn.softmax(wide, dim).astype(wide.dtype if half_to_float else x.dtype)


@lowers("aten._log_softmax.default", vectors=True)
def _log_softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    wide = widened(x)
    return jax.nn.log_softmax(wide, dim).astype(wide.dtype if half_to_float else x.dtype)


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * widened(weight)
    return x if bias is None else x + widened(bias)


@lowers("aten.native_layer_norm.default")
def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = widened(x)
    mean = jnp.mean(wide, axes, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide - mean), axes, keepdims=True) + eps)
    return _scaled((wide - mean) * rstd, weight, bias).astype(x.dtype), mean, rstd


@lowers("aten._native_batch_norm_legit_no_training.default")
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> Any:
    del momentum
    shape = (1, -1) + (1,) * (x.ndim - 2)
    weight, bias = (p if p is None else p.reshape(shape) for p in (weight, bias))
    rstd = jax.lax.rsqrt(widened(variance).reshape(shape) + eps)
    y = _scaled((widened(x) - widened(mean).reshape(shape)) * rstd, weight, bias)
    empty = jnp.zeros((0,), y.dtype)
    return y.astype(x.dtype), empty, empty


@lowers("aten.sort.default", "aten.sort.stable", vectors=True)
def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    del stable
    # IREE compares neither 8-bit integers nor booleans in a sort, and its sort is not stable
    # whatever is asked for: the position is the second key.
    keys = x.astype(np.int32) if x.dtype.itemsize == 1 else x
    order = jax.lax.broadcasted_iota(jax_dtype(torch.int64), x.shape, dim % x.ndim)
    if descending:
        keys = jnp.flip(keys, dim)
    values, order = jax.lax.sort((keys, order), dimension=dim % x.ndim, num_keys=2)
    if descending:
        values, order = jnp.flip(values, dim), x.shape[dim] - 1 - jnp.flip(order, dim)
    return values.astype(x.dtype), order


@lowers("aten.topk.default", vectors=True)
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    del ordered
    values, order = _sort(x, dim, largest)
    return (
        jax.lax.slice_in_dim(values, 0, k, axis=dim),
        jax.lax.slice_in_dim(order, 0, k, axis=dim),
    )

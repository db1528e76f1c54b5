"""Operators that move elements without computing with them, and those that make tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch

from neuron_store.errors import UnsupportedOperator
from neuron_store.lowering._rules import jax_dtype, lowers

if TYPE_CHECKING:
    from collections.abc import Sequence


@lowers("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
def _view(x: Any, size: Sequence[int]) -> Any:
    return jnp.reshape(x, tuple(size))


@lowers("aten.view.dtype")
def _view_dtype(x: Any, dtype: torch.dtype) -> Any:
    if x.dtype.itemsize != dtype.itemsize:
        raise UnsupportedOperator("aten.view.dtype", f"{x.dtype} as {dtype} changes the shape")
    return jax.lax.bitcast_convert_type(x, jax_dtype(dtype))


@lowers("aten.permute.default")
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, tuple(dims))


@lowers("aten.transpose.int")
def _transpose(x: Any, first: int, second: int) -> Any:
    return x if x.ndim == 0 else jnp.swapaxes(x, first, second)


@lowers("aten.t.default")
def _t(x: Any) -> Any:
    return x.T


@lowers("aten.expand.default")
def _expand(x: Any, size: Sequence[int], *, implicit: bool = False) -> Any:
    del implicit
    new = len(size) - x.ndim
    full = [x.shape[i - new] if s == -1 else s for i, s in enumerate(size)]
    return jnp.broadcast_to(x, tuple(full))


@lowers("aten.squeeze.default")
def _squeeze(x: Any) -> Any:
    return jnp.squeeze(x)


@lowers("aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze_dims(x: Any, dims: Any) -> Any:
    dims = [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple(d for d in dims if x.ndim and x.shape[d] == 1))


@lowers("aten.unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@lowers("aten.slice.Tensor")
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[_at(x, dim, slice(start, end, step))]


@lowers("aten.select.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return jax.lax.index_in_dim(x, index, dim, keepdims=False)


@lowers("aten.slice_scatter.default")
def _slice_scatter(
    x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[_at(x, dim, slice(start, end, step))].set(source)


@lowers("aten.select_scatter.default")
def _select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[_at(x, dim, index)].set(source)


def _at(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % x.ndim), index)


@lowers("aten.cat.default")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    # An empty vector joins anything: a rule of torch from the time before empty shapes.
    kept = [t for t in tensors if t.shape != (0,)] or tensors
    return jnp.concatenate(kept, dim)


@lowers("aten.stack.default")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack(tensors, dim)


@lowers("aten.split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> Any:
    return tuple(
        jax.lax.slice_in_dim(x, start, min(start + size, x.shape[dim]), axis=dim)
        for start in range(0, max(x.shape[dim], 1), size)
    )


@lowers("aten.split_with_sizes.default")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    parts, start = [], 0
    for size in sizes:
        parts.append(jax.lax.slice_in_dim(x, start, start + size, axis=dim))
        start += size
    return tuple(parts)


@lowers("aten.unbind.int")
def _unbind(x: Any, dim: int = 0) -> Any:
    return tuple(_select(x, dim, i) for i in range(x.shape[dim]))


@lowers("aten.repeat.default")
def _repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, tuple(repeats))


@lowers("aten.flip.default", vectors=True)
def _flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@lowers("aten.roll.default")
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowers("aten.constant_pad_nd.default")
def _pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        config[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config)


@lowers("aten.tril.default")
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowers("aten.triu.default")
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


# -- tensors out of nothing -----------------------------------------------------------------


def _float(dtype: torch.dtype | None) -> Any:
    return jax_dtype(torch.float32 if dtype is None else dtype)


def _like(x: Any, dtype: torch.dtype | None) -> Any:
    return x.dtype if dtype is None else jax_dtype(dtype)


@lowers("aten.full.default")
def _full(size: Sequence[int], value: Any, *, dtype: Any = None, **_: Any) -> Any:
    if dtype is None:
        kind = torch.bool if isinstance(value, bool) else torch.int64
        dtype = torch.float32 if isinstance(value, float) else kind
    return jnp.full(tuple(size), value, jax_dtype(dtype))


@lowers("aten.full_like.default")
def _full_like(x: Any, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.full(x.shape, value, _like(x, dtype))


@lowers("aten.new_full.default")
def _new_full(x: Any, size: Sequence[int], value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.full(tuple(size), value, _like(x, dtype))


# What nobody may read before writing it may as well be zero.
@lowers("aten.zeros.default", "aten.empty.memory_format", "aten.empty_strided.default")
def _zeros(size: Sequence[int], stride: Any = None, *, dtype: Any = None, **_: Any) -> Any:
    del stride  # the results' layout is made from the trace
    return jnp.zeros(tuple(size), _float(dtype))


@lowers("aten.zeros_like.default", "aten.empty_like.default")
def _zeros_like(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.zeros(x.shape, _like(x, dtype))


@lowers("aten.new_zeros.default", "aten.new_empty.default", "aten.new_empty_strided.default")
def _new_zeros(
    x: Any, size: Sequence[int], stride: Any = None, *, dtype: Any = None, **_: Any
) -> Any:
    del stride
    return jnp.zeros(tuple(size), _like(x, dtype))


@lowers("aten.ones.default")
def _ones(size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
    return jnp.ones(tuple(size), _float(dtype))


@lowers("aten.ones_like.default")
def _ones_like(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.ones(x.shape, _like(x, dtype))


@lowers("aten.new_ones.default")
def _new_ones(x: Any, size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
    return jnp.ones(tuple(size), _like(x, dtype))


@lowers("aten.scalar_tensor.default")
def _scalar_tensor(value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.asarray(value, _float(dtype))


@lowers("aten.arange.default")
def _arange(end: Any, **options: Any) -> Any:
    return _arange_step(0, end, 1, **options)


@lowers("aten.arange.start")
def _arange_start(start: Any, end: Any, **options: Any) -> Any:
    return _arange_step(start, end, 1, **options)


@lowers("aten.arange.start_step")
def _arange_step(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> Any:
    if dtype is None:
        whole = all(isinstance(v, int) for v in (start, end, step))
        dtype = torch.int64 if whole else torch.float32
    return jnp.arange(start, end, step, jax_dtype(dtype))


@lowers("aten.eye.default")
def _eye(rows: int, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.eye(rows, dtype=_float(dtype))

"""Gathers and scatters.

An index outside its dimension raises in eager; here, as on the accelerator, a read of one gives
some element, and a write to one is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from neuron_store.errors import UnsupportedOperator
from neuron_store.lowering._rules import lowers

if TYPE_CHECKING:
    from collections.abc import Sequence


@lowers("aten.embedding.default")
def _embedding(weight: Any, indices: Any, *_: Any) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowers("aten.index_select.default", vectors=True)
def _index_select(x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, index, axis=dim, mode="clip")


@lowers("aten.gather.default")
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    del sparse_grad
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    if index.ndim == 0:
        return x.at[index].get(mode="clip")
    return x.at[_grid(index, dim)].get(mode="clip")


def _grid(index: Any, dim: int) -> tuple[Any, ...]:
    """Full coordinates: each element's own, save in `dim`, where `index` says."""
    coordinates = list(jnp.indices(index.shape, sparse=True))
    coordinates[dim] = index
    return tuple(coordinates)


@lowers("aten.scatter.src", vectors=True)
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_grid(index, dim)].set(_corner(source, index))


@lowers("aten.scatter.value", vectors=True)
def _scatter_value(x: Any, dim: int, index: Any, value: Any) -> Any:
    return x.at[_grid(index, dim)].set(jnp.asarray(value, x.dtype))


@lowers("aten.scatter_add.default", vectors=True)
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_grid(index, dim)].add(_corner(source, index))


def _corner(source: Any, index: Any) -> Any:
    return source[tuple(slice(0, n) for n in index.shape)]


@lowers("aten.index_copy.default", vectors=True)
def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(source)


@lowers("aten.index_add.default", vectors=True)
def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    source = source if alpha == 1 else source * jnp.asarray(alpha, source.dtype)
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].add(source)


@lowers("aten.index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x.at[_positions("aten.index.Tensor", indices)].get(mode="clip")


@lowers("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    if (
        len(indices) == 1
        and indices[0] is not None
        and indices[0].dtype == bool
        and (values.size == 1 and not accumulate)
    ):
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        return jnp.where(mask, values.astype(x.dtype), x)
    target = x.at[_positions("aten.index_put.default", indices)]
    values = values.astype(x.dtype)
    return target.add(values) if accumulate else target.set(values)


def _positions(operator: str, indices: Sequence[Any]) -> tuple[Any, ...]:
    if any(i is not None and i.dtype == bool for i in indices):
        raise UnsupportedOperator(operator, "a mask gives a shape that depends on the data")
    return tuple(slice(None) if i is None else i for i in indices)

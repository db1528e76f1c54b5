"""Higher-order operators: each branch or body is a graph of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from neuron_store.lowering._rules import lowers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@lowers("higher_order.cond")
def _cond(
    predicate: Any,
    true_branch: Callable[..., Any],
    false_branch: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    # Sizes among the operands stay numbers: they are no tensors, and shapes are made of them.
    tensors = [o for o in operands if isinstance(o, jax.Array)]

    def branch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            rest = iter(given)
            args = [next(rest) if isinstance(o, jax.Array) else o for o in operands]
            return tuple(jnp.asarray(out) for out in function(*args))

        return call

    return jax.lax.cond(
        jnp.reshape(jnp.asarray(predicate), ()), branch(true_branch), branch(false_branch), *tensors
    )


@lowers("higher_order.wrap_with_set_grad_enabled")
def _wrapped(enabled: bool, body: Callable[..., Any], *operands: Any) -> Any:
    del enabled
    return body(*operands)


@lowers("higher_order.invoke_subgraph")
def _invoke(body: Callable[..., Any], identifier: str, *operands: Any) -> Any:
    del identifier
    return body(*operands)

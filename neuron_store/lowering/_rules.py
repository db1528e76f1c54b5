"""The table of lowering rules and how their operands are promoted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from neuron_store.errors import UnsupportedOperator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "KIND",
    "RULES",
    "Rule",
    "as_array",
    "cast",
    "constant_array",
    "jax_dtype",
    "lowers",
    "not_float64",
    "torch_dtype",
    "widened",
]

_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
_BACK = {value: key for key, value in _DTYPES.items()}


@attrs.frozen
class Rule:
    """How one operator is lowered."""

    function: Callable[..., Any]
    promotion: KIND | None = None
    """How tensor operands are cast beforehand, and the result afterwards; None: not at all."""
    vectors: bool = False
    """Whether a tensor without dimensions counts as one of one element, as torch's `dim` has it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.vectors:
            whole = args[0].ndim > 0
            args = tuple(
                jnp.reshape(a, (1,)) if isinstance(a, jax.Array) and not a.ndim else a for a in args
            )
            found = self.function(*args, **kwargs)
            return found if whole else jax.tree.map(lambda r: jnp.reshape(r, ()), found)
        if self.promotion is None:
            return self.function(*args, **kwargs)
        operands = [a for a in args if isinstance(a, jax.Array | bool | int | float)]
        # Only kind and rank decide in torch, so one element stands for the operand.
        likes = [
            torch.empty((1,) * a.ndim, dtype=torch_dtype(a.dtype), device="meta")
            if isinstance(a, jax.Array)
            else a
            for a in operands
        ]
        compute, result = elementwise_dtypes(*likes, type_promotion_kind=self.promotion)
        dtype = jax_dtype(compute)
        operands = [
            as_array(a, dtype) if isinstance(a, jax.Array | bool | int | float) else a for a in args
        ]
        return cast(self.function(*operands, **kwargs), jax_dtype(result))


RULES: dict[str, Rule] = {}


def lowers(
    *names: str, promotion: KIND | None = None, vectors: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the rule for these operators."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in RULES, name
            RULES[name] = Rule(function, promotion, vectors)
        return function

    return register


def jax_dtype(dtype: torch.dtype) -> Any:
    """The array type of a torch type; raises `UnsupportedOperator` when there is none."""
    found = _DTYPES.get(dtype)
    if found is None:
        raise UnsupportedOperator(f"dtype {dtype}", "it has no counterpart here")
    return found


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch type of an array type."""
    return _BACK[np.dtype(dtype)]


def as_array(value: Any, dtype: Any) -> Any:
    """A number or array in this type; a number outside of it as torch casts it (-1 is 255)."""
    if isinstance(value, jax.Array):
        return cast(value, dtype)
    with np.errstate(all="ignore"):
        return jnp.asarray(np.asarray(value).astype(dtype))


def cast(x: Any, dtype: Any) -> Any:
    """An array in another type, the numbers that it cannot hold as torch has them on x86."""
    if x.dtype == bool:
        # Of a conversion IREE counts one element only, when it finds that all have one value.
        return jnp.where(x, jnp.ones((), dtype), jnp.zeros((), dtype))
    dtype, real = np.dtype(dtype), jnp.issubdtype(x.dtype, jnp.floating)
    if real and dtype in _SMALL:
        return x.astype(np.int32).astype(dtype)
    if not real and dtype == ml_dtypes.bfloat16:
        # IREE has no such conversion, and makes one of two that it sees together.
        return jax.lax.optimization_barrier(x.astype(np.float32)).astype(dtype)
    return x.astype(dtype)


_SMALL = (np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int16))


def not_float64(operator: str, x: Any) -> None:
    """Raises `UnsupportedOperator` for an operand of a type that IREE cannot compile it in."""
    if x.dtype == np.float64:
        raise UnsupportedOperator(operator, "the compiler has no such function of float64")


def constant_array(tensor: torch.Tensor) -> Any:
    """A constant of the graph as an array."""
    dtype = jax_dtype(tensor.dtype)
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype is torch.bfloat16:
            return jnp.asarray(tensor.view(torch.int16).numpy().view(dtype))
        return jnp.asarray(tensor.numpy())


def widened(x: Any) -> Any:
    """Half precision as float32: torch accumulates in it."""
    return x.astype(np.float32) if x.dtype in (np.float16, ml_dtypes.bfloat16) else x

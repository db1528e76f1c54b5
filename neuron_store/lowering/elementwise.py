"""Operators that work element by element, with torch's type promotion."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from neuron_store.lowering._rules import (
    KIND,
    RULES,
    Rule,
    as_array,
    cast,
    jax_dtype,
    lowers,
    not_float64,
)
from neuron_store.lowering.transcendental import tanh

_FLOAT = KIND.INT_TO_FLOAT
_SAME = KIND.DEFAULT
_BOOL = KIND.ALWAYS_BOOL


def _sign(x: Any) -> Any:
    if x.dtype == bool:
        return x
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    # Of NaN and of a negative zero it is zero.
    below = zero if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.where(x < 0, -one, zero)
    return jnp.where(x > 0, one, below)


for _names, _function, _kind in (
    (("aten.abs.default",), jnp.abs, _SAME),
    (("aten.neg.default",), jnp.negative, _SAME),
    (("aten.sign.default", "aten.sgn.default"), _sign, _SAME),
    (("aten.square.default",), jnp.square, _SAME),
    (("aten.relu.default",), lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)), _SAME),
    (("aten.silu.default",), lambda x: x * jax.nn.sigmoid(x), _SAME),
    (("aten.floor.default",), jnp.floor, _SAME),
    (("aten.ceil.default",), jnp.ceil, _SAME),
    (("aten.round.default",), jnp.round, _SAME),
    (("aten.trunc.default",), jnp.trunc, _SAME),
    (("aten.exp.default",), jnp.exp, _FLOAT),
    (("aten.exp2.default",), jnp.exp2, _FLOAT),
    (("aten.expm1.default",), jnp.expm1, _FLOAT),
    (("aten.log.default",), jnp.log, _FLOAT),
    (("aten.log10.default",), lambda x: jnp.log(x) * x.dtype.type(1 / math.log(10)), _FLOAT),
    (("aten.log1p.default",), jnp.log1p, _FLOAT),
    (("aten.log2.default",), jnp.log2, _FLOAT),
    (("aten.sqrt.default",), jnp.sqrt, _FLOAT),
    (("aten.rsqrt.default",), jax.lax.rsqrt, _FLOAT),
    (("aten.reciprocal.default",), lambda x: 1 / x, _FLOAT),
    (("aten.sigmoid.default",), jax.nn.sigmoid, _FLOAT),
    (("aten.erf.default",), jax.lax.erf, _FLOAT),
    (("aten.isnan.default",), jnp.isnan, _BOOL),
    (("aten.isinf.default",), jnp.isinf, _BOOL),
    (("aten.isneginf.default",), lambda x: x == -jnp.inf, _BOOL),
    (("aten.isposinf.default",), lambda x: x == jnp.inf, _BOOL),
    (("aten.logical_not.default",), jnp.logical_not, _BOOL),
    (("aten.bitwise_not.default",), jnp.invert, _SAME),
    (("aten.mul.Tensor", "aten.mul.Scalar"), jnp.multiply, _SAME),
    (("aten.div.Tensor", "aten.div.Scalar"), jnp.true_divide, _FLOAT),
    (("aten.maximum.default",), jnp.maximum, _SAME),
    (("aten.minimum.default",), jnp.minimum, _SAME),
    (("aten.eq.Tensor", "aten.eq.Scalar"), jnp.equal, _BOOL),
    (("aten.ne.Tensor", "aten.ne.Scalar"), jnp.not_equal, _BOOL),
    (("aten.lt.Tensor", "aten.lt.Scalar"), jnp.less, _BOOL),
    (("aten.le.Tensor", "aten.le.Scalar"), jnp.less_equal, _BOOL),
    (("aten.gt.Tensor", "aten.gt.Scalar"), jnp.greater, _BOOL),
    (("aten.ge.Tensor", "aten.ge.Scalar"), jnp.greater_equal, _BOOL),
    (("aten.logical_and.default",), jnp.logical_and, _BOOL),
    (("aten.logical_or.default",), jnp.logical_or, _BOOL),
    (("aten.logical_xor.default",), jnp.logical_xor, _BOOL),
    (("aten.bitwise_and.Tensor", "aten.bitwise_and.Scalar"), jnp.bitwise_and, _SAME),
    (("aten.bitwise_or.Tensor", "aten.bitwise_or.Scalar"), jnp.bitwise_or, _SAME),
    (("aten.bitwise_xor.Tensor", "aten.bitwise_xor.Scalar"), jnp.bitwise_xor, _SAME),
):
    lowers(*_names, promotion=_kind)(_function)


def _no_float64(operator: str, function: Any) -> Any:
    def checked(x: Any, y: Any) -> Any:
        not_float64(operator, x)
        return function(x, y)

    return checked


for _stem, _function, _names in (
    ("remainder", jnp.remainder, ("Tensor", "Scalar")),
    ("fmod", jnp.fmod, ("Tensor", "Scalar")),
    ("floor_divide", jnp.floor_divide, ("default",)),
):
    for _name in _names:
        _full = f"aten.{_stem}.{_name}"
        lowers(_full, promotion=_SAME)(_no_float64(_full, _function))


@lowers("aten.add.Tensor", "aten.add.Scalar", promotion=_SAME)
def _add(x: Any, y: Any, alpha: Any = 1, **_: Any) -> Any:
    if x.dtype == bool:
        return jnp.logical_or(x, y)
    return x + y if _is_one(alpha) else x + jnp.asarray(alpha, x.dtype) * y


@lowers("aten.sub.Tensor", "aten.sub.Scalar", promotion=_SAME)
def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - y if _is_one(alpha) else x - jnp.asarray(alpha, x.dtype) * y


@lowers("aten.rsub.Tensor", "aten.rsub.Scalar", promotion=_SAME)
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return _sub(y, x, alpha)


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, int | float) and alpha == 1


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _div_mode(x: Any, y: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return RULES["aten.div.Tensor"](x, y)
    return (_FLOOR if rounding_mode == "floor" else _TRUNC)(x, y)


def _truncated(x: Any, y: Any) -> Any:
    return jax.lax.div(*jnp.broadcast_arrays(x, y)) if _integral(x) else jnp.trunc(x / y)


_FLOOR = Rule(_no_float64("aten.div.Tensor_mode", jnp.floor_divide), _SAME)
_TRUNC = Rule(_truncated, _SAME)


def _integral(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.integer))


@lowers("aten.gelu.default", promotion=_SAME)
def _gelu(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = x + x.dtype.type(0.044715) * x * x * x
        return x * ((1 + tanh(inner * x.dtype.type(math.sqrt(2 / math.pi)))) / 2)
    return jax.nn.gelu(x, approximate=False)


@lowers("aten.leaky_relu.default", promotion=_SAME)
def _leaky_relu(x: Any, slope: Any = 0.01) -> Any:
    return jnp.where(x > 0, x, x * slope)


@lowers("aten.hardtanh.default", promotion=_SAME)
def _hardtanh(x: Any, low: Any = -1, high: Any = 1) -> Any:
    return jnp.clip(x, low, high)


@lowers("aten.clamp.default", "aten.clamp.Tensor", promotion=_SAME)
def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


@lowers("aten.clamp_min.default", "aten.clamp_min.Tensor", promotion=_SAME)
def _clamp_min(x: Any, low: Any) -> Any:
    return jnp.maximum(x, low)


@lowers("aten.clamp_max.default", "aten.clamp_max.Tensor", promotion=_SAME)
def _clamp_max(x: Any, high: Any) -> Any:
    return jnp.minimum(x, high)


@lowers("aten.addcmul.default", promotion=_SAME)
def _addcmul(x: Any, y: Any, z: Any, *, value: Any = 1) -> Any:
    return x + jnp.asarray(value, x.dtype) * y * z


@lowers("aten.threshold_backward.default", promotion=_SAME)
def _threshold_backward(grad: Any, x: Any, threshold: Any) -> Any:
    return jnp.where(x > threshold, grad, jnp.zeros((), grad.dtype))


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(condition: Any, x: Any, y: Any) -> Any:
    return _choose(x, y, condition=condition)


def _select(x: Any, y: Any, *, condition: Any) -> Any:
    return jnp.where(condition, x, y)


_choose = Rule(_select, _SAME)


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    # The result has the type of `x`, whatever the value's.
    return jnp.where(mask, as_array(value, x.dtype), x)


@lowers("aten._to_copy.default")
def _to_copy(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    return x if dtype is None else cast(x, jax_dtype(dtype))


@lowers("prims.convert_element_type.default")
def _convert(x: Any, dtype: Any) -> Any:
    return cast(x, jax_dtype(dtype))


@lowers(
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
)
def _same(x: Any, **_: Any) -> Any:
    return x


@lowers("aten.copy.default")
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    del non_blocking
    return jnp.broadcast_to(cast(source, x.dtype), x.shape)

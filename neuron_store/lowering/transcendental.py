"""Powers and angles, from operations that IREE and XLA agree on.

IREE 3.13 expands them itself: `pow` of a negative base into NaN, `atan2` of an infinity likewise,
and `sin` and `cos` with an error that grows with the angle (3e-4 at 10000, a position of RoPE).
It has no float64 of some at all.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuron_store.lowering._rules import KIND, RULES, lowers, not_float64, widened

__all__ = ["tanh"]

_FLOAT = KIND.INT_TO_FLOAT


# -- powers -----------------------------------------------------------------------------------


@lowers("aten.pow.Tensor_Tensor", "aten.pow.Scalar", promotion=KIND.BOOL_TO_LONG)
def _pow(x: Any, y: Any) -> Any:
    x, y = jnp.broadcast_arrays(x, y)
    if not _floating(x):
        return _integer_power(x, y)
    whole = jnp.floor(y) == y  # so are infinities
    odd = whole & (jnp.floor(y * 0.5) != y * 0.5)
    size = jnp.abs(x)
    power = jnp.power(size, y) if x.dtype == np.float32 else jnp.exp(y * jnp.log(size))
    # These are where the logarithm gives zero times infinity, or a NaN that does not count.
    power = jnp.where((size == 1) & jnp.isinf(y), jnp.ones_like(power), power)
    power = jnp.where(odd & jnp.signbit(x), -power, power)
    power = jnp.where((x < 0) & ~jnp.isinf(x) & ~whole, jnp.full_like(power, jnp.nan), power)
    # A NaN that is constant gives anything once it is folded.
    power = jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.full_like(power, jnp.nan), power)
    return jnp.where((x == 1) | (y == 0), jnp.ones_like(power), power)


@lowers("aten.pow.Tensor_Scalar")
def _pow_scalar(x: Any, exponent: Any) -> Any:
    # Of a negative zero and of infinity eager gives what the root gives.
    if abs(exponent) == 0.5 and x.dtype != np.float16:
        return RULES[f"aten.{'sqrt' if exponent > 0 else 'rsqrt'}.default"](x)
    # Repeated multiplication is exact for whole numbers that the type can hold.
    if float(exponent).is_integer() and abs(exponent) <= 16 and _floating(x):
        return jax.lax.integer_pow(widened(x), int(exponent)).astype(x.dtype)
    if isinstance(exponent, int) and not _floating(x) and x.dtype != bool:
        return jax.lax.integer_pow(x, exponent)
    return RULES["aten.pow.Tensor_Tensor"](x, exponent)


def _floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _integer_power(x: Any, y: Any) -> Any:
    """Modulo the type's range; of a negative exponent the quotient, rounded to zero."""
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
    power, square = one, x
    for bit in range(x.dtype.itemsize * 8 - (not unsigned)):
        power = jnp.where((y >> bit) & 1 == 1, power * square, power)
        square = square * square
    if unsigned:
        return power
    inverse = jnp.where(x == 1, one, jnp.where(x == -1, jnp.where(y & 1 == 1, -one, one), zero))
    return jnp.where(y < 0, inverse, power)


# -- angles -----------------------------------------------------------------------------------


@lowers("aten.sin.default", promotion=_FLOAT)
def _sin(x: Any) -> Any:
    not_float64("aten.sin.default", x)
    return jnp.where(x == 0, x, _turned(x, 0))


@lowers("aten.cos.default", promotion=_FLOAT)
def _cos(x: Any) -> Any:
    not_float64("aten.cos.default", x)
    return _turned(x, 1)


def _parts(value: Fraction, digits: int, count: int) -> list[float]:
    """`value` as a sum of floats of so many binary digits each."""
    parts = []
    for _ in range(count):
        exponent = int(np.frexp(float(value))[1])
        part = round(value * Fraction(2) ** (digits - exponent)) * Fraction(2) ** (
            exponent - digits
        )
        parts.append(float(part))
        value -= part
    return parts


_HALF_PI = _parts(Fraction("1.5707963267948966192313216916397514420986"), 12, 5)


def _turned(x: Any, quarters: int) -> Any:
    """The sine of `x` and so many right angles.

    Cody and Waite's reduction: of two factors with 12 digits each the product is exact, so the
    rest is right for up to 2**24 right angles, where floats are two apart already.
    """
    turns = jnp.round(x * np.float32(2 / np.pi))
    coarse = jnp.round(turns * np.float32(2.0**-12)) * np.float32(2.0**12)
    fine = turns - coarse
    rest = x
    for part in _HALF_PI:
        rest = (rest - coarse * np.float32(part)) - fine * np.float32(part)
    small = jnp.abs(x) <= np.float32(np.pi / 4)
    rest = jnp.where(small, x, rest)
    # Of angles so large that it fails, the reduction leaves anything.
    rest = jnp.clip(rest, -2, 2)
    turns = jnp.where(small, 0, turns)
    quadrant = turns - 4 * jnp.floor(turns * np.float32(0.25)) + quarters
    quadrant = jnp.where(quadrant >= 4, quadrant - 4, quadrant)
    value = jnp.where((quadrant == 1) | (quadrant == 3), jnp.cos(rest), jnp.sin(rest))
    return jnp.where(quadrant >= 2, -value, value)


@lowers("aten.atan2.default", promotion=_FLOAT)
def _atan2(y: Any, x: Any) -> Any:
    not_float64("aten.atan2.default", x)
    y, x = jnp.broadcast_arrays(y, x)
    # Beside an infinity a finite number is zero, and two infinities are as two ones.
    endless = (jnp.isinf(x) | jnp.isinf(y)) & ~(jnp.isnan(x) | jnp.isnan(y))
    height, width = (jnp.where(endless, jnp.isinf(v).astype(v.dtype), jnp.abs(v)) for v in (y, x))
    width = jnp.where((height == 0) & (width == 0), jnp.ones_like(width), width)
    angle = jnp.arctan2(height, width)
    return jnp.copysign(jnp.where(jnp.signbit(x), np.float32(np.pi) - angle, angle), y)


@lowers("aten.tanh.default", promotion=_FLOAT)
def tanh(x: Any) -> Any:
    """The hyperbolic tangent, of float64 too."""
    if x.dtype != np.float64:
        return jnp.tanh(x)
    shrunk = jnp.expm1(-2 * jnp.abs(x))
    return jnp.copysign(shrunk / (shrunk + 2), x)

"""JAX as this package lowers with it, whatever the process has set."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pinned_settings"]

# What is in JAX's own key of a trace or a lowering (jax/_src/config.py: include_in_jit_key and
# include_in_trace_context), and what can make a constant of the graph fail. The values are those of
# JAX, save that 64-bit types are on: without, an int64 input would silently become an int32.
_VALUES: dict[str, Any] = {
    "check_vma": False,
    "eager_constant_folding": False,
    "jax_allow_f16_reductions": True,
    "jax_auto_pcast": True,
    "jax_check_static_indices": False,
    "jax_check_tracer_leaks": False,
    "jax_custom_vjp3": False,
    "jax_debug_infs": False,
    "jax_debug_key_reuse": False,
    "jax_debug_nans": False,
    "jax_default_device": None,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False,
    "jax_embedded_constants_max_bytes": 32,
    "jax_enable_custom_prng": False,
    "jax_enable_x64": True,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_high_dynamic_range_gumbel": False,
    "jax_no_execution": False,
    "jax_no_tracing": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_random_seed_offset": 0,
    "jax_refs_to_pins": False,
    "jax_remat3": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_scan3": False,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_partitionable": True,
    "jax_transfer_guard_device_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
    "jax_transfer_guard_host_to_device": "allow",
    "jax_use_direct_linearize": True,
    "jax_use_shardy_partitioner": True,
    "jax_use_simplified_jaxpr_constants": False,
}


@contextlib.contextmanager
def pinned_settings() -> Iterator[None]:
    """Lower within it, and neither the environment nor `jax.config` changes what comes out.

    For this thread alone: other users of JAX in the process keep their settings.
    """
    # No public name gives the context managers of all settings. One that another version of JAX
    # has not, it has no use for.
    states = jax.config._value_holders
    with contextlib.ExitStack() as stack:
        for name, value in _VALUES.items():
            if name in states:
                stack.enter_context(states[name](value))
        yield

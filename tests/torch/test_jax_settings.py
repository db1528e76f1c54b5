"""What the process has set of JAX changes nothing in an artifact."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
jax = pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")

from neuron_store.lowering._jax_settings import _VALUES, pinned_settings  # noqa: E402

pytestmark = pytest.mark.torch

EXPORT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import jax, torch
from torch.fx.experimental.proxy_tensor import make_fx
from neuron_store.lowering.export import TensorSpec, export
for setting in sys.argv[2:]:
    name, value = setting.split("=")
    jax.config.update(name, {"True": True, "False": False}.get(value, value))
def function(x):
    y = x[None, None]
    return (
        torch.softmax(x @ x.t(), -1), x + x[0], torch.full((2,), float("nan")) / 0, x.sort()[1],
        torch.nn.functional.scaled_dot_product_attention(y, y, y), x.cumsum(0), x.pow(2.5), x.sin(),
        x.index_select(0, torch.tensor([0, 2])), x.to(torch.float64) * torch.arange(4),
    )
exported = export(make_fx(function)(torch.randn(3, 4)), [TensorSpec((3, 4), torch.float32)], {})
print(hashlib.sha256(exported.stablehlo + exported.hlo).hexdigest())
"""


def exported_in_a_child(*settings, **variables):
    child = subprocess.run(
        [sys.executable, "-c", EXPORT, os.getcwd(), *settings],
        env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | variables,
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return child.stdout


@pytest.mark.slow
def test_neither_variables_nor_settings_of_jax_change_what_is_exported():
    plain = exported_in_a_child()
    assert exported_in_a_child(
        JAX_DEFAULT_MATMUL_PRECISION="highest",
        JAX_NUMPY_RANK_PROMOTION="raise",
        JAX_NUMPY_DTYPE_PROMOTION="strict",
        JAX_DEFAULT_PRNG_IMPL="rbg",
        JAX_THREEFRY_PARTITIONABLE="0",
        JAX_SOFTMAX_CUSTOM_JVP="1",
        JAX_DISABLE_JIT="1",
        JAX_DEBUG_NANS="1",
        JAX_TRANSFER_GUARD="disallow",
        JAX_ENABLE_X64="0",
    ) == plain  # fmt: skip
    assert exported_in_a_child(
        "jax_default_matmul_precision=highest",
        "jax_numpy_rank_promotion=raise",
        "jax_debug_infs=True",
        "jax_enable_x64=True",
        "jax_use_shardy_partitioner=False",
        "jax_use_simplified_jaxpr_constants=True",
        "jax_check_static_indices=True",
        "jax_allow_f16_reductions=False",
    ) == plain  # fmt: skip


def test_every_setting_in_the_key_of_a_lowering_is_pinned():
    """Another version of JAX may add one."""
    from jax._src import config

    text = Path(config.__file__).read_text()
    calls = re.findall(r"_state\(\s*(?:name=)?'(\w+)',(.*?)\n\n", text, re.DOTALL)
    decisive = {name for name, rest in calls if "include_in_jit_key" in rest}
    assert len(decisive) > 20
    apart = "pallas|pgle|ragged|xla|mosaic|gpu|optim|effort|fit|explicit_x64"  # not of a lowering
    harmless = {name for name in decisive if re.search(apart, name)}
    assert decisive - harmless <= set(_VALUES)


def test_the_settings_of_the_process_are_as_before():
    before = {name: state.value for name, state in jax.config._value_holders.items()}
    with pinned_settings():
        assert jax.numpy.asarray(1).dtype == jax.numpy.int64
    assert before == {name: state.value for name, state in jax.config._value_holders.items()}

"""Makes the example graphs: one transformer block, as it runs for a prompt and for one token.

Needs JAX (made with 0.10.2) and numpy, which neuron_store itself does not:

    python -m venv /tmp/jax && /tmp/jax/bin/pip install jax numpy
    /tmp/jax/bin/python examples/graphs/make_graphs.py

Writes beside itself, for `prefill` and `decode` each:

* `<name>.mlir`: StableHLO, as text
* `<name>.hlo`: the same graph as a serialised bare `HloModuleProto` with a tuple root
* `<name>.npz`: `input_<n>` and `output_<n>`, what the graph takes and what XLA makes of it
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir

HERE = pathlib.Path(__file__).parent

PROMPT = 32
CACHE = 48
WIDTH = 64
HEADS = 4
HEAD = WIDTH // HEADS
HIDDEN = 160


def weights():
    """Random weights of one block, in the order that the graphs take them."""
    random = np.random.default_rng(20240607)

    def matrix(rows, columns):
        return (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

    return (
        np.ones(WIDTH, np.float32),
        matrix(WIDTH, WIDTH),
        matrix(WIDTH, WIDTH),
        matrix(WIDTH, WIDTH),
        matrix(WIDTH, WIDTH),
        np.ones(WIDTH, np.float32),
        matrix(WIDTH, HIDDEN),
        matrix(WIDTH, HIDDEN),
        matrix(HIDDEN, WIDTH),
    )


def normalised(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotated(x, positions):
    """Rotary position embedding; `x` is [tokens, heads, head width]."""
    half = HEAD // 2
    frequencies = 1.0 / (10000.0 ** (jnp.arange(half, dtype=jnp.float32) / half))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def block(x, positions, cache, start, params):
    """One pre-norm block over `x` [tokens, width]; new keys and values enter `cache` at `start`."""
    norm_1, w_q, w_k, w_v, w_o, norm_2, w_gate, w_up, w_down = params
    keys, values = cache
    tokens = x.shape[0]
    h = normalised(x, norm_1)
    q = rotated((h @ w_q).reshape(tokens, HEADS, HEAD), positions)
    k = rotated((h @ w_k).reshape(tokens, HEADS, HEAD), positions)
    v = (h @ w_v).reshape(tokens, HEADS, HEAD)
    zero = jnp.int32(0)
    keys = jax.lax.dynamic_update_slice(keys, k, (start, zero, zero))
    values = jax.lax.dynamic_update_slice(values, v, (start, zero, zero))
    scores = jnp.einsum("qhd,khd->hqk", q, keys) / np.float32(np.sqrt(HEAD))
    seen = jnp.arange(CACHE)[None, :] <= positions[:, None]
    scores = jnp.where(seen[None], scores, np.float32(-1e9))
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), values)
    x = x + mixed.reshape(tokens, WIDTH) @ w_o
    h = normalised(x, norm_2)
    return x + (jax.nn.silu(h @ w_gate) * (h @ w_up)) @ w_down, keys, values


def prefill(x, *params):
    """A whole prompt; returns the hidden states and the filled cache."""
    empty = jnp.zeros((CACHE, HEADS, HEAD), jnp.float32)
    return block(x, jnp.arange(PROMPT), (empty, empty), jnp.int32(0), params)


def decode(x, position, keys, values, *params):
    """One token at `position` (int32) behind what the cache holds."""
    return block(x, position[None], (keys, values), position, params)


def write(name, function, inputs):
    lowered = jax.jit(function).lower(*inputs)
    # Printed without debug information: source locations would hold this machine's paths.
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=False)
    text = text.replace(f"module @jit_{name}", f"module @{name}", 1)
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(text)
        computation = xla_client._xla.mlir.mlir_module_to_xla_computation(  # noqa: SLF001  (JAX exports no public way)
            jax_mlir.module_to_bytecode(module), use_tuple_args=False, return_tuple=True
        )
    hlo = computation.as_serialized_hlo_module_proto()
    outputs = lowered.compile()(*inputs)
    (HERE / f"{name}.mlir").write_text(text)
    (HERE / f"{name}.hlo").write_bytes(hlo)
    arrays = {f"input_{i}": np.asarray(a) for i, a in enumerate(inputs)}
    arrays |= {f"output_{i}": np.asarray(a) for i, a in enumerate(outputs)}
    with (HERE / f"{name}.npz").open("wb") as file:
        np.savez(file, **arrays)
    print(name, len(text), "bytes of StableHLO,", len(hlo), "of HLO")
    return [np.asarray(a) for a in outputs]


def main():
    jax.config.update("jax_default_matmul_precision", "highest")
    params = weights()
    random = np.random.default_rng(7)
    prompt = random.standard_normal((PROMPT, WIDTH)).astype(np.float32)
    _, keys, values = write("prefill", prefill, (prompt, *params))
    token = random.standard_normal((1, WIDTH)).astype(np.float32)
    write("decode", decode, (token, np.int32(PROMPT), keys, values, *params))


if __name__ == "__main__":
    main()

"""What `compress=zstd` saves and costs, on real graphs and on bytes that do not shrink.

make bench ARGS='-k compress -s'
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
import uuid
from pathlib import Path

import pytest

from neuron_store.testing import make_source
from neuron_store_backends.memory import MemoryStore

pytestmark = [pytest.mark.bench, pytest.mark.slow]

GRAPHS = Path(__file__).parent.parent / "examples" / "graphs"
LAYERS = 24


def deep_graph(layers: int) -> tuple[bytes, bytes]:
    """HLO (proto) and StableHLO (text) of the example's block, that many times in a row."""
    import jax
    import numpy as np
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    spec = importlib.util.spec_from_file_location("make_graphs", GRAPHS / "make_graphs.py")
    graphs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(graphs)

    def model(x, *params):
        for layer in range(layers):
            x, _, _ = graphs.prefill(x, *params[9 * layer : 9 * layer + 9])
        return x

    x = np.zeros((graphs.PROMPT, graphs.WIDTH), np.float32)
    lowered = jax.jit(model).lower(x, *graphs.weights() * layers)
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=False)
    with mlir.make_ir_context():
        module = mlir.module_to_bytecode(ir.Module.parse(text))
        computation = xla_client._xla.mlir.mlir_module_to_xla_computation(
            module, use_tuple_args=False, return_tuple=True
        )
    return computation.as_serialized_hlo_module_proto(), text.encode()


def once(tmp_path: Path, data: bytes, compress: str | None) -> tuple[int, float, float]:
    """Bytes stored, and seconds of CPU to publish and to fetch."""
    place = tmp_path / uuid.uuid4().hex
    artifact, source = make_source(place / "source", "k", {"f": data})
    (place / "into").mkdir()
    store = MemoryStore(f"bench-{uuid.uuid4().hex}", compress=compress)
    began = time.process_time()
    store.publish(artifact, source)
    published = time.process_time()
    store.fetch("k", place / "into")
    fetched = time.process_time()
    size = store.find("k").stored_size
    store.objects.handle().store.clear()
    shutil.rmtree(place)
    return size, published - began, fetched - published


def measure(tmp_path, capsys, what, data):
    """Without and with, the best of several, taking turns."""
    rounds = 5 if len(data) > 10 << 20 else 15
    runs = {None: [], "zstd": []}
    for _ in range(rounds):
        for compress, taken in runs.items():
            taken.append(once(tmp_path, data, compress))
    plain, packed = (
        (taken[0][0], min(run[1] for run in taken), min(run[2] for run in taken))
        for taken in runs.values()
    )
    with capsys.disabled():
        print(
            f"\n{what}: {len(data)} -> {packed[0]} ({packed[0] / len(data):.3f}); publish CPU "
            f"{plain[1] * 1000:.1f} -> {packed[1] * 1000:.1f} ms; "
            f"fetch CPU {plain[2] * 1000:.1f} -> {packed[2] * 1000:.1f} ms"
        )
    return plain, packed


@pytest.mark.parametrize("name", ["prefill.hlo", "decode.hlo", "prefill.mlir"])
def test_compress_an_example_graph(tmp_path, capsys, name):
    """Bar: at most half of it is stored."""
    data = (GRAPHS / name).read_bytes()
    _, packed = measure(tmp_path, capsys, name, data)
    assert packed[0] <= len(data) / 2


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX: make torch")
@pytest.mark.parametrize("kind", ["HLO", "StableHLO"])
def test_compress_a_deep_graph(tmp_path, capsys, kind):
    """Bar: at most a fifth of it is stored."""
    data = deep_graph(LAYERS)[kind == "StableHLO"]
    _, packed = measure(tmp_path, capsys, f"{kind} of {LAYERS} blocks", data)
    assert packed[0] <= len(data) / 5


def test_compress_a_neff_that_does_not_shrink(tmp_path, capsys):
    """Bar: at most 5 % and 5 ms more CPU than without the option, to look and leave it."""
    data = os.urandom(128 << 20)
    plain, packed = measure(tmp_path, capsys, "random NEFF", data)
    assert packed[0] == len(data)
    assert packed[1] <= plain[1] * 1.05 + 0.005

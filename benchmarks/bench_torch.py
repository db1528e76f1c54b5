"""What the torch backend costs, as ratios within one run. `make bench`; figures with `-s`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch", reason="torch benchmarks need the extra `torch`: `make torch`")
pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")
pytest.importorskip("iree.compiler", reason="compiling needs the extra `iree`")

from torch._dynamo.backends.common import aot_autograd  # noqa: E402

from neuron_store.fx_key import graph_components  # noqa: E402
from neuron_store.key import compute_key  # noqa: E402
from tests.torch.models import Llama  # noqa: E402

pytestmark = [pytest.mark.bench, pytest.mark.torch]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    torch._dynamo.reset()
    yield tmp_path
    torch._dynamo.reset()


def best(times):
    return min(times), statistics.median(times)


def test_the_key_of_a_12_layer_decoder_takes_at_most_40_ms():
    graphs = []

    def keep(gm, inputs):
        graphs.append((gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    model = Llama(layers=12)
    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=keep))(
            torch.zeros(1, 6, dtype=torch.int64), torch.arange(6), model.new_cache()
        )
    ((graph, inputs),) = graphs
    times = []
    for _ in range(15):
        # Nothing here waits, so the thread's own time is the figure, whatever else the host does.
        start = time.thread_time()
        compute_key(
            graph_components(graph, inputs, compiler="iree", compiler_version="1", target="x")
        )
        times.append(time.thread_time() - start)
    least, median = best(times)
    print(
        f"\nkey of {len(graph.graph.nodes)} nodes: {median * 1e3:.1f} ms (least {least * 1e3:.1f})"
    )
    assert median <= 0.040


FIRST_CALL = """
import sys, json, time
sys.path.insert(0, sys.argv[1])
import torch
from tests.torch.models import Llama
own = [0.0]
def timed(function):
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            own[0] += time.perf_counter() - start
    return wrapper
if sys.argv[2] == "neuron_store":
    # All that the backend does apart from torch: its part of tracing, and the getting and loading.
    from neuron_store import torch_backend
    from neuron_store._torch_graph import CachedGraph
    torch_backend._compiled = timed(torch_backend._compiled)
    CachedGraph._specialise = timed(CachedGraph._specialise)
model = Llama(layers=12)
fast = torch.compile(model, backend=sys.argv[2])
with torch.no_grad():
    wall, cpu = time.perf_counter(), time.process_time()
    fast(torch.zeros(1, 6, dtype=torch.int64), torch.arange(6), model.new_cache())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps({"wall": wall, "cpu": cpu, "own": own[0]}))
"""


def test_on_a_warm_local_tier_the_backend_adds_at_most_5_percent(cache):
    """In new processes, as after a restart: nothing is imported or cached before."""
    run(FIRST_CALL, "neuron_store")  # compiles
    own, shares, cpu = [], [], {"neuron_store": [], "aot_eager": [], "eager": []}
    for _ in range(3):
        for backend, seconds in cpu.items():
            found = run(FIRST_CALL, backend)
            seconds.append(found["cpu"])
            if backend == "neuron_store":
                own.append(found["own"])
                shares.append(found["own"] / (found["wall"] - found["own"]))
    ours, aot, dynamo = (min(seconds) for seconds in cpu.values())
    share, of_dynamo = statistics.median(shares), statistics.median(own) / dynamo
    print(
        f"\nthe backend's own part {share:.2%} of the rest of the first call (12 layers), "
        f"{of_dynamo:.2%} of Dynamo's alone; CPU of that call {ours:.2f} s, with aot_eager "
        f"{aot:.2f} s, with Dynamo alone {dynamo:.2f} s"
    )
    assert of_dynamo <= 0.05
    # By the clock two calls of one backend differ by far more than 5 % on a busy machine.
    assert ours <= 1.05 * aot


def run(program, backend, **env):
    done = subprocess.run(
        [sys.executable, "-c", program, os.getcwd(), backend],
        env={**os.environ, **env}, capture_output=True, text=True, check=True, timeout=550,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


LOAD = """
import sys, json, time
sys.path.insert(0, sys.argv[1])
import torch
from neuron_store._torch_graph import CachedGraph
from tests.torch.models import Llama
inner = CachedGraph._load
def timed(self, *args):
    start = time.perf_counter()
    program = inner(self, *args)
    print(json.dumps(time.perf_counter() - start))
    return program
CachedGraph._load = timed
model = Llama()
fast = torch.compile(model, backend=sys.argv[2])
with torch.no_grad():
    fast(torch.zeros(1, 6, dtype=torch.int64), torch.arange(6), model.new_cache())
"""


def test_loading_a_llama_in_a_new_process_is_20_times_faster_than_compiling_it(cache):
    cold = run(LOAD, "neuron_store")
    warm = statistics.median(run(LOAD, "neuron_store") for _ in range(3))
    print(f"\ncompile {cold:.2f} s, load {warm * 1e3:.1f} ms: {cold / warm:.0f} times faster")
    assert cold >= 20 * warm


PROGRAM = """
import sys, json
sys.path.insert(0, sys.argv[1])
import torch
from tests.torch.models import Llama
model = Llama(layers=4, width=256, vocabulary=4096)
fast = torch.compile(model, backend=sys.argv[2])
with torch.no_grad():
    for _ in range(3):
        fast(torch.zeros(1, 6, dtype=torch.int64), torch.arange(6), model.new_cache())
peak = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
print(json.dumps(int(peak.split()[1]) / 1024))
"""


def test_the_peak_memory_of_a_hit_is_within_30_mib_of_running_without_the_cache(cache):
    cold = run(PROGRAM, "neuron_store")
    hit = min(run(PROGRAM, "neuron_store") for _ in range(2))
    without = run(PROGRAM, "neuron_store", NEURON_LIBTORCH_DISABLE_COMPILE_CACHE="1")
    eager = min(run(PROGRAM, "aot_eager") for _ in range(2))
    print(
        f"\npeak of a hit {hit:.0f} MiB, of a compile {cold:.0f} MiB, with the cache off "
        f"{without:.0f} MiB, of aot_eager {eager:.0f} MiB"
    )
    assert hit <= without + 30
    assert hit <= eager + 30

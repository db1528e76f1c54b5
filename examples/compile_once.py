"""Compile a graph once, whoever asks first, and run it.

    python examples/compile_once.py

Run it again, or in several terminals at once: only the first call compiles. The artifacts are where
`VLLM_CACHE_ROOT` says (`~/.cache/vllm` by default); set `NEURON_STORE_TIERS` to share them between
machines.
"""

import time

from neuron_store import CompileCoordinator, open_store
from neuron_store.compilers._example_graphs import example_arrays, example_graph
from neuron_store.compilers.iree import IreeCompiler


def main():
    compiler = IreeCompiler()
    job = compiler.job(example_graph("prefill"))  # any StableHLO: a path or bytes

    with open_store() as store:
        began = time.perf_counter()
        path = CompileCoordinator(store).get_or_compile(job)
        print(f"{job.key} in {time.perf_counter() - began:.3f} s: {path}")

        inputs, expected = example_arrays("prefill")
        outputs = compiler.load(path).run("main", *inputs)

    worst = max(abs(got - want).max() for got, want in zip(outputs, expected, strict=True))
    print(f"{len(outputs)} results, at most {worst:.1e} from the reference")


if __name__ == "__main__":
    main()

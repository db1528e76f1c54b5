"""The whole path of a deployment, in the shape of vLLM's engine, on stand-in graphs.

1. An engine of four ranks on cores 0-7 warms up over six graphs: each rank's forked tracer records
   them, each graph is compiled once. It emits its manifest and promotes by it.
2. A second engine on cores 8-15 shares the node's cache root: it compiles nothing.
3. A third node has only the manifests and the shared tier: it checks that all is ready, prefetches,
   and serves with VLLM_NEURON_DISABLE_WARMUP_COMPILE=1.

Run it: `python examples/vllm_like_engine.py [directory]`.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from neuron_store import CompileCoordinator, CompileJob, open_store
from neuron_store.manifest.emitter import emit_manifest
from neuron_store.manifest.ledger import record_graph
from neuron_store.manifest.prefetch import prefetch, promote_manifest
from neuron_store.manifest.reader import read_engines
from neuron_store.manifest.ready import check_ready
from neuron_store.registry import open_tier

RANKS = 4
GRAPHS = [("prefill", 128), ("prefill", 256), ("prefill", 512)] + [("decode", n) for n in (1, 4, 8)]
FLAGS = "--framework XLA --target trn2 --auto-cast=none"
FORK = multiprocessing.get_context("fork")


def key_of(kind: str, size: int) -> str:
    return hashlib.md5(f"{kind}-{size}".encode(), usedforsecurity=False).hexdigest()


def compile_graph(name: str, log: str, workdir: Path) -> None:
    """Stands for the compiler: slow, and it leaves one line for each time it really ran."""
    time.sleep(0.2)
    (
        workdir / f"graph_{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}.bin"
    ).write_bytes(name.encode() * 1000)
    with open(log, "a", encoding="utf-8") as stream:
        stream.write(f"{name}\n")


def job_for(kind: str, size: int, log: Path) -> CompileJob:
    name = f"{kind}-{size}"
    return CompileJob(
        key_of(kind, size),
        functools.partial(compile_graph, name, str(log)),
        components={"graph": name, "flags": FLAGS},
    )


def trace(rank: int) -> None:
    """The forked tracer: it captures every graph and leaves without any flushing."""
    for kind, size in GRAPHS:
        record_graph(key_of(kind, size), rank, [(size,), (size, 64)], FLAGS)
    os._exit(0)


def rank_main(rank: int, cache: Path, shared: Path, log: Path) -> None:
    tracer = FORK.Process(target=trace, args=(rank,))
    tracer.start()
    tracer.join()
    with open_store([shared], local=cache) as store:
        coordinator = CompileCoordinator(store)
        for kind, size in GRAPHS:
            coordinator.get_or_compile(job_for(kind, size, log))


def warm_up(place: Path, devices: str, node: str) -> None:
    """One engine: its ranks, then what local rank 0 does after warm-up."""
    os.environ["NEURON_VISIBLE_DEVICES"] = devices
    cache, shared, log = place / node, place / "shared", place / "compiles.log"
    ranks = [FORK.Process(target=rank_main, args=(n, cache, shared, log)) for n in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0, f"a rank failed with {rank.exitcode}"
    config = {"parallel_config": {"world_size": RANKS, "tensor_parallel_size": RANKS}}
    with open_store([shared], local=cache) as store:
        path = emit_manifest(store, config=config, rank_to_global=lambda rank: rank)
        assert path is not None
        done = promote_manifest(store, read_engines([path]))
    assert all(one.error is None for one in done)
    outcomes = sorted({value.value for one in done for value in one.tiers.values()})
    compiled = log.read_text().splitlines()
    print(f"engine on cores {devices}: {len(compiled)} compiles so far, promoted: {outcomes}")


def in_process(function, *arguments) -> None:
    process = FORK.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def third_node(place: Path) -> None:
    engines = read_engines([place / "manifests"])
    with open_tier(str(place / "shared")) as tier:
        answer = check_ready(engines, tier, world_size=RANKS)
    print(
        f"ready: {answer.ready}, {len(answer.graphs)} graphs of {answer.world_size} ranks verified"
    )
    assert answer.ready
    os.environ["VLLM_NEURON_DISABLE_WARMUP_COMPILE"] = "1"
    with open_store([place / "shared"], local=place / "node-3") as store:
        brought = prefetch(store, engines)
        print(f"prefetched {len(brought.of('fetched'))} graphs, {brought.size} bytes")
        coordinator = CompileCoordinator(store)
        for kind, size in GRAPHS:
            coordinator.get_or_compile(job_for(kind, size, place / "compiles.log"))
    print("served with compiling forbidden")


def main() -> None:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="engine-"))
    os.environ["VLLM_NEURON_MANIFEST_DIR"] = str(place / "manifests")
    in_process(warm_up, place, "0-7", "node-1")
    in_process(warm_up, place, "8-15", "node-1")
    in_process(third_node, place)
    compiles = (place / "compiles.log").read_text().splitlines()
    assert len(compiles) == len(set(compiles)) == len(GRAPHS), compiles
    print(f"{len(GRAPHS)} graphs, {2 * RANKS} ranks and a third node: {len(compiles)} compiles")


if __name__ == "__main__":
    main()

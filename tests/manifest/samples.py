"""Manifests of a plausible size and look."""

from __future__ import annotations

import datetime as dt
import hashlib
import random
from pathlib import Path

from neuron_store.manifest.reader import Engine
from neuron_store.manifest.schema import Config, Graph, Manifest, Topology

FLAGS = (
    "--framework XLA --target trn2 --auto-cast=none --verbose=35 -O2 "
    "--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10"
)


def manifest(
    graphs: int = 24,
    world: int = 8,
    *,
    seed: int = 0,
    inputs: int = 12,
    holes: dict[int, tuple[int, ...]] | None = None,
    vanished: tuple[int, ...] = (),
    first_rank: int = 0,
    model: str = "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
) -> Manifest:
    """`holes`: graph number to the ranks that did not trace it."""
    chance = random.Random(seed)
    start = dt.datetime(2026, 8, 6, 20, 37, 11, 818072, tzinfo=dt.UTC)
    made = []
    for number in range(graphs):
        key = hashlib.md5(f"{seed}/{number}".encode()).hexdigest()
        batch = 1 << (number % 6)
        length = 128 << (number % 8)
        gone = number in vanished
        start += dt.timedelta(seconds=chance.uniform(2, 90))
        lost = (holes or {}).get(number, ())
        made.append(
            Graph(
                graph_hash=key,
                hlo_path=None if gone else f"{key}/graph.hlo",
                neff_path=None if gone else f"{key}/graph_{key}.neff",
                neff_size=None if gone else int(chance.lognormvariate(14.5, 0.9)),
                created_timestamp=None if gone else start.isoformat(),
                input_shapes=(f"{batch},", f"{batch},", f"{batch}, {length}")
                + ("2048, 2048", "2048, 5632", "2048,") * (inputs // 3 - 1),
                output_shapes=None if gone else (f"{batch}", f"{batch}, 49152"),
                compiler_flags=FLAGS if number % 3 else FLAGS.replace("-O2", "-O1"),
                ranks=tuple(r for r in range(first_rank, first_rank + world) if r not in lost),
            )
        )
    return Manifest(
        config=Config(
            model=model,
            target="trn2",
            dtype="torch.bfloat16",
            max_num_seqs=32,
            max_model_len=16384,
            topology=Topology(world, world, 1, 1, 1, 1, 1, has_collectives=True),
            neuron_config={"on_device_sampling": True, "buckets": [128, 256, 512]},
            vllm_config={
                "model_config": {"seed": seed, "model": model, "max_model_len": 16384},
                "cache_config": {"block_size": 32, "gpu_memory_utilization": 0.9},
                "scheduler_config": {"max_num_batched_tokens": 8192},
            },
        ),
        graphs=tuple(made),
        environment={
            "python": "3.13.7",
            "neuronx-cc": "2.31.1",
            "torch": "2.11.0",
            "vllm": "0.24.0",
        },
    )


def engine(name: str = "dev0_7", **options) -> Engine:
    return Engine(name, Path(f"/manifests/{name}/manifest.json"), manifest(**options))

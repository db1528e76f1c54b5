"""An engine's manifest from end to end: four ranks record, local rank 0 emits, and it is read back.

Run it with a directory for everything it writes: `python examples/emit_manifest.py /tmp/example`.
Without one it uses a temporary directory. No accelerator is needed: the artifacts are stand-ins.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import struct
import sys
import tempfile
from pathlib import Path

from neuron_store import open_store
from neuron_store.manifest.emitter import emit_manifest
from neuron_store.manifest.ledger import record_graph
from neuron_store.manifest.reader import read_manifest

BUCKETS = (128, 256, 512)
FLAGS = ["--framework", "XLA", "--target", "trn2", "--auto-cast=none"]


def key_of(bucket: int) -> str:
    return hashlib.md5(f"decode-{bucket}".encode(), usedforsecurity=False).hexdigest()


def compile_stand_in(root: Path, key: str, bucket: int) -> None:
    """What the Neuron stack leaves in its cache for one graph, the completion mark last."""
    entry = root / key
    entry.mkdir(parents=True)
    program = struct.pack("<QQQ", 2, 1024, bucket).ljust(1024 + bucket, b"\0")
    # A tiny HLO module: one computation whose result is f32[bucket].
    result = bytes([0x10, 11, 0x18]) + varint(bucket)
    shape = b"\x12" + varint(len(result)) + result
    computation = b"\x22" + varint(len(shape)) + shape
    (entry / "graph.hlo").write_bytes(b"\x0a\x04main\x1a" + varint(len(computation)) + computation)
    (entry / f"graph_{key}.neff").write_bytes(program)
    (entry / ".artifact_metadata_v0.json").write_text(json.dumps({"version": 0, "cache_key": key}))
    mark = f"completed:0\nneff_size:{len(program)}\n"
    (entry / ".compilation_complete").write_text(mark)


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def rank_main(rank: int) -> None:
    """What each rank's capture backend does for each graph."""
    for bucket in BUCKETS:
        record_graph(key_of(bucket), rank, [(4,), (4, bucket)], FLAGS)
    os._exit(0)  # As forked tracers end; the lines are on the disk already.


def main() -> None:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="manifest-"))
    os.environ["VLLM_NEURON_MANIFEST_DIR"] = str(place / "manifests")
    os.environ["NEURON_VISIBLE_DEVICES"] = "0-3"
    for bucket in BUCKETS:
        compile_stand_in(place / "cache", key_of(bucket), bucket)

    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(rank,)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()

    config = {
        "model_config": {"model": "example", "dtype": "torch.bfloat16", "max_model_len": 512},
        "parallel_config": {"world_size": 4, "tensor_parallel_size": 4},
        "api_key": "this is masked",
    }
    with open_store([], local=place / "cache") as store:
        path = emit_manifest(store, config=config, rank_to_global=lambda rank: rank)
    assert path is not None
    manifest = read_manifest(path)
    for graph in manifest.graphs:
        print(
            graph.graph_hash, graph.neff_size, graph.input_shapes, graph.output_shapes, graph.ranks
        )
    print(f"target {manifest.config.target}, api_key {manifest.config.vllm_config['api_key']}")
    print(f"manifest: {path}")


if __name__ == "__main__":
    main()

"""Tensor-parallel ranks share compiles: `python examples/tensor_parallel.py [--ranks 4]`.

Each rank holds its slice of a decoder block's MLP and calls `torch.compile(..., "neuron_store")`.
All ranks have the same graph, so one of them compiles it and the others wait for it and load it.
Then half of the ranks run prefill and half decode: two graphs, compiled side by side. The sums
between ranks go through torch.distributed (gloo, 127.0.0.1), outside of the compiled graphs.
Needs the extra `torch`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from pathlib import Path

WIDTH = 64
PREFILL, DECODE = 16, 1


def rank_main(rank: int, ranks: int, port: int, split: bool, store: str, results) -> None:
    import torch
    import torch.distributed as dist

    from neuron_store import open_store

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )

    class Slice(torch.nn.Module):
        """Columns of the first projection and rows of the second: one rank's share."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(rank)
            self.gate = torch.nn.Linear(WIDTH, 2 * WIDTH // ranks, bias=False)
            self.up = torch.nn.Linear(WIDTH, 2 * WIDTH // ranks, bias=False)
            self.down = torch.nn.Linear(2 * WIDTH // ranks, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    # Groups of ranks that work together: all of them, or prefill's half and decode's.
    halves = [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    groups = [dist.new_group(half) for half in halves] if split else [dist.group.WORLD]
    mine = groups[rank * 2 // ranks] if split else groups[0]
    length = DECODE if split and rank >= ranks // 2 else PREFILL
    model = Slice()
    tier = open_store([], local=store)

    torch.manual_seed(100)
    x = torch.randn(1, length, WIDTH)
    compiled = torch.compile(model, backend="neuron_store", options={"store": tier})
    with torch.no_grad():
        dist.barrier()
        start = time.time()
        y = compiled(x)
        end = time.time()
        want = model(x)
        # Collectives stay outside of the graph: inside, they would send all of it to eager.
        dist.all_reduce(y, group=mine)
        dist.all_reduce(want, group=mine)
    results.put(
        {
            "rank": rank,
            "phase": "decode" if length == DECODE else "prefill",
            "start": start,
            "end": end,
            "lowered": "jax" in sys.modules,
            "error": (y - want).abs().max().item(),
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, *, split: bool, store: Path) -> list[dict]:
    """Start the ranks, and return what each of them saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [
        context.Process(target=rank_main, args=(r, ranks, port, split, str(store), results))
        for r in range(ranks)
    ]
    for child in children:
        child.start()
    try:
        return sorted((results.get(timeout=300) for _ in children), key=lambda r: r["rank"])
    finally:
        for child in children:
            child.join(60)
            if child.is_alive():
                child.terminate()


def artifacts(store: Path) -> list[dict]:
    """The record of each artifact in the local tier."""
    return [json.loads(p.read_text()) for p in sorted(store.glob("*/.neuron_store.json"))]


def show(title: str, rows: list[dict], compiled: int) -> None:
    print(f"\n{title}")
    print(f"  {'rank':>4}  {'graph':8} {'first call':>10}  {'did':8} {'error':>8}")
    for row in rows:
        did = "compiled" if row["lowered"] else "waited"
        print(
            f"  {row['rank']:>4}  {row['phase']:8} {row['end'] - row['start']:>8.2f} s  {did:8} "
            f"{row['error']:>8.1e}"
        )
    print(f"  {len(rows)} ranks, {compiled} compile{'s' if compiled != 1 else ''}")
    shared = side_by_side(rows)
    if shared is not None:
        print(f"  side by side for {shared:.2f} s")


def side_by_side(rows: list[dict]) -> float | None:
    """Seconds for which two ranks compiled at once; None when one rank alone compiled."""
    makers = [row for row in rows if row["lowered"]]
    if len(makers) < 2:
        return None
    return min(row["end"] for row in makers) - max(row["start"] for row in makers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    if ranks < 2 or ranks % 2 or 2 * WIDTH % ranks:
        parser.error("--ranks must be even and divide 128")
    with tempfile.TemporaryDirectory(prefix="neuron_store.") as root:
        same, apart = Path(root, "same"), Path(root, "apart")
        one = run(ranks, split=False, store=same)
        show("One graph on all ranks", one, len(artifacts(same)))
        two = run(ranks, split=True, store=apart)
        show("Prefill on one half, decode on the other", two, len(artifacts(apart)))
        good = (
            len(artifacts(same)) == 1
            and len(artifacts(apart)) == 2
            and (side_by_side(two) or 0) > 0
            and all(row["error"] < 1e-5 for row in one + two)
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

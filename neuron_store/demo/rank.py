"""One rank of a node, as a serving engine would start it: a process of its own.

It takes requests as lines of JSON on stdin and answers each with a line on stdout; it ends when
stdin does, and so with whoever started it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store import CompileCoordinator, open_store
from neuron_store.compilers._example_graphs import example_arrays, example_graph
from neuron_store.compilers.iree import IreeCompiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from neuron_store import CompileJob

__all__ = ["Rank", "main"]

# float32 through two compilers: other orders of summation, and no more than that.
TOLERANCE = 1e-4


class Rank:
    """Does what it is asked, with the store that the environment describes."""

    def __init__(self) -> None:
        self.compiler = IreeCompiler()
        self.store = open_store()
        self.coordinator = CompileCoordinator(self.store)

    def _job(self, name: str) -> CompileJob:
        return self.compiler.job(example_graph(name))

    def get(self, graphs: Sequence[str]) -> dict[str, Any]:
        """Get each graph's artifact, compiling it when nobody else does."""
        began = time.perf_counter()
        keys = {}
        for name in graphs:
            job = self._job(name)
            self.coordinator.get_or_compile(job)
            keys[name] = job.key
        return {
            "keys": keys,
            "seconds": time.perf_counter() - began,
            "counts": dict(self.coordinator.counts),
            "tiers": {name: attrs.asdict(c) for name, c in self.store.counters().items()},
        }

    def promote(self, graphs: Sequence[str], to: str) -> dict[str, Any]:
        """Publish each graph's artifact in one shared tier."""
        before = self.store.counters()[to].bytes
        began = time.perf_counter()
        answers = [self.store.promote(self._job(name).key, to=to)[to] for name in graphs]
        return {
            "answers": [answer.value for answer in answers],
            "seconds": time.perf_counter() - began,
            "bytes": self.store.counters()[to].bytes - before,
        }

    def run(self, graphs: Sequence[str]) -> dict[str, Any]:
        """Run each graph's artifact on the inputs stored beside the graph; compare the results."""
        began = time.perf_counter()
        worst = 0.0
        for name in graphs:
            program = self.compiler.load(self.store.get(self._job(name).key))
            inputs, expected = example_arrays(name)
            results = program.run("main", *inputs)
            if [r.shape for r in results] != [e.shape for e in expected]:
                return {"agrees": False, "difference": None, "seconds": 0.0}
            for result, reference in zip(results, expected, strict=True):
                difference = float(abs(result - reference).max())
                # Not max(): a NaN would lose every comparison, and with it the check.
                worst = difference if not difference <= worst else worst
        return {
            "agrees": worst <= TOLERANCE,
            "difference": worst if worst == worst else None,  # noqa: PLR0124  (NaN is no JSON)
            "seconds": time.perf_counter() - began,
        }


def _serve(answer: Callable[[dict[str, Any]], None]) -> None:
    rank = Rank()
    answer({"ready": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(rank, request.pop("do"))
        answer(operation(**request))


def main() -> None:
    """Serve requests until stdin ends."""
    # What a compiler or its runtime prints must not get between the answers.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        channel.write(json.dumps(content, allow_nan=False) + "\n")
        channel.flush()

    try:
        _serve(answer)
    except Exception as error:  # noqa: BLE001  (whatever it was, who asked must hear of it)
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""Work on keys shared out among forked processes, which tell what became of each by JSON.

For what Python's lock bounds: one process brings some fifty small graphs a second, whatever the
number of its threads.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

__all__ = ["shared_out"]


def shared_out(
    keys: Sequence[str],
    processes: int,
    work: Callable[[Sequence[str], Callable[[dict[str, Any]], None]], None],
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Call `work` in each process with its share of the keys and a function that takes results.

    Args:
        keys: distinct.
        processes: at least one.
        work: ends when its share is done; each result holds its `key`, and is plain JSON.

    Yields:
        A key and its result, as they come; or, for a key whose process ended without one, in words
        how it ended. Each key once. Whoever leaves early ends the processes.
    """
    context = multiprocessing.get_context("fork")
    shares: dict[Any, tuple[Any, set[str]]] = {}
    try:
        for number in range(processes):
            share = keys[number::processes]
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, share, there), daemon=True)
            process.start()
            there.close()
            shares[here] = (process, set(share))
        while shares:
            for pipe in wait(list(shares)):
                process, missing = shares[pipe]
                try:
                    result = json.loads(pipe.recv_bytes())  # type: ignore[union-attr]  # of a Pipe
                except EOFError:
                    process.join()
                    del shares[pipe]
                    pipe.close()  # type: ignore[union-attr]
                    how = f"the process that worked on it ended early ({_ending(process.exitcode)})"
                    yield from ((key, how) for key in sorted(missing))
                    continue
                missing.discard(result["key"])
                yield result["key"], result
    finally:
        for process, _ in shares.values():
            process.kill()
        for pipe, (process, _) in shares.items():
            process.join()
            pipe.close()


def _ending(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _work(
    work: Callable[[Sequence[str], Callable[[dict[str, Any]], None]], None],
    share: Sequence[str],
    pipe: Connection,
) -> None:
    # A Ctrl-C goes to the whole group; the parent ends its children, who would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the parent left is nobody's garbage here; to look through it would only copy its pages.
    gc.freeze()
    lock = threading.Lock()

    def tell(result: dict[str, Any]) -> None:
        with lock:
            try:
                pipe.send_bytes(json.dumps(result).encode())
            except BrokenPipeError:  # the parent was killed: nobody wants the rest
                os._exit(1)

    work(share, tell)

"""Work on keys shared out among forked processes, which tell what became of each by JSON.

For what Python's lock bounds: one process brings some fifty small graphs a second, whatever the
number of its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import select
import signal
import threading
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

__all__ = ["Keys", "shared_out"]

_WIDTH = 4


class Keys:
    """Keys that several forked processes take from, each key once, in their order. Thread-safe.

    Whoever is slower takes fewer. The keys' numbers wait in a pipe, as the tokens of GNU make's job
    server do: the kernel gives each to one reader, and a child that is killed holds no lock that
    the others need.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        # Any pipe holds as much, even the last ones of a user who has too many.
        self._each = max(1, -(-len(keys) // (select.PIPE_BUF // _WIDTH)))
        self._mine: Iterator[str] = iter(())
        self._guard = threading.Lock()
        self._numbers, filling = os.pipe()
        with os.fdopen(filling, "wb") as pipe:
            # Then closed: after the last number comes the end, and nobody ever waits.
            pipe.writelines(n.to_bytes(_WIDTH, "big") for n in range(0, len(keys), self._each))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        with self._guard:
            for key in self._mine:
                return key
            number = os.read(self._numbers, _WIDTH)
            if not number:
                raise StopIteration
            first = int.from_bytes(number, "big")
            self._mine = iter(self._keys[first : first + self._each])
            return next(self._mine)

    def close(self) -> None:
        """In this process; those that were forked have descriptors of their own."""
        os.close(self._numbers)


def shared_out(
    keys: Sequence[str],
    processes: int,
    work: Callable[[Iterator[str], Callable[[dict[str, Any]], None]], None],
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Call `work` in each process with what it takes keys from and a function that takes results.

    Args:
        keys: distinct.
        processes: at least one.
        work: ends when no key is left; each result holds its `key`, and is plain JSON. Its threads
            may take keys at once.

    Yields:
        A key and its result, as they come; or, for a key whose process ended without one, in words
        how it ended. Each key once. Whoever leaves early ends the processes.
    """
    context = multiprocessing.get_context("fork")
    children: dict[Any, ForkProcess] = {}
    missing, endings, rest = dict.fromkeys(keys), list[str](), Keys(keys)
    try:
        for number in range(processes):
            here, there = context.Pipe(duplex=False)
            core = _core(number, processes)
            process = context.Process(
                target=_work, args=(work, rest, there, core, os.getpid()), daemon=True
            )
            process.start()
            there.close()
            children[here] = process
        while children:
            for pipe in wait(list(children)):
                try:
                    result = json.loads(pipe.recv_bytes())  # type: ignore[union-attr]  # of a Pipe
                except EOFError:
                    process = children.pop(pipe)
                    process.join()
                    pipe.close()  # type: ignore[union-attr]
                    if process.exitcode:
                        endings.append(_ending(process.exitcode))
                    continue
                missing.pop(result["key"], None)
                yield result["key"], result
        how = f"the process that worked on it ended early ({', '.join(endings)})"
        yield from ((key, how) for key in missing)
    finally:
        rest.close()
        for process in children.values():
            process.kill()
        for pipe, process in children.items():
            process.join()
            pipe.close()


def _core(number: int, processes: int) -> int | None:
    """Where the process is to stay; None: anywhere, there are more cores than processes.

    Its threads hand Python's lock to each other thousands of times a second. On one core that wakes
    no other, and what they all use stays in its caches.
    """
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)] if processes >= len(cores) else None


def _die_with(parent: int) -> None:
    """A parent that is killed can end nobody: the kernel does, and work for nobody stops."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it was killed before
        os._exit(1)


def _ending(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _work(
    work: Callable[[Iterator[str], Callable[[dict[str, Any]], None]], None],
    keys: Keys,
    pipe: Connection,
    core: int | None,
    parent: int,
) -> None:
    # A Ctrl-C goes to the whole group; the parent ends its children, who would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    # What the parent left is nobody's garbage here; to look through it would only copy its pages.
    gc.freeze()
    if core is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
    lock = threading.Lock()

    def tell(result: dict[str, Any]) -> None:
        with lock:
            try:
                pipe.send_bytes(json.dumps(result).encode())
            except BrokenPipeError:  # the parent was killed: nobody wants the rest
                os._exit(1)

    work(keys, tell)

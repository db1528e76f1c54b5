"""Threads and memory of one process for clients that block: what several transfers share."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Crew", "crew"]

_THREADS = 32
_WIDTH = 16
_BYTES = 64 << 20


class Crew:
    """Helpers for whoever has several things to do at once. Thread-safe.

    The caller does its tasks itself, and idle threads help. So it gets on when all are busy, and
    tasks may share in turn.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="neuron_store-transfer")
        self._free = _BYTES
        self._changed = threading.Condition()

    def share(self, tasks: Sequence[Callable[[], None]], weight: int) -> None:
        """Do every task, begun in their order; return when no thread is at them any more.

        Args:
            tasks: a task may wait for one that comes before it, for no other.
            weight: bytes that one of them holds in memory at most.

        Raises:
            BaseException: what the first of them to fail raised; the rest were not begun.
        """
        waiting, failed = deque(tasks), list[BaseException]()

        def work() -> None:
            while waiting and not failed:
                # The room first, then the task: a task that was begun never waits for room that
                # those behind it hold while they wait for it.
                with self._room(weight):
                    try:
                        task = waiting.popleft()
                    except IndexError:
                        return
                    try:
                        task()
                    except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
                        failed.append(error)

        helpers = [self._pool.submit(work) for _ in range(min(len(tasks), _WIDTH) - 1)]
        try:
            work()
        finally:
            for helper in helpers:
                helper.cancel()
            wait(helpers)
        if failed:
            raise failed[0]

    @contextlib.contextmanager
    def _room(self, weight: int) -> Iterator[None]:
        weight = min(weight, _BYTES)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= weight)
            self._free -= weight
        try:
            yield
        finally:
            with self._changed:
                self._free += weight
                self._changed.notify_all()


_crews: dict[int, Crew] = {}


def crew() -> Crew:
    """The process's own; a forked child has none of its parent's threads."""
    pid = os.getpid()
    found = _crews.get(pid)
    return found if found is not None else _crews.setdefault(pid, Crew())

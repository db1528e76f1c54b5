"""One object as a stream, from a client on an event loop."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import fsspec.asyn

from neuron_store_backends._objects import PIECE
from neuron_store_backends._trouble import Missing, Vanished

if TYPE_CHECKING:
    from concurrent.futures import Future

    from neuron_store_backends._async_objects import AsyncObjects

__all__ = ["ObjectReader"]


class ObjectReader(io.RawIOBase):
    """One object as a stream, read ahead in concurrent ranges that arrive in order.

    Args:
        objects: where it is.
        path: its full path.
        size: bytes by the record; no more than that is asked for.
        key: for messages.
        start: from where it is wanted, in bytes; None: from its beginning.
        budget: bounds the pieces in memory over several readers; None: a few of its own.

    Raises:
        Missing: there is no such object (at construction).
        TierError: it cannot be read (at construction, and at each read).
    """

    def __init__(
        self,
        objects: AsyncObjects,
        path: str,
        size: int,
        *,
        key: str,
        start: int | None = None,
        budget: threading.Semaphore | None = None,
    ) -> None:
        super().__init__()
        self._objects = objects
        self._path = path
        self._size = size
        self._key = key
        self._budget = budget or threading.Semaphore(4)
        self._asked = start or 0
        self._ahead: deque[tuple[int, Future[bytes]]] = deque()
        self._piece = memoryview(b"")
        self._holding = self._ended = self._begun = False
        objects.handle()
        try:
            self._next()
        except BaseException:
            self.close()
            raise

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        if not self._piece and not self._ended:
            self._next()
        view = memoryview(target).cast("B")
        count = min(len(view), len(self._piece))
        view[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def _next(self) -> None:
        self._release()
        self._ask()
        if not self._ahead:
            self._ended = True
            return
        length, future = self._ahead.popleft()
        self._holding = True
        try:
            data = future.result()
        except Missing:
            if not self._begun:
                raise
            raise Vanished(
                self._objects.location, "read", f"{self._path} vanished while read", key=self._key
            ) from None
        self._begun = True
        # Shorter than asked for means that the object ends there: the digest check will tell.
        self._ended = len(data) < length
        self._piece = memoryview(data)

    def _ask(self) -> None:
        """Ask for pieces as far ahead as the budget allows; for one at least."""
        while self._asked < self._size:
            if not self._budget.acquire(blocking=not self._ahead):
                return
            end = min(self._asked + PIECE, self._size)
            work = self._objects.range(self._path, self._asked, end, key=self._key)
            future = asyncio.run_coroutine_threadsafe(work, fsspec.asyn.get_loop())
            self._ahead.append((end - self._asked, future))
            self._asked = end

    def _release(self) -> None:
        if self._holding:
            self._holding = False
            self._piece = memoryview(b"")
            self._budget.release()

    def close(self) -> None:
        if not self.closed:
            self._release()
            while self._ahead:
                self._ahead.popleft()[1].cancel()
                self._budget.release()
        super().close()

"""The bytes of one upload on an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from neuron_store_backends._objects import PIECE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")
__all__ = ["Pieces"]


class Pieces:
    """The bytes of one upload, in order, at most `PIECE` at a time.

    Reading and hashing happen in a thread, so that the event loop goes on with the network.
    `budget` bounds the pieces that are in memory, over all uploads of one publish; whoever sent a
    piece calls `done`.
    """

    def __init__(
        self, size: int, source: Callable[[int], Iterator[bytes]], budget: asyncio.Semaphore
    ) -> None:
        self.size = size
        # S3 takes 10,000 parts at most.
        self.length = max(PIECE, -(-size // 10_000))
        self._source = source(self.length)
        self._budget = budget

    async def take(self) -> bytes | None:
        """The next piece; None after the last."""
        await self._budget.acquire()
        try:
            piece = await asyncio.to_thread(next, self._source, None)
        except BaseException:
            self._budget.release()
            raise
        if piece is None:
            self._budget.release()
        return piece

    def done(self) -> None:
        """A piece that was taken is sent."""
        self._budget.release()

    async def whole(self) -> bytes:
        """Every byte at once; only for what fits one piece."""
        data = await self.take() or b""
        try:
            if await asyncio.to_thread(next, self._source, None) is not None:
                raise AssertionError("more than one piece")
        finally:
            self.done()
        return data

    async def each(self, send: Callable[[int, bytes], Awaitable[T]], width: int = 4) -> list[T]:
        """Send each piece with its number (0, 1, ...), up to `width` at a time; results in order.

        When one fails, the rest are cancelled before the error is raised.
        """
        tasks: list[asyncio.Task[T]] = []
        slots = asyncio.Semaphore(width)

        def over(_task: asyncio.Task[T]) -> None:
            # A callback and not a `finally`: a task cancelled before it began runs neither.
            self.done()
            slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await slots.acquire()
                    piece = await self.take()
                    if piece is None:
                        break
                    task = group.create_task(_await(send(len(tasks), piece)))
                    task.add_done_callback(over)
                    tasks.append(task)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]


async def _await(what: Awaitable[T]) -> T:
    return await what

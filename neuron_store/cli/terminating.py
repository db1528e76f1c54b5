"""SIGTERM, for commands that have something to put in order before they end."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["terminable"]


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Clean up on SIGTERM as on Ctrl-C: it raises `SystemExit(143)` in the block, once.

    For the main thread. Further ones are ignored until the block is left: `timeout` sends two.
    """

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

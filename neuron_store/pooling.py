"""Several things at once, in order, and left at once on Ctrl-C."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["each"]

_T = TypeVar("_T")
_R = TypeVar("_R")


def each(call: Callable[[_T], _R], items: Iterable[_T], *, workers: int) -> Iterator[_R]:
    """The call's results in the order of `items`, `workers` calls at once.

    Whoever leaves early does not wait for the calls that run: a publish or a fetch may be cut off
    anywhere and leaves nothing visible.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(call, items)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

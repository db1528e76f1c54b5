"""Named places in a publish at which a test may kill, pause or fail the process.

Each step of both ways to publish calls `step` with its name before it begins. Nothing happens
unless a test set a hook, so that crash safety can be tested at each step and not by sleeping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["set_hook", "step"]

_hook: Callable[[str], None] | None = None


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every step of this process from now on; None stops that.

    The hook is inherited by forked children. Under `spawn` the child sets its own.
    """
    global _hook  # noqa: PLW0603  (one per process is the point)
    _hook = hook


def step(name: str) -> None:
    """Mark that the step `name` is about to begin."""
    if _hook is not None:
        _hook(name)

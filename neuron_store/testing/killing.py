"""Killing a process at the n-th step of what it does to a tier."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store import steps

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KilledAt", "run_killed_at"]

_PATIENCE = 300.0


@attrs.frozen
class KilledAt:
    """How the child ended."""

    step: str | None
    """The step before which it was killed; None when it ran to its end."""
    error: str | None
    """What it raised, when it was not killed."""


def _child(action: Callable[[], object], number: int, wanted: str | None, report: Any) -> None:
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        if wanted is not None and name != wanted:
            return
        seen += 1
        if seen == number:
            report.send(("killed", name))
            os.kill(os.getpid(), signal.SIGKILL)

    steps.set_hook(hook)
    try:
        action()
    except Exception as error:  # noqa: BLE001  (told to the test)
        report.send(("raised", f"{type(error).__name__}: {error}"))
    else:
        report.send(("done", None))


def run_killed_at(
    action: Callable[[], object],
    number: int,
    *,
    name: str | None = None,
    method: str = "fork",
) -> KilledAt:
    """Run `action` in a child that gets SIGKILL right before its `number`-th step (from 1).

    A whole operation is covered by counting up until `KilledAt.step` is None.

    Args:
        action: what to run.
        number: of the step.
        name: only steps of that name are counted: those of a heartbeat come when they come.
        method: how the child is started.
    """
    context = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(action, number, name, there), daemon=True)  # type: ignore[attr-defined]  # every context has it
    child.start()
    there.close()
    try:
        what, text = here.recv() if here.poll(_PATIENCE) else ("raised", "no word from the child")
    except EOFError:
        what, text = "raised", "the child ended without a word"
    child.join(_PATIENCE)
    here.close()
    return KilledAt(text if what == "killed" else None, text if what == "raised" else None)

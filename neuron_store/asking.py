"""Asking one tier something, its trouble turned into a word, and never for longer than allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ArtifactUntrusted,
    InvalidKey,
    NeuronStoreError,
    TierError,
)
from neuron_store.tier_health import Stalled, bounded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Trouble", "ask"]

_T = TypeVar("_T")


class Trouble:
    """What a tier answered instead: `outcome` is `miss`, `corrupt`, `refused` or `error`."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        self.outcome = outcome
        self.detail = detail


def ask(location: str, call: Callable[[], _T], *, seconds: float | None) -> _T | Trouble:
    """The call's value, or the trouble it met.

    Args:
        location: the tier's.
        call: what to ask.
        seconds: after which the tier counts as mute; None where a long answer is a good one.

    Raises:
        InvalidKey: the question was wrong, not the tier.
    """
    try:
        return call() if seconds is None else bounded(call, seconds)
    except InvalidKey:
        raise
    except ArtifactNotFound:
        return Trouble("miss")
    except ArtifactCorrupt as error:
        return Trouble("corrupt", error.reason)
    except ArtifactUntrusted as error:
        return Trouble("refused", error.reason)
    except TierError as error:
        return Trouble("error", error.reason)
    except NeuronStoreError as error:
        return Trouble("error", str(error))
    except Stalled:
        return Trouble("error", f"{location} did not answer within {seconds:g} s")

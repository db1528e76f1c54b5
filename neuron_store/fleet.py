"""Whose turn it is to compile, among all nodes that share a tier.

A lease only saves work. Losing it, or going on without one, costs a compile done twice; what counts
is the artifact that publish keeps.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Self

import attrs

from neuron_store.errors import (
    CompileTimeout,
    LeaseHeld,
    NeuronStoreError,
    TierError,
    TiersUnavailable,
    Unsupported,
)

if TYPE_CHECKING:
    from types import TracebackType

    from neuron_store.abc import ArtifactStore, Lease

__all__ = ["Fleet", "Turn"]

_log = logging.getLogger(__name__)

# Two requests a second for all who wait in this process. A fleet of a thousand nodes that waits for
# one compile then asks for 500 to 2000 objects a second, which an object store bears.
_SECONDS_A_REQUEST = 0.5
_LONGEST_PAUSE = 2.0
# A look that fails is tried again: a fleet that starts together is what makes a store throttle, and
# the worst moment to compile everywhere. So many in a row, or the tiers' deadline, are the end.
_TRIES = 3
_DEADLINE = 30.0


@attrs.frozen
class Turn:
    """What the wait ended in. As a context manager it gives the lease back."""

    lease: Lease | None = None
    """This node compiles; None: there is no lease to be had, and it compiles all the same."""
    arrived: bool = False
    """Another node's artifact appeared."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.lease is not None:
            self.lease.release()


class _Pace:
    """Spaces out the requests of all threads that wait."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._free_at = 0.0

    def take(self, requests: int) -> None:
        """Wait for room for so many, and fill it."""
        with self._guard:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + requests * _SECONDS_A_REQUEST
        time.sleep(start - now)


_pace = _Pace()


def _new_pace() -> None:
    # Another thread of the parent may have held the guard.
    global _pace  # noqa: PLW0603  (the parent's is useless here)
    _pace = _Pace()


os.register_at_fork(after_in_child=_new_pace)


class Fleet:
    """The nodes that share the tiers of a store."""

    def __init__(self, store: ArtifactStore, ttl: float, timeout: float) -> None:
        """Args: store; ttl of the leases and the longest wait for another node, in seconds."""
        self._store = store
        self._ttl = ttl
        self._timeout = timeout
        # An artifact look asks each shared tier, where there are several.
        self._requests = max(1, len(getattr(store, "shared", ())))
        self._deadline: float = getattr(store, "deadline", _DEADLINE)
        self._told = False

    def turn(self, key: str, until: float, *, look: bool = True) -> Turn:
        """Wait for the lease, or for the artifact of the node that holds it.

        Args:
            key: what is to be compiled.
            until: `time.monotonic()` at which waiting for a live holder ends.
            look: whether the artifact's appearance ends the wait.

        Raises:
            CompileTimeout: another node holds the lease for too long; names it.
        """
        pause, failures, lost = _SECONDS_A_REQUEST, 0, 0.0
        holder: LeaseHeld | None = None
        while True:
            _pace.take(1)
            asked = time.monotonic()
            try:
                return Turn(self._store.lease(key, self._ttl))
            except LeaseHeld as error:
                if holder is None or (holder.holder, holder.host) != (error.holder, error.host):
                    _log.info("%s; waiting", error)
                holder, failures, lost = error, 0, 0.0
            except (Unsupported, TiersUnavailable) as error:
                # The latter: left alone after repeated trouble, and not asked at all.
                self._tell(error)
                return Turn()
            except TierError as error:
                failures, lost = failures + 1, lost + time.monotonic() - asked
                if failures == _TRIES or lost >= self._deadline:
                    self._tell(error)
                    return Turn()
            if holder is not None and time.monotonic() >= until:
                raise self._timed_out(key, holder)
            _rest(pause, until)
            if look:
                _pace.take(self._requests)
                if self._appeared(key):
                    return Turn(arrived=True)
                _rest(pause, until)
            pause = min(pause * 1.25, _LONGEST_PAUSE)

    def _appeared(self, key: str) -> bool:
        try:
            return self._store.find(key) is not None
        except NeuronStoreError as error:
            # A damaged artifact, or a tier that cannot say: the lease is still to be had.
            _log.debug("%s", error)
            return False

    def _tell(self, error: NeuronStoreError) -> None:
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        _log.log(level, "no fleet lease, so that several nodes may compile the same: %s", error)

    def _timed_out(self, key: str, holder: LeaseHeld) -> CompileTimeout:
        return CompileTimeout(
            key,
            self._timeout,
            holder=holder.holder,
            host=holder.host or "an unknown host",
            age=None,
        )


def _rest(pause: float, until: float) -> None:
    # Spread, lest a fleet that started together asks together for ever.
    left = max(0.0, until - time.monotonic())
    time.sleep(min(left, pause * random.uniform(0.75, 1.25)))  # noqa: S311  (nothing secret)

"""What a tier has done for us, and how long it may keep us waiting.

A tier in trouble costs a caller a bounded time in all: a call that makes no progress is abandoned,
and a tier that keeps failing is left alone until a look-up in the background finds it well again.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import attrs

from neuron_store.errors import NeuronStoreError, TierError

if TYPE_CHECKING:
    from collections.abc import Callable

    from neuron_store.abc import ArtifactStore

__all__ = ["Stalled", "TierCounters", "TierHealth", "bounded", "is_of_this_side"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_UNSEEN = object()
_FAILURES_IN_A_ROW = 3
_FIRST_REST = 15.0
_LONGEST_REST = 300.0


@attrs.frozen
class TierCounters:
    """What one tier did for this process. `bytes` were fetched from or promoted to it."""

    hits: int = 0
    misses: int = 0
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: int = 0
    """Artifacts that were there and that nobody trusted vouches for."""


def is_of_this_side(error: NeuronStoreError, store: ArtifactStore) -> bool:
    """Whether a fetch failed for want of a place to write to: a full disk is no fault of a tier."""
    return (
        isinstance(error, TierError)
        and error.operation == "write"
        and not error.location.startswith(store.location)
    )


class Stalled(Exception):
    """A bounded call made no progress for too long; it may still be running."""


def bounded(
    call: Callable[[], _T], seconds: float, progress: Callable[[], object] | None = None
) -> _T:
    """Run `call` in a thread of its own; raise `Stalled` after `seconds` without progress.

    A hung mount cannot be interrupted: the thread is left behind (it is a daemon).

    Args:
        call: what to run.
        seconds: time without progress that is allowed.
        progress: a value that changes while there is some; None: any time counts.
    """
    result: list[_T] = []
    trouble: list[BaseException] = []
    # A plain lock wakes its waiter at once; an Event polls a lock of its own besides.
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            trouble.append(error)
        finally:
            done.release()

    _hand_over(run)
    # Most calls have ended before there is a first look.
    seen: object = _UNSEEN
    since = time.monotonic()
    while not done.acquire(timeout=min(0.5, max(0.01, seconds / 20))):
        now = time.monotonic()
        if progress is not None and (current := progress()) != seen:
            since = since if seen is _UNSEEN else now
            seen = current
        if now - since > seconds:
            raise Stalled
    if trouble:
        raise trouble[0]
    return result[0]


# Threads of this process that wait for another call, the last one to finish first.
_idle: list[queue.SimpleQueue[Callable[[], None]]] = []
_MOST_IDLE = 32


def _hand_over(run: Callable[[], None]) -> None:
    """Run it in a thread that is free, or in a new one: starting one is dear on a busy machine."""
    try:
        work = _idle.pop()
    except IndexError:
        work = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(work,), name="neuron_store-tier", daemon=True).start()
    work.put(run)


def _serve(work: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        run = work.get()
        run()
        # What the call held must not live on with the thread.
        del run
        if len(_idle) >= _MOST_IDLE:
            return
        _idle.append(work)


# A child has none of its parent's threads.
os.register_at_fork(after_in_child=_idle.clear)


class TierHealth:
    """Counters and the state of health of one tier in this process. Thread-safe."""

    def __init__(self, store: ArtifactStore, deadline: float) -> None:
        """Args: store; deadline, seconds that its trouble may cost callers until it is well."""
        self._store = store
        self._deadline = deadline
        self._left = deadline
        self._lock = threading.Lock()
        self._counters = TierCounters()
        self._in_a_row = 0
        self._rest = _FIRST_REST
        self._resting_since: float | None = None
        self._prober = 0

    @property
    def counters(self) -> TierCounters:
        """A snapshot."""
        with self._lock:
            return self._counters

    def resting(self) -> str | None:
        """Why the tier is left alone at the moment, or None when it may be asked."""
        with self._lock:
            if self._resting_since is None:
                return None
            rested = time.monotonic() - self._resting_since
            if rested > self._rest and self._prober != os.getpid():
                self._prober = os.getpid()
                threading.Thread(
                    target=self._look_again, name="neuron_store-tier-probe", daemon=True
                ).start()
            return f"left alone after repeated trouble, {rested:.0f} s ago"

    def run(
        self,
        operation: str,
        key: str,
        call: Callable[[], _T],
        *,
        seconds: float,
        progress: Callable[[], object] | None = None,
    ) -> _T:
        """Run one call against the tier, at most `seconds` without progress.

        Raises:
            TierError: the call's own, or that the tier did not answer in time.
        """
        began = time.monotonic()
        # A little less, so that what passes beside the waiting stays within it, too.
        allowed = max(0.05, min(seconds, 0.95 * self._left))
        try:
            value = bounded(call, allowed, progress)
        except Stalled:
            error = TierError(
                self._store.location, operation, f"no answer within {allowed:.3g} s", key=key
            )
            self._failed(error, time.monotonic() - began, stalled=True)
            raise error from None
        except TierError as error:
            if is_of_this_side(error, self._store):
                raise
            self._failed(error, time.monotonic() - began, stalled=False)
            raise
        except NeuronStoreError:
            # It answered: a miss, or a damaged artifact.
            self._answered()
            raise
        else:
            self._answered()
            return value
        finally:
            self.count(seconds=time.monotonic() - began)

    def count(
        self,
        *,
        hit: int = 0,
        miss: int = 0,
        error: int = 0,
        size: int = 0,
        seconds: float = 0.0,
        refused: int = 0,
    ) -> None:
        """Add to the counters."""
        with self._lock:
            now = self._counters
            self._counters = TierCounters(
                now.hits + hit,
                now.misses + miss,
                now.errors + error,
                now.bytes + size,
                now.seconds + seconds,
                now.refused + refused,
            )

    def failed(self, error: TierError, seconds: float) -> None:
        """A call that was made without `run`, and so without its limit, failed after `seconds`."""
        self._failed(error, seconds, stalled=False)
        self.count(seconds=seconds)

    def _answered(self) -> None:
        with self._lock:
            self._in_a_row = 0
            self._left = self._deadline
            self._rest = _FIRST_REST
            self._resting_since = None

    def _failed(self, error: TierError, spent: float, *, stalled: bool) -> None:
        self.count(error=1)
        with self._lock:
            self._in_a_row += 1
            # An endpoint that drops packets takes seconds to fail, each time.
            self._left = max(0.0, self._left - spent)
            if not stalled and self._in_a_row < _FAILURES_IN_A_ROW and self._left > 0:
                told, rests = self._in_a_row == 1, False
            else:
                told, rests = self._resting_since is None, True
                self._resting_since = time.monotonic()
        if told:
            _log.warning("%s%s", error, "; leaving this tier alone for a while" if rests else "")

    def _look_again(self) -> None:
        try:
            self._store.find("latency-probe")
        except NeuronStoreError as error:
            _log.debug("%s is still in trouble: %s", self._store.location, error)
            with self._lock:
                self._resting_since = time.monotonic()
                self._rest = min(self._rest * 2, _LONGEST_REST)
                self._prober = 0
        else:
            _log.warning("%s answers again", self._store.location)
            self._answered()
            with self._lock:
                self._prober = 0

"""The holder's side of a lease: the heartbeat, and knowing when it is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Protocol

from neuron_store.abc import Lease
from neuron_store.errors import TierError
from neuron_store.steps import step

__all__ = ["Claim", "HeldLease", "Watch", "own_clock"]

_log = logging.getLogger(__name__)

_WATCHED = 4096


class Claim(Protocol):
    """A tier's side of a lease that was taken."""

    def renew(self) -> bool:
        """Make the next version; False when the lease is another's now. Raises `TierError`."""

    def remove(self) -> None:
        """Give it back; nothing happens when it is another's. Raises `TierError`."""


def own_clock() -> float:
    """Seconds, of a clock that goes on while the machine is suspended, where there is one.

    Those who wait count with the other kind, so that a suspended machine errs to the safe side on
    either part.
    """
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Watch:
    """Since when this process has seen each key's lease unchanged, by its own monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}
        self._renewed: set[str] = set()

    def __getstate__(self) -> dict[str, object]:
        # Another machine's clock says something else.
        return {"_seen": {}, "_renewed": set()}

    def unchanged(self, key: str, version: str, asked: float) -> float:
        """Seconds for which `version` is known to have been there; 0 at first sight.

        Args:
            key: whose lease.
            version: what a look just found.
            asked: `time.monotonic()` from before that look.
        """
        seen = self._seen.get(key)
        if seen is not None and seen[0] == version:
            return asked - seen[1]
        while len(self._seen) >= _WATCHED:
            # Whoever waited for that key starts to count anew.
            self.forget(next(iter(self._seen)))
        if seen is not None:
            self._renewed.add(key)
        self._seen[key] = (version, time.monotonic())
        return 0.0

    def renewed(self, key: str) -> bool:
        """Whether more than one version of it was seen."""
        return key in self._renewed

    def forget(self, key: str) -> None:
        """The key's lease is gone, or ours."""
        self._seen.pop(key, None)
        self._renewed.discard(key)


class HeldLease(Lease):
    """A lease of this process, renewed every third of its ttl by a thread of its own.

    The thread ends with the process, and with the last reference to the lease: one that was
    dropped (by a call that was given up, say) expires like a dead holder's.
    """

    def __init__(self, claim: Claim, location: str, key: str, ttl: float, since: float) -> None:
        """Args: since, `own_clock()` from before the request that took it."""
        self._claim = claim
        self._location = location
        self._key = key
        self._ttl = ttl
        self._pid = os.getpid()
        self._guard = threading.Lock()
        # Nobody takes over what was renewed after this moment, before a ttl has passed since.
        self._confirmed = since
        self._lost = False
        self._released = False
        self._stop = threading.Event()
        threading.Thread(
            target=_beat,
            args=(weakref.ref(self), self._stop, ttl / 3),
            name="neuron_store-lease",
            daemon=True,
        ).start()

    @property
    def location(self) -> str:
        return self._location

    def held(self) -> bool:
        # First of all: in a forked child the guard may be locked for ever.
        if os.getpid() != self._pid:
            return False
        with self._guard:
            if self._lost or self._released:
                return False
            if own_clock() - self._confirmed < self._ttl / 2:
                return True
            try:
                return self._renew()
            except TierError as error:
                _log.debug("%s", error)
                return own_clock() - self._confirmed < self._ttl

    def release(self) -> None:
        if os.getpid() != self._pid:
            return
        self._stop.set()
        with self._guard:
            if self._released:
                return
            self._released = True
            try:
                # Removing is not conditional everywhere. What was just renewed is no other's.
                fresh = own_clock() - self._confirmed < self._ttl / 2
                if self._lost or not (fresh or self._renew()):
                    return
                step("lease.release")
                self._claim.remove()
                step("lease.released")
            except TierError as error:
                _log.info("%s; the lease expires in %g s", error, self._ttl)

    def beat(self) -> bool:
        """One heartbeat; False when it was the last."""
        with self._guard:
            if self._lost or self._released:
                return False
            try:
                return self._renew()
            except TierError as error:
                # The next one may come through before the ttl is over.
                _log.debug("%s", error)
                return True

    def _renew(self) -> bool:
        began = own_clock()
        step("lease.renew")
        if not self._claim.renew():
            self._lost = True
            _log.warning(
                "the lease of %s at %s was lost: last renewed %.0f s ago, and by now it is another "
                "node's, or removed",
                self._key,
                self._location,
                began - self._confirmed,
            )
            return False
        step("lease.renewed")
        self._confirmed = began
        return True


def _beat(reference: weakref.ref[HeldLease], stop: threading.Event, interval: float) -> None:
    while not stop.wait(interval):
        lease = reference()
        if lease is None or not lease.beat():
            return
        del lease

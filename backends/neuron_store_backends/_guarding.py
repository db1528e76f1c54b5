"""One collector at a time in a shared tier: a lease on a key that no artifact has.

It saves work only: two collectors at once remove the same things twice. So a tier that has no
leases is collected all the same.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Self

from neuron_store.abc import Lease
from neuron_store.collector import COLLECTOR_KEY
from neuron_store.errors import CollectorBusy, LeaseHeld, Unsupported
from neuron_store.steps import step

if TYPE_CHECKING:
    from collections.abc import Callable

    from neuron_store.abc import ArtifactStore

__all__ = ["Guard"]

_log = logging.getLogger(__name__)

TTL = 30.0
"""Seconds; a newcomer waits a third of it to see a live holder renew, and all of it for a dead
one."""

# Tiers of which this process has said already that they have no leases.
_said: set[str] = set()


class Guard(Lease):
    """What `Collector.exclusive` gives.

    Args:
        store: the tier.
        clock: called once the lease is there, just written (True), or with False where the tier
            has none: reads the tier's own clock.
    """

    def __init__(self, store: ArtifactStore, clock: Callable[[bool], None]) -> None:
        self._store = store
        self._clock = clock
        self._lease: Lease | None = None

    @property
    def location(self) -> str:
        return self._store.location

    def __enter__(self) -> Self:
        """Take the lease, from a dead holder when it did not renew it for a ttl.

        Raises:
            CollectorBusy: another collector is at work.
            TierError: the tier cannot be written.
        """
        try:
            self._lease = self._take()
        except Unsupported as error:
            if self.location not in _said:
                _said.add(self.location)
                _log.warning("collecting without keeping other collectors out: %s", error)
        step("gc.claimed")
        try:
            self._clock(self._lease is not None)
        except BaseException:
            self.release()
            raise
        return self

    def _take(self) -> Lease:
        # A slow tier may need several ttls to show twice that nobody renews.
        give_up = time.monotonic() + 10 * TTL
        while True:
            try:
                return self._store.lease(COLLECTOR_KEY, TTL)
            except LeaseHeld as error:
                # Whoever promised to renew so much less often than we do is not waited for.
                if error.renewed or error.ttl > 2 * TTL or time.monotonic() > give_up:
                    host = f" on {error.host}" if error.host else ""
                    raise CollectorBusy(self.location, f"{error.holder}{host}") from error
            time.sleep(min(1.0, TTL / 20))

    def held(self) -> bool:
        return self._lease is None or self._lease.held()

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()

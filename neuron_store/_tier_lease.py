"""Leases at the tiers of a store, each call bounded like every other to a shared tier."""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import TYPE_CHECKING

from neuron_store.abc import ArtifactStore, Lease, TierAnswer
from neuron_store.errors import ReadOnlyTier, TierError, TiersUnavailable, Unsupported
from neuron_store.readonly import ReadOnlyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from neuron_store.tier_health import TierHealth

__all__ = ["first_lease"]

_log = logging.getLogger(__name__)


def first_lease(
    tiers: Sequence[tuple[ArtifactStore, TierHealth]], key: str, ttl: float, deadline: float
) -> Lease:
    """A lease at the first tier that can give one; who asks the same tiers meets there.

    A tier in trouble is passed over: whoever still reaches it leases there, and then two compile.

    Args:
        tiers: with their health, in order.
        key: what is claimed.
        ttl: seconds.
        deadline: seconds that a tier may take to answer.

    Raises:
        LeaseHeld: somebody else holds it.
        TiersUnavailable: those that might have leases are left alone at the moment.
        TierError: no tier could say, and one was in trouble just now.
        Unsupported: no tier has leases; says why for each.
    """
    reasons: list[str] = []
    resting: list[TierAnswer] = []
    trouble: TierError | None = None
    for tier, health in tiers:
        if isinstance(tier, ReadOnlyStore):
            reasons.append(f"{tier.location} is read-only")
        elif type(tier).lease is ArtifactStore.lease:
            # Not asked: an answer that costs the tier nothing says nothing of its health.
            reasons.append(f"{type(tier).__name__} has none")
        elif reason := health.resting():
            resting.append(TierAnswer(tier.location, "skipped", reason))
        else:
            try:
                return _ask(tier, health, key, ttl, deadline)
            except (Unsupported, ReadOnlyTier) as error:
                reasons.append(str(error))
            except TierError as error:
                trouble = trouble or error
    if trouble is not None:
        raise trouble
    if resting:
        raise TiersUnavailable(key, resting)
    raise Unsupported("lease", "the store", "; ".join(reasons) or "it has no shared tier")


def _ask(tier: ArtifactStore, health: TierHealth, key: str, ttl: float, deadline: float) -> Lease:
    taking = _Taking(functools.partial(tier.lease, key, ttl))
    try:
        lease = health.run("lease", key, taking, seconds=deadline)
    except TierError:
        taking.give_up()
        raise
    return _TierLease(lease, health, key, deadline)


class _Taking:
    """A call for a lease, which gives back what it gets after its caller has gone."""

    def __init__(self, take: Callable[[], Lease]) -> None:
        self._take = take
        self._guard = threading.Lock()
        self._lease: Lease | None = None
        self._given_up = False

    def __call__(self) -> Lease:
        lease = self._take()
        with self._guard:
            self._lease = lease
            given_up = self._given_up
        if given_up:
            lease.release()
        return lease

    def give_up(self) -> None:
        with self._guard:
            self._given_up = True
            lease = self._lease
        if lease is not None:
            # It came in the last moment, from a tier that is slow to answer.
            threading.Thread(target=lease.release, name="neuron_store-tier", daemon=True).start()


class _TierLease(Lease):
    """A tier's lease, which cannot keep its holder waiting."""

    def __init__(self, inner: Lease, health: TierHealth, key: str, deadline: float) -> None:
        self._inner = inner
        self._health = health
        self._key = key
        self._deadline = deadline
        self._pid = os.getpid()

    @property
    def location(self) -> str:
        return self._inner.location

    def held(self) -> bool:
        if os.getpid() != self._pid:
            return False
        try:
            return self._health.run("lease", self._key, self._inner.held, seconds=self._deadline)
        except TierError:
            return False

    def release(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self._health.run("release", self._key, self._inner.release, seconds=self._deadline)
        except TierError as error:
            # It expires.
            _log.debug("%s", error)

"""Leases in an object store: `<prefix>/lease/<key>.json`, one small object for each.

A lease is taken by a conditional create, renewed and taken over by a conditional replace, so of all
who try exactly one gets through. Each renewal makes a new version. Who waits takes over a version
that its own monotonic clock saw unchanged for a whole ttl; nobody compares wall clocks.

A removal is unconditional on most stores. So a holder removes only what it renewed less than half a
ttl ago, which nobody can have taken over yet. What remains: a holder that is stopped between that
thought and the removal, for more than half a ttl, removes its successor's lease. Then two compile.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import attrs

from neuron_store.abc import Lease, check_ttl
from neuron_store.artifact import check_key
from neuron_store.errors import LeaseHeld, TierError, TierUnfit, Unsupported
from neuron_store.steps import step
from neuron_store_backends._heartbeat import HeldLease, Watch, own_clock
from neuron_store_backends._honesty import replace_fault, require_create
from neuron_store_backends._lease_record import (
    MAX_LEASE_BYTES,
    LeaseRecord,
    dump_lease,
    lease_held,
    load_lease,
)
from neuron_store_backends._trouble import Changed, Exists

if TYPE_CHECKING:
    from neuron_store_backends._objects import Blob, Objects

__all__ = ["LEASE_FOLDER", "ObjectLeases", "lease_path"]

LEASE_FOLDER = "lease"
"""Below the tier's prefix; holds leases and nothing else. Those not written for
`_lease_record.ABANDONED` seconds may be removed by `gc`."""

# A server may be mended; measuring it costs eight requests.
_REFUSED_SECONDS = 300.0


def lease_path(root: str, key: str) -> str:
    """Where the lease of `key` is, below bucket and prefix."""
    return f"{root}/{LEASE_FOLDER}/{key}.json"


class ObjectLeases:
    """The leases of one tier, as this process sees them."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._watch = Watch()
        self._refused: tuple[float, str] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_refused": None}

    def take(self, key: str, ttl: float) -> Lease:
        """See `ArtifactStore.lease`. One request while another holds it."""
        path = lease_path(self._objects.root, check_key(key))
        check_ttl(ttl)
        asked = time.monotonic()
        blob = self._objects.peek(path, MAX_LEASE_BYTES, key=key)
        record = LeaseRecord.new(ttl)
        if blob is None:
            self._watch.forget(key)
            return self._create(path, key, record)
        theirs = load_lease(blob.data)
        unchanged = self._watch.unchanged(key, blob.version, asked)
        # A holder promised to renew within its own ttl, which may be longer than ours.
        patience = ttl if theirs is None else max(ttl, theirs.ttl)
        if unchanged < patience and not (theirs is not None and theirs.released):
            raise self._held(key, blob)
        return self._take_over(path, key, record, blob.version)

    def _create(self, path: str, key: str, record: LeaseRecord) -> Lease:
        self._require_honest()
        step("lease.create")
        since = own_clock()
        try:
            self._objects.create(path, dump_lease(record), key=key)
        except Exists as error:
            self._require_mine(path, key, record, error)
        step("lease.created")
        return self._hold(path, key, record, since)

    def _take_over(self, path: str, key: str, record: LeaseRecord, version: str) -> Lease:
        self._require_honest()
        step("lease.take")
        since = own_clock()
        try:
            self._objects.replace(path, dump_lease(record), version, key=key)
        except Changed as error:
            self._require_mine(path, key, record, error)
        self._watch.forget(key)
        step("lease.taken")
        return self._hold(path, key, record, since)

    def _hold(self, path: str, key: str, record: LeaseRecord, since: float) -> Lease:
        claim = _ObjectClaim(self._objects, path, key, record.token)
        return HeldLease(claim, self._objects.location, key, record.ttl, since)

    def _require_mine(self, path: str, key: str, record: LeaseRecord, cause: Exception) -> None:
        """After a refusal: it is our own when an earlier try got through and its reply was lost."""
        blob = self._objects.peek(path, MAX_LEASE_BYTES, key=key)
        if not _is_of(blob, record.token):
            raise self._held(key, blob) from cause

    def _held(self, key: str, blob: Blob | None) -> LeaseHeld:
        theirs = load_lease(blob.data) if blob is not None else None
        renewed = self._watch.renewed(key)
        return lease_held(key, self._objects.location, theirs, renewed=renewed)

    def _require_honest(self) -> None:
        """Refuse a store whose conditions mean nothing: every node would hold every lease."""
        now = time.monotonic()
        if self._refused is None or now - self._refused[0] > _REFUSED_SECONDS:
            self._refused = None
            try:
                require_create(self._objects)
                reason = replace_fault(self._objects)
            except TierUnfit as error:
                reason = error.reason
            if reason is None:
                return
            self._refused = (now, reason)
        raise Unsupported(
            "lease",
            self._objects.location,
            f"{self._refused[1]}; use a server that honours If-Match, or a posix tier, for leases",
        )


@attrs.frozen
class _ObjectClaim:
    objects: Objects
    path: str
    key: str
    token: str

    def renew(self) -> bool:
        blob = self._peek()
        mine = _mine(blob, self.token)
        if blob is None or mine is None:
            return False
        try:
            self.objects.replace(self.path, dump_lease(mine.renewed()), blob.version, key=self.key)
        except Changed:
            # It may have been our own, the first reply being lost.
            return _is_of(self._peek(), self.token)
        return True

    def remove(self) -> None:
        try:
            self.objects.remove(self.path, key=self.key)
        except TierError as error:
            if error.errno != errno.EACCES:
                raise
            # Credentials that may write and not delete are a good choice.
            self._mark_released()

    def _mark_released(self) -> None:
        blob = self._peek()
        mine = _mine(blob, self.token)
        if blob is None or mine is None:
            return
        data = dump_lease(attrs.evolve(mine.renewed(), released=True))
        try:
            self.objects.replace(self.path, data, blob.version, key=self.key)
        except Changed:
            pass

    def _peek(self) -> Blob | None:
        return self.objects.peek(self.path, MAX_LEASE_BYTES, key=self.key)


def _mine(blob: Blob | None, token: str) -> LeaseRecord | None:
    record = load_lease(blob.data) if blob is not None else None
    return record if record is not None and record.token == token else None


def _is_of(blob: Blob | None, token: str) -> bool:
    return _mine(blob, token) is not None

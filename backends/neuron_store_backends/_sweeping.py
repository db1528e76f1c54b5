"""Removing payload that no record names, beside publishers that may be about to name it.

Sweeper: (1) list the key's payload, (2) create the mark `payload/<key>/sweeping`, (3) read the
record, (4) list again, (5) remove what is old and not named, (6) remove the mark. Publisher: (a)
list, (b) upload what is not young, (c) create the record, (d) if any payload was there before it,
or it took long: list, wait until there is no mark, and bring back what is missing.

* (c) before (3): the sweeper sees the record, and leaves what it names.
* (3) before (c): the mark is there before the record. So at (d) it is still there, and the
  publisher waits for (6) and then sees all that was removed; or it is gone, and so is the sweeper.
* What (b) uploads again over an old object is young at (4). If (4) was before, then (3) was before
  (c), which is the case above; and (d) happens, since the object was there at (a).
* Nothing was there at (a): then what the sweeper sees of this publisher is younger than the grace
  time, unless the upload took long, and then (d) happens too.
* The sweeper is killed: its mark stays. A publisher that sees it unchanged for `DEAD_SECONDS` by
  its own monotonic clock removes it and goes on. A sweeper that was only stopped looks at its own
  clock before each removal, and gives up after `SWEEP_SECONDS`, a fraction of that.

Ages are differences of the store's own times: the mark's is now. What remains is a removal that is
on its way to the store for longer than `DEAD_SECONDS - SWEEP_SECONDS`. That payload is missing
then: `ArtifactCorrupt`, never a wrong artifact, and the next publish repairs it.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING

from neuron_store.artifact import MAX_RECORD_BYTES
from neuron_store.errors import InvalidRecord, TierError
from neuron_store.steps import step
from neuron_store_backends._trouble import Exists

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from neuron_store_backends._objects import Stored
    from neuron_store_backends.conditional import ConditionalStore

__all__ = ["named_payload", "old_payload", "sweep_payload", "wait_for_sweep"]

_log = logging.getLogger(__name__)

SWEEP_SECONDS = 10.0
DEAD_SECONDS = 120.0
_PAUSE = 0.5


def named_payload(store: ConditionalStore, key: str) -> Collection[str] | None:
    """Paths that the key's record names: none without a record; None where that is unknown.

    Raises:
        TierError: the record cannot be read.
    """
    blob = store.objects.read(store.index_path(key), MAX_RECORD_BYTES, key=key)
    if blob is None:
        return ()
    try:
        artifact, inline = store.parse(key, blob)
    except (InvalidRecord, TierError):
        # Damaged, or a newer release's: what it named may still be wanted.
        return None
    named = {parcel.path for parcel in store.parcels(artifact, inline)}
    return {*named, store.damage_path(key)}


def old_payload(
    store: ConditionalStore, key: str, found: Mapping[str, Stored], now: float, grace: float
) -> Mapping[str, Stored]:
    """What is old enough to be swept if no record names it."""
    return {
        path: stored
        for path, stored in found.items()
        if path != store.sweep_path(key)
        and stored.modified is not None
        and now - stored.modified >= max(grace, store.grace)
    }


def sweep_payload(
    store: ConditionalStore, key: str, grace: float | None = None, now: float | None = None
) -> int | None:
    """Remove the key's payload that no record names and that is older than the grace time.

    Args:
        store: the tier.
        key: checked.
        grace: seconds; no less than the tier's own, which publishers count on.
        now: the store's clock, where it is known. Only spares a mark where all is young.

    Returns:
        Bytes freed; None when there was nothing to remove, or another is removing it.

    Raises:
        TierError: the store is in trouble; some may be removed.
    """
    wanted, gone = store.grace if grace is None else grace, list[int]()
    now = time.time() if now is None else now
    found = store.objects.listing(store.payload_root(key), key=key)
    while old_payload(store, key, found, now, wanted):
        mark = _Mark(store, key)
        if not mark.make(found, now):
            break
        try:
            removed, found = _sweep_once(store, key, wanted)
        finally:
            mark.remove()
        gone += [stored.size for stored in removed.values()]
        if not removed:
            break
    return sum(gone) if gone else None


class _Mark:
    """`payload/<key>/sweeping`, while a sweeper is at work."""

    def __init__(self, store: ConditionalStore, key: str) -> None:
        self._store, self._key = store, key
        self._path = store.sweep_path(key)
        self._id = uuid.uuid4().hex.encode()
        self._made = 0.0

    def make(self, found: Mapping[str, Stored], now: float) -> bool:
        """False when another sweeper is at work, or died a short while ago."""
        step("sweep.mark")
        self._made = time.monotonic()
        if self._create():
            return True
        there = found.get(self._path)
        if there is None or there.modified is None:
            return False
        if now - there.modified < max(self._store.grace, 10 * DEAD_SECONDS):
            return False
        self._store.objects.remove(self._path, key=self._key)
        return self._create()

    def _create(self) -> bool:
        try:
            self._store.objects.create(self._path, self._id, key=self._key)
        except Exists:
            return self._is_ours()
        return True

    def _is_ours(self) -> bool:
        blob = self._store.objects.read(self._path, 64, key=self._key)
        return blob is not None and blob.data == self._id

    def remove(self) -> None:
        """Unless we were stopped so long that it may be another sweeper's by now."""
        step("sweep.unmark")
        if time.monotonic() - self._made < DEAD_SECONDS / 2 or self._is_ours():
            self._store.objects.remove(self._path, key=self._key)


def _sweep_once(
    store: ConditionalStore, key: str, grace: float
) -> tuple[Mapping[str, Stored], Mapping[str, Stored]]:
    """What was removed under the mark, and what is left."""
    began = time.monotonic()
    step("sweep.look")
    named = named_payload(store, key)
    step("sweep.list")
    found = dict(store.objects.listing(store.payload_root(key), key=key))
    mark = found.get(store.sweep_path(key))
    if named is None or mark is None or mark.modified is None:
        return {}, {}
    removed = {}
    for path, stored in old_payload(store, key, found, mark.modified, grace).items():
        if path in named:
            continue
        step("sweep.remove")
        if time.monotonic() - began > SWEEP_SECONDS:
            # The look is too long ago to act upon. The next round looks again.
            break
        store.objects.remove(path, key=key)
        removed[path] = stored
        del found[path]
    return removed, found


def wait_for_sweep(store: ConditionalStore, key: str) -> Mapping[str, Stored]:
    """The key's payload as it is when nobody is sweeping it.

    Raises:
        TierError: the store is in trouble.
    """
    path, since = store.sweep_path(key), time.monotonic()
    seen: float | None = None
    while True:
        found = store.objects.listing(store.payload_root(key), key=key)
        mark = found.get(path)
        if mark is None:
            return found
        if mark.modified != seen:
            # A new mark is another sweep.
            seen, since = mark.modified, time.monotonic()
        elif time.monotonic() - since > DEAD_SECONDS:
            _log.warning("%s: the sweeper of %s died; its mark is removed", store.location, key)
            store.objects.remove(path, key=key)
            return store.objects.listing(store.payload_root(key), key=key)
        step("conditional.wait")
        time.sleep(_PAUSE)

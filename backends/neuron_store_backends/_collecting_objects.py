"""Garbage of the object tiers: payload without a record, marks, probes, leases, uploads."""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from neuron_store.artifact import is_key
from neuron_store.collector import COLLECTOR_KEY, Collector, Garbage, Holding
from neuron_store.errors import TierError
from neuron_store.steps import step
from neuron_store_backends._guarding import Guard
from neuron_store_backends._leasing import LEASE_FOLDER, lease_path
from neuron_store_backends._streaming import IN_FLIGHT
from neuron_store_backends._sweeping import named_payload, old_payload, sweep_payload

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from contextlib import AbstractContextManager

    from neuron_store.abc import Lease
    from neuron_store_backends._objects import Stored, Unfinished
    from neuron_store_backends.conditional import ConditionalStore

__all__ = ["ObjectCollector"]

_log = logging.getLogger(__name__)

_FOLDERS = {
    "probe": "left by a measurement that was cut off",
    LEASE_FOLDER: "a lease whose holder is gone",
}
# Two times of one store, one of them rounded to a second.
_REPUBLISHED = 2.0


class ObjectCollector(Collector):
    """Of an object store below one prefix."""

    def __init__(self, store: ConditionalStore) -> None:
        self.store = store
        self.objects = store.objects
        self._grace = store.grace
        self._ahead = 0.0
        self._uploads: dict[str, Unfinished] = {}
        self._orphaned: dict[str, Collection[str]] = {}
        """Of a key: payload that was found to be garbage and was not asked to be swept."""

    def exclusive(self) -> AbstractContextManager[Lease]:
        return Guard(self.store, self._read_clock)

    def _read_clock(self, leased: bool) -> None:
        """From an object that was written just now: the lease, or one that goes again at once."""
        path = lease_path(self.objects.root, COLLECTOR_KEY)
        if not leased:
            path = f"{self.objects.root}/probe/clock-{uuid.uuid4().hex}"
            self.objects.create(path, b"")
        try:
            written = self._listing(LEASE_FOLDER if leased else "probe").get(path)
        finally:
            if not leased:
                self.objects.remove(path)
        if written is not None and written.modified is not None:
            self._ahead = written.modified - time.time()

    def now(self) -> float:
        """Unix seconds by the store's clock, as far as that is known.

        Known from what `exclusive` has just written; a dry run writes nothing, and so goes by this
        machine's clock.
        """
        return time.time() + self._ahead

    def _listing(self, folder: str) -> Mapping[str, Stored]:
        return self.objects.listing(f"{self.objects.root}/{folder}")

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.objects.root}/")

    def _age(self, stored: Stored) -> float:
        return 0.0 if stored.modified is None else max(0.0, self.now() - stored.modified)

    def _payload(self) -> Mapping[str, Mapping[str, Stored]]:
        """By key."""
        found: defaultdict[str, dict[str, Stored]] = defaultdict(dict)
        for path, stored in self._listing("payload").items():
            key = self._name(path).split("/", 2)[1]
            if is_key(key):
                found[key][path] = stored
        return found

    def _records(self) -> Mapping[str, Stored]:
        found = {}
        for path, stored in self._listing("index").items():
            name = self._name(path).removeprefix("index/")
            if name.endswith(".json") and is_key(name.removesuffix(".json")):
                found[name.removesuffix(".json")] = stored
        return found

    # -- artifacts ------------------------------------------------------------------------------

    def holdings(self) -> Iterator[Holding]:
        payload = self._payload()
        for key, stored in self._records().items():
            # In a dry run it is still there, and was told of already.
            orphaned = self._orphaned.get(key, ())
            each = {p: s for p, s in payload.get(key, {}).items() if p not in orphaned}
            size = stored.size + sum(s.size for s in each.values())
            old = old_payload(self.store, key, each, self.now(), self.store.grace)
            frees = stored.size + sum(s.size for s in old.values())
            age = None if stored.modified is None else self._age(stored)
            yield Holding(key, size, age, frees)

    def evict(self, holding: Holding, unused: float) -> int | None:
        del unused  # uses are known to a node's own tier only
        step("gc.evict")
        since = None if holding.age is None else self.now() - holding.age + _REPUBLISHED
        return self.store.take_away(holding.key, since=since)

    # -- garbage --------------------------------------------------------------------------------

    def garbage(self, grace: float) -> Iterator[Garbage]:
        self._grace = grace
        yield from self._orphans(grace)
        # Younger ones may belong to somebody at work, whatever grace was asked for.
        grace = max(grace, self.store.grace)
        for folder, reason in _FOLDERS.items():
            for path, stored in self._listing(folder).items():
                if path == lease_path(self.objects.root, COLLECTOR_KEY):
                    # Ours, or for `exclusive` to judge.
                    continue
                if stored.modified is not None and self._age(stored) >= grace:
                    yield Garbage(folder, self._name(path), stored.size, self._age(stored), reason)
        yield from self._dangling(grace)

    def _orphans(self, grace: float) -> Iterator[Garbage]:
        # Payload first: a record that is committed between the two listings is seen.
        payload = self._payload()
        old = {
            key: found
            for key, each in payload.items()
            if (found := old_payload(self.store, key, each, self.now(), grace))
        }
        records = self._records()

        def named(key: str) -> Collection[str] | None:
            return named_payload(self.store, key) if key in records else ()

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for (key, found), names in zip(old.items(), pool.map(named, old), strict=True):
                left = {} if names is None else {p: s for p, s in found.items() if p not in names}
                orphans = left.values()
                if orphans:
                    self._orphaned[key] = left.keys()
                    # A mark that somebody died over; it goes with the rest or by itself.
                    what = f"{len(orphans)} objects" if len(orphans) > 1 else "an object"
                    reason = f"{what} that no record names"
                    yield Garbage(
                        "payload",
                        f"payload/{key}",
                        sum(s.size for s in orphans),
                        min(map(self._age, orphans)),
                        reason,
                        key,
                    )
        for key, each in payload.items():
            mark = each.get(self.store.sweep_path(key))
            if mark is not None and key not in old and self._age(mark) >= grace:
                reason = "left by a collector that was killed"
                path = self._name(self.store.sweep_path(key))
                yield Garbage("mark", path, mark.size, self._age(mark), reason, key)

    def _dangling(self, grace: float) -> Iterator[Garbage]:
        try:
            uploads = self.objects.unfinished(self.objects.root)
        except TierError as error:
            # Credentials may allow all but this; the rest is still worth collecting.
            _log.warning("unfinished uploads were not looked for: %s", error)
            return
        for upload in uploads:
            age = max(0.0, self.now() - upload.started)
            if age >= grace:
                name = f"{self._name(upload.path)} ({upload.id[:16]})"
                self._uploads[name] = upload
                reason = "an upload that nobody ended; its parts are paid for and seen by nobody"
                yield Garbage("upload", name, upload.size, age, reason)

    def sweep(self, garbage: Garbage) -> int | None:
        step("gc.sweep")
        if garbage.kind == "payload" and is_key(garbage.key):
            self._orphaned.pop(garbage.key or "", None)
            return sweep_payload(self.store, garbage.key or "", self._grace, self.now())
        if garbage.kind == "upload" and garbage.name in self._uploads:
            self.objects.abandon(self._uploads[garbage.name])
            return garbage.size
        folder, _, name = garbage.name.partition("/")
        if garbage.kind == "mark" and folder == "payload" and name.endswith("/sweeping"):
            folder = garbage.name.rpartition("/")[0]
        elif folder not in _FOLDERS or not name:
            raise ValueError(f"{garbage.name!r} is none of this collector's findings")
        path = f"{self.objects.root}/{garbage.name}"
        stored = self._listing(folder).get(path)
        if stored is None or self._age(stored) < garbage.age - _REPUBLISHED:
            return None
        self.objects.remove(path)
        return stored.size

"""Garbage of the node's own tier, where compiles are at work and artifacts are in use."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from neuron_store.abc import Lease
from neuron_store.artifact import is_key
from neuron_store.collector import COLLECTOR_KEY, Garbage, Holding
from neuron_store.errors import CollectorBusy, TierError
from neuron_store.steps import step
from neuron_store_backends._collecting_renaming import RenamingCollector
from neuron_store_backends._uses import SETTLE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from neuron_store.abc import KeyLock
    from neuron_store_backends._uses import Uses
    from neuron_store_backends.local import LocalStore

__all__ = ["LocalCollector"]

_log = logging.getLogger(__name__)

# What a node remembers of the use of artifacts that it has not, for the order in which shared
# tiers are collected from here.
_MARKS_STAY = 90 * 86400.0


class LocalCollector(RenamingCollector):
    """Of a local tier: the kernel keeps a second collector out, and recent uses count."""

    store: LocalStore
    _settled: float | None = None

    def exclusive(self) -> AbstractContextManager[Lease]:
        return _LocalGuard(self.store.lock(COLLECTOR_KEY, 0), self.store.location, self.store.uses)

    def uses(self) -> Mapping[str, float]:
        try:
            return self.store.uses.ages()
        except OSError as error:
            raise self._trouble(error) from error

    def evict(self, holding: Holding, unused: float) -> int | None:
        uses = self.store.uses
        self._settle()

        def used() -> bool:
            age = uses.age(holding.key)
            return age is not None and age < unused

        step("gc.evict")
        return self.store.take_away(
            holding.key,
            still=lambda entry: self._unchanged(entry, holding) and not used(),
            regret=used,
        )

    def _settle(self) -> None:
        """Raise the flag again, so that it stays fresh, and let every earlier note be marked."""
        if self._settled is None:
            self._settled = time.monotonic() + SETTLE_SECONDS
        try:
            self.store.uses.raise_flag()
        except OSError as error:
            raise self._trouble(error) from error
        time.sleep(max(0.0, self._settled - time.monotonic()))

    def garbage(self, grace: float) -> Iterator[Garbage]:
        for found in super().garbage(grace):
            if found.kind == "staging" and found.key is not None:
                with _unlocked(self.root, found.key) as free:
                    if not free:
                        continue
            yield found
        for name, age in self.uses().items():
            if age >= max(grace, _MARKS_STAY) and not os.path.lexists(f"{self.root}/{name}"):
                reason = "last use of an artifact that this node has not any more"
                yield Garbage("use", f".stats/uses/{name}", 0, age, reason, name)

    def sweep(self, garbage: Garbage) -> int | None:
        if garbage.kind == "use" and is_key(garbage.key):
            age = self.store.uses.age(garbage.key or "")
            if age is None or age < garbage.age:
                return None
            try:
                self.store.uses.forget(garbage.key or "")
            except OSError as error:
                raise self._trouble(error) from error
            return 0
        if garbage.kind != "staging" or garbage.key is None:
            return super().sweep(garbage)
        # A compile may write nothing for long; but it holds its key's lock all the time.
        with _unlocked(self.root, garbage.key) as free:
            return super().sweep(garbage) if free else None


class _LocalGuard(Lease):
    """The lock of a key that no artifact has; the kernel frees it when its holder dies."""

    def __init__(self, lock: KeyLock, location: str, uses: Uses) -> None:
        self._lock = lock
        self._location = location
        self._uses = uses

    @property
    def location(self) -> str:
        return self._location

    def __enter__(self) -> Self:
        try:
            free = self._lock.try_acquire()
        except TierError as error:
            # No locks on this file system; two collectors do no harm.
            _log.debug("collecting %s without a lock: %s", self._location, error)
            free = True
        if not free:
            holder = self._lock.holder()
            raise CollectorBusy(self._location, str(holder or "an unknown process"))
        step("gc.claimed")
        return self

    def held(self) -> bool:
        return True

    def release(self) -> None:
        self._uses.lower_flag()
        self._lock.release()


@contextmanager
def _unlocked(root: str, key: str) -> Iterator[bool]:
    """Whether nobody holds the key's lock; and nobody will while the block runs.

    Not by `lock`: that would make a lock file, and a dry run writes nothing.
    """
    try:
        path = f"{root}/.{key}.compilation_metadata.lock"
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)

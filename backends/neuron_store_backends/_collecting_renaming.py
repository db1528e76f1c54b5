"""Garbage of the rename tiers: what killed processes left beside the entries."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neuron_store.artifact import RECORD_NAME, is_key
from neuron_store.collector import COLLECTOR_KEY, Collector, Garbage, Holding
from neuron_store.errors import NeuronStoreError, TierError
from neuron_store.neuron_layout import MARK_NAME
from neuron_store.own_directory import open_own
from neuron_store.steps import step
from neuron_store_backends._aside import remove_tree, tree_facts
from neuron_store_backends._entry import Entry
from neuron_store_backends._guarding import Guard
from neuron_store_backends._lease_renaming import LEASES
from neuron_store_backends._modes import make_container

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from neuron_store.abc import Lease
    from neuron_store_backends.renaming import RenamingStore

__all__ = ["RenamingCollector"]

_log = logging.getLogger(__name__)

_PLACES = {
    ".staging": ("staging", "left behind by a process that was killed or cut off"),
    ".quarantine": ("quarantine", "a damaged entry that was taken away from its name"),
    ".failed": ("failure", "word of a failed compile; those it was for are gone"),
    LEASES: ("lease", "a lease whose holder is gone"),
}
# How the Neuron stack's own promote and fetch call their staging, beside the entries.
_NEURON_STAGING = re.compile(r"[0-9a-f]{32}\.tmp\.(?:[A-Za-z0-9._-]+\.)?\d+\Z")
_REPUBLISHED = 2.0
_LEASE_GRACE = 3600.0


class RenamingCollector(Collector):
    """Of a directory on one file system."""

    def __init__(self, store: RenamingStore) -> None:
        self.store = store
        self.root = str(store.root)
        self._ahead = 0.0

    def exclusive(self) -> AbstractContextManager[Lease]:
        return Guard(self.store, self._read_clock)

    def _read_clock(self, leased: bool) -> None:
        """The lease was written just now: its time is the file system's."""
        try:
            if leased:
                changed = os.stat(f"{self.root}/{LEASES}/{COLLECTOR_KEY}").st_mtime
                self._ahead = changed - time.time()
        except FileNotFoundError:
            # Somebody took it away, and `held` will tell; or NFS hides it for a while.
            _log.debug("%s: the file system's clock is taken for this machine's", self.root)
        except OSError as error:
            raise self._trouble(error) from error

    def now(self) -> float:
        """Unix seconds by the file system's clock, as far as that is known: a dry run writes
        nothing, and so goes by this machine's.
        """
        return time.time() + self._ahead

    # -- artifacts ------------------------------------------------------------------------------

    def holdings(self) -> Iterator[Holding]:
        for name in self._names(""):
            if not is_key(name):
                continue
            path = f"{self.root}/{name}"
            try:
                if self.store.holds_artifact(name):
                    with Entry(self.root, name) as entry:
                        age = max(0.0, self.now() - _last_published(entry))
                    yield Holding(name, tree_facts(path).size, age)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, NeuronStoreError) as error:
                # A newer release's record, or another user's directory: it takes space, and is
                # not ours to judge.
                _log.warning("%s is counted and left alone: %s", path, error)
                yield Holding(name, _size(path), None)

    def evict(self, holding: Holding, unused: float) -> int | None:
        del unused  # uses are known to a node's own tier only
        return self.store.take_away(
            holding.key, still=lambda entry: self._unchanged(entry, holding)
        )

    def _unchanged(self, entry: Entry, holding: Holding) -> bool:
        """Whether it is the entry that was listed, and not one that was published since."""
        age = self.now() - _last_published(entry)
        return holding.age is None or age >= holding.age - _REPUBLISHED

    # -- garbage --------------------------------------------------------------------------------

    def garbage(self, grace: float) -> Iterator[Garbage]:
        for folder, (kind, reason) in _PLACES.items():
            # A live lease changes all the time; a short grace must not take one from its holder.
            least = max(grace, _LEASE_GRACE) if kind == "lease" else grace
            for name in self._names(folder):
                key = name.rsplit(".", 1)[0]
                found = self._judge(f"{folder}/{name}", kind, reason, key if is_key(key) else None)
                if found is not None and found.age >= least:
                    yield found
        for name in self._names(""):
            if _NEURON_STAGING.match(name):
                reason = "staging of the Neuron stack, whose process was killed"
                found = self._judge(name, "staging", reason, name.partition(".")[0])
                if found is not None and found.age >= grace:
                    yield found

    def _judge(self, name: str, kind: str, reason: str, key: str | None) -> Garbage | None:
        try:
            facts = tree_facts(f"{self.root}/{name}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._trouble(error) from error
        return Garbage(kind, name, facts.size, max(0.0, self.now() - facts.changed), reason, key)

    def sweep(self, garbage: Garbage) -> int | None:
        self._require_ours(garbage)
        again = self._judge(garbage.name, garbage.kind, garbage.reason, garbage.key)
        if again is None or again.age < garbage.age:
            return None
        folder, _, name = garbage.name.rpartition("/")
        target = f"{self.root}/.staging/gone.{uuid.uuid4().hex}"
        step("gc.hide")
        try:
            # By descriptor: a link that takes the folder's place now leads nowhere.
            with self._opened(folder) as place:
                if not stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=place)
                    return again.size
                # One rename first: a publisher that was only stopped, and wants to rename it into
                # place, finds it whole or not at all.
                make_container(self.root, ".staging")
                os.rename(name, target, src_dir_fd=place)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._trouble(error) from error
        step("gc.free")
        remove_tree(target)
        if os.path.lexists(target):
            raise TierError(
                self.store.location,
                "gc",
                f"some of {target} cannot be removed; see the warnings, and give this user the "
                "right to remove it",
            )
        return again.size

    def _require_ours(self, garbage: Garbage) -> None:
        folder, _, name = garbage.name.rpartition("/")
        known = folder in _PLACES or _NEURON_STAGING.match(garbage.name)
        if not known or name in {"", ".", ".."}:
            raise ValueError(f"{garbage.name!r} is none of this collector's findings")

    def _names(self, folder: str) -> list[str]:
        try:
            with self._opened(folder) as place:
                return sorted(os.listdir(place))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._trouble(error) from error

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """A descriptor of the root (that may be a link), or of one of its own directories."""
        if folder:
            place = open_own(f"{self.root}/{folder}")
        else:
            place = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield place
        finally:
            os.close(place)

    def _trouble(self, error: OSError) -> TierError:
        place = f" ({error.filename})" if error.filename else ""
        return TierError(self.store.location, "gc", f"{error.strerror}{place}", code=error.errno)


def _last_published(entry: Entry) -> float:
    """When the entry came, or when the Neuron stack last used it: Unix seconds."""
    # Not the directory's own time: a claim that was given up, or a rank's lock file, changes it.
    came = _changed(entry, RECORD_NAME)
    if came is None:
        came = _changed(entry, MARK_NAME)
    used = _changed(entry, ".cache_accessed")
    moments = [moment for moment in (came, used) if moment is not None]
    return max(moments) if moments else os.fstat(entry.fd).st_mtime


def _changed(entry: Entry, name: str) -> float | None:
    try:
        return os.stat(name, dir_fd=entry.fd, follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return None


def _size(path: str) -> int:
    try:
        return tree_facts(path).size
    except OSError:
        return 0

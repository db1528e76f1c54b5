"""When this node last used which artifact: `<root>/.stats/uses/<key>`, an empty file's mtime.

A hit writes nothing and takes no lock that another process could hold. It leaves a note in
memory, at most one a minute for each key, and a thread marks the noted keys within a second; what
is left is marked at exit. A file for each key and not a log for each process: a mark cannot be
torn, and there is nothing to grow or to be rotated. The file system's own access times are no
substitute: `noatime` and `relatime` mounts do not keep them, and every scan disturbs them.

While a collector is about to remove artifacts it raises the flag `<root>/.stats/collecting`. A hit
that sees it marks its key at once, waits a moment and looks again. The collector raises the flag,
waits until every earlier note must be marked, and reads the mark of an artifact again right before
and after it hides it. So either the hit sees that the artifact is gone, or the collector
sees that it is in use.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from neuron_store.artifact import is_key
from neuron_store.collector import NOTED_EACH
from neuron_store.own_directory import has_own, make_own

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SETTLE_SECONDS", "Uses"]

_log = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.0
SETTLE_SECONDS = 3.0
"""From raising the flag to the first removal: notes are marked after a second, on a busy machine
somewhat later."""
# The collector goes from its last look at a mark to the rename within microseconds.
_MOMENT = 0.02
# The flag of a collector that was killed; a live one raises it anew all the time.
_STALE_FLAG = 600.0


class Uses:
    """The notes of one process about one local tier. Thread-safe, and good after fork."""

    def __init__(self, root: str) -> None:
        self._stats = f"{root}/.stats"
        self._folder = f"{root}/.stats/uses"
        self._flag = f"{root}/.stats/collecting"
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._noted: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._flushing = False
        self._at_exit = False

    def __getstate__(self) -> dict[str, str]:
        # Under spawn a store travels to the child, which makes notes of its own.
        return {"_stats": self._stats, "_folder": self._folder, "_flag": self._flag}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        self._reset()

    def note(self, key: str) -> bool:
        """Note a use; True when the caller must look again whether the artifact is still there."""
        now = time.monotonic()
        last = self._noted.get(key)
        if last is not None and now - last < NOTED_EACH and self._pid == os.getpid():
            return False
        if self._pid != os.getpid():
            # The parent's notes are the parent's; its lock may be held for ever in this child.
            self._reset()
        self._noted[key] = now
        if self._collecting():
            self._mark(key)
            time.sleep(_MOMENT)
            return True
        with self._guard:
            self._waiting.add(key)
            start, self._flushing = not self._flushing, True
            register, self._at_exit = not self._at_exit, True
        if register:
            atexit.register(_flush_at_exit, weakref.ref(self))
        if start:
            try:
                threading.Thread(
                    target=self._flush_later, name="neuron_store-uses", daemon=True
                ).start()
            except RuntimeError:  # the interpreter is ending, or there are too many threads
                self.flush()
        return False

    def flush(self) -> None:
        """Mark what was noted. Best effort: recency is worth no error."""
        if self._pid != os.getpid():
            return
        with self._guard:
            waiting, self._waiting, self._flushing = self._waiting, set(), False
        for key in waiting:
            self._mark(key)

    def ages(self) -> Mapping[str, float]:
        """Key to seconds since its last use."""
        self.flush()
        found: dict[str, float] = {}
        now = time.time()
        if not (has_own(self._stats) and has_own(self._folder)):
            return found
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if is_key(entry.name) and entry.is_file(follow_symlinks=False):
                        found[entry.name] = max(0.0, now - entry.stat().st_mtime)
        except FileNotFoundError:
            pass
        return found

    def age(self, key: str) -> float | None:
        """Seconds since one key's last use, None when nothing is known of one."""
        try:
            return max(0.0, time.time() - os.lstat(f"{self._folder}/{key}").st_mtime)
        except FileNotFoundError:
            return None

    def forget(self, key: str) -> None:
        """Remove a mark. Raises `OSError`."""
        try:
            if not (has_own(self._stats) and has_own(self._folder)):
                return
            os.unlink(f"{self._folder}/{key}")
        except FileNotFoundError:
            pass

    # -- the collector's side -------------------------------------------------------------------

    def raise_flag(self) -> None:
        """Have hits mark their keys at once. Raises `OSError`."""
        make_own(self._stats)
        _touch(self._flag)

    def lower_flag(self) -> None:
        """The collector is done."""
        try:
            if not has_own(self._stats):
                return
        except OSError as error:
            _log.debug("%s", error)
            return
        try:
            os.unlink(self._flag)
        except FileNotFoundError:
            pass

    # -- inside ---------------------------------------------------------------------------------

    def _collecting(self) -> bool:
        # Not by `stat` alone: an exception costs more than the call.
        if not os.access(self._flag, os.F_OK):
            return False
        try:
            return time.time() - os.lstat(self._flag).st_mtime < _STALE_FLAG
        except OSError:
            return False

    def _mark(self, key: str) -> None:
        try:
            make_own(self._stats)
            make_own(self._folder)
            _touch(f"{self._folder}/{key}")
        except OSError as error:
            # A full disk or a read-only root: the artifact's publish time stands for its use.
            _log.debug("use of %s not marked: %s", key, error)

    def _flush_later(self) -> None:
        time.sleep(_FLUSH_SECONDS)
        self.flush()


def _touch(path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def _flush_at_exit(reference: weakref.ref[Uses]) -> None:
    uses = reference()
    if uses is not None:
        uses.flush()

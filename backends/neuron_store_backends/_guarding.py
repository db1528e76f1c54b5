"""One collector at a time in a tier, without trusting anybody's wall clock.

The holder changes its guard every few seconds. Whoever finds a guard watches it: when it changes,
its holder lives, and the newcomer leaves; when it stayed the same for a whole `TTL` by the
newcomer's own monotonic clock, its holder is dead, and it is taken over. All this saves work only:
two collectors at once remove the same things twice.
"""

from __future__ import annotations

import abc
import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Self

from neuron_store.abc import Lease
from neuron_store.errors import CollectorBusy, TierError
from neuron_store.own_directory import make_own
from neuron_store.steps import step
from neuron_store.streams import write_all
from neuron_store_backends._trouble import Changed, Exists

if TYPE_CHECKING:
    from neuron_store_backends._objects import Blob, Objects

__all__ = ["FileGuard", "Guard", "ObjectGuard"]

_log = logging.getLogger(__name__)

TTL = 60.0
_BEATS_IN_TTL = 6
_MAX_GUARD = 64 << 10


class Guard(Lease):
    """The part that is the same on directories and on object stores."""

    def __init__(self, location: str) -> None:
        self._location = location
        self.ttl = TTL
        self.id = uuid.uuid4().hex
        self._number = 0
        self._lost = False
        self._proven = 0.0
        self._stop = threading.Event()
        self._beater = threading.Thread(target=self._beats, name="neuron_store-gc", daemon=True)

    @property
    def location(self) -> str:
        return self._location

    def __enter__(self) -> Self:
        """Claim it.

        Raises:
            CollectorBusy: another collector is at work.
            TierError: the tier cannot be written.
        """
        seen: bytes | None = None
        since = time.monotonic()
        while not self._claim():
            found = self._look()
            now = time.monotonic()
            if found is None:
                continue
            if seen is not None and found != seen:
                raise CollectorBusy(self.location, _holder(found))
            if seen is not None and now - since >= self.ttl:
                _log.warning(
                    "the collector at %s gave no sign of life for %g s; taking over from %s",
                    self.location,
                    self.ttl,
                    _holder(found),
                )
                if not self._take_over(found):
                    raise CollectorBusy(self.location, "another one that took over just now")
                # Somebody else may come first through the gap: then that one is watched anew.
                seen, since = None, now
                continue
            seen = found
            time.sleep(min(1.0, self.ttl / 20))
        self._proven = time.monotonic()
        self._beater.start()
        return self

    def held(self) -> bool:
        if not self._lost and time.monotonic() - self._proven > self.ttl / 2:
            # Stopped, or no beat came through: others may have taken it for dead.
            self._lost = not self._is_ours()
            self._proven = time.monotonic()
        return not self._lost

    def release(self) -> None:
        self._stop.set()
        if self._beater.is_alive():
            self._beater.join(self.ttl)
        if not self._lost:
            self._lost = True
            try:
                self._remove()
            except (TierError, OSError) as error:
                _log.warning(
                    "%s: the guard stays and is taken over later: %s", self.location, error
                )

    def _content(self) -> bytes:
        self._number += 1
        holder = f"pid {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"id": self.id, "beat": self._number, "holder": holder}).encode()

    def _beats(self) -> None:
        while not self._stop.wait(self.ttl / _BEATS_IN_TTL):
            try:
                if not self._beat():
                    self._lost = True
                    return
            except (TierError, OSError) as error:
                _log.debug("no beat at %s: %s", self.location, error)
            else:
                self._proven = time.monotonic()

    @abc.abstractmethod
    def _claim(self) -> bool:
        """Make the guard if there is none; False when there is one."""

    @abc.abstractmethod
    def _look(self) -> bytes | None:
        """What the guard is now, in bytes that differ at each beat; None when there is none."""

    @abc.abstractmethod
    def _take_over(self, seen: bytes) -> bool:
        """Take away the guard that is still `seen`; False when it is another by now."""

    @abc.abstractmethod
    def _beat(self) -> bool:
        """Change it; False when it is not ours any more."""

    @abc.abstractmethod
    def _is_ours(self) -> bool:
        """Ask the tier."""

    @abc.abstractmethod
    def _remove(self) -> None:
        """Remove it if it is ours."""


class FileGuard(Guard):
    """`<root>/.gc/collector`, created exclusively, rewritten at each beat."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.path = f"{root}/.gc/collector"
        self._fd = -1
        self.clock_offset = 0.0
        """Seconds by which the file system's clock is ahead of ours."""

    def _claim(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            make_own(os.path.dirname(self.path))
        except OSError as error:
            raise self._trouble(error) from error
        try:
            self._fd = os.open(self.path, flags, 0o666)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._trouble(error) from error
        step("gc.claimed")
        try:
            self._write()
            self.clock_offset = os.fstat(self._fd).st_mtime - time.time()
        except OSError as error:
            self._remove()
            raise self._trouble(error) from error
        return True

    def _write(self) -> None:
        os.lseek(self._fd, 0, os.SEEK_SET)
        # The beat only grows, and so does the content: no remains of a longer one.
        write_all(self._fd, self._content())

    def _look(self) -> bytes | None:
        return self._look_at(self.path)

    def _look_at(self, path: str) -> bytes | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._trouble(error) from error
        try:
            # One that was made anew with the same bytes (none yet) is another one.
            return b"%d " % os.fstat(descriptor).st_ino + os.read(descriptor, _MAX_GUARD)
        except OSError as error:
            raise self._trouble(error) from error
        finally:
            os.close(descriptor)

    def _take_over(self, seen: bytes) -> bool:
        aside = f"{self.path}.{uuid.uuid4().hex}"
        step("gc.take_over")
        try:
            # Of all who take it over at once one finds the name still there.
            os.rename(self.path, aside)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._trouble(error) from error
        mistaken = self._look_at(aside) != seen
        try:
            if mistaken:
                # Another came first and is at work already: back with it, unless there is one.
                os.link(aside, self.path)
        except OSError:
            pass
        finally:
            os.unlink(aside)
        return not mistaken

    def _beat(self) -> bool:
        if not self._is_ours():
            return False
        self._write()
        return True

    def _is_ours(self) -> bool:
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def _remove(self) -> None:
        try:
            if self._is_ours():
                os.unlink(self.path)
        finally:
            os.close(self._fd)

    def _trouble(self, error: OSError) -> TierError:
        return TierError(self.location, "gc", f"{error.strerror} ({self.path})", code=error.errno)


class ObjectGuard(Guard):
    """`<prefix>/gc/collector.json`, created if-absent, replaced if-unchanged at each beat."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects.location)
        self._objects = objects
        self.path = f"{objects.root}/gc/collector.json"
        self._version = ""
        self._last: Blob | None = None

    def _claim(self) -> bool:
        try:
            self._objects.create(self.path, self._content())
        except Exists:
            # It may be our own, the first reply being lost.
            return self._is_ours()
        step("gc.claimed")
        return self._is_ours()

    def _read(self) -> Blob | None:
        return self._objects.read(self.path, _MAX_GUARD)

    def _look(self) -> bytes | None:
        self._last = self._read()
        return None if self._last is None else self._last.version.encode() + self._last.data

    def _take_over(self, seen: bytes) -> bool:
        assert self._last is not None
        step("gc.take_over")
        try:
            self._objects.replace(self.path, self._content(), self._last.version)
        except Changed:
            if self._look() != seen:
                return self._is_ours()
            # A server that refuses the right version, too.
            self._objects.remove(self.path)
        return True

    def _beat(self) -> bool:
        try:
            self._objects.replace(self.path, self._content(), self._version)
        except Changed:
            pass
        return self._is_ours()

    def _is_ours(self) -> bool:
        blob = self._read()
        if blob is None or _facts(blob.data).get("id") != self.id:
            return False
        self._version = blob.version
        return True

    def _remove(self) -> None:
        if self._is_ours():
            self._objects.remove(self.path)


def _facts(content: bytes) -> dict[str, object]:
    try:
        facts = json.loads(content[content.find(b"{") :])
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _holder(content: bytes) -> str:
    told = _facts(content).get("holder")
    shown = told[:200] if isinstance(told, str) else "an unknown process"
    return "".join(c for c in shown if c.isprintable())

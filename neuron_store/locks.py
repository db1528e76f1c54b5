"""The lock of one key on one node, under the names that the Neuron stack uses for it.

A lock only saves work. It is `flock`: the kernel gives it up when its holder
dies, so nobody's pid is ever judged. The lock file is never unlinked by us, since a second holder
would get in through the new file. The note beside it tells people, and the Neuron stack's
own waiters, who holds the lock; it is never a ground for breaking it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import threading
import time
import uuid

from neuron_store import _flock
from neuron_store.abc import HolderNote, KeyLock
from neuron_store.artifact import check_key
from neuron_store.errors import LockTimeout, TierError
from neuron_store.own_directory import has_own, make_own
from neuron_store.streams import read_small, write_all

__all__ = ["FileKeyLock", "read_holder_note"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.1
_MAX_NOTE = 64 << 10


class _Hold:
    """A lock that this process holds, and how often its thread entered it."""

    def __init__(self, descriptor: int, note: bytes) -> None:
        self.descriptor = descriptor
        self.note = note
        self.thread = threading.get_ident()
        self.depth = 1


_guard = threading.Lock()
_holds: dict[str, _Hold] = {}


def _forget_parent() -> None:
    # The inherited descriptors are closed by `_flock`; what is left is our own bookkeeping, and a
    # guard that another thread of the parent may have held.
    global _guard  # noqa: PLW0603  (the parent's lock object is useless here)
    _guard = threading.Lock()
    _holds.clear()


os.register_at_fork(after_in_child=_forget_parent)


class FileKeyLock(KeyLock):
    """`<root>/.<key>.compilation_metadata.lock` with the note `.<key>.compilation_metadata`."""

    def __init__(self, root: str, key: str, timeout: float) -> None:
        """Args: root, the local tier's directory; key; timeout, seconds that `acquire` waits."""
        self._root = root
        self._key = check_key(key)
        self._timeout = timeout
        self._note_path = f"{root}/.{key}.compilation_metadata"
        self._failures_path = f"{root}/.failed/{key}.json"
        self.path = f"{self._note_path}.lock"

    def try_acquire(self) -> bool:
        with _guard:
            hold = _holds.get(self.path)
            if hold is not None:
                if hold.thread != threading.get_ident():
                    return False
                hold.depth += 1
                return True
        descriptor = self._take()
        if descriptor is None:
            return False
        try:
            note = _own_note()
            with _guard:
                _holds[self.path] = _Hold(descriptor, note)
        except BaseException:
            _flock.give_up(descriptor)
            raise
        self._write_note(note)
        return True

    def acquire(self) -> None:
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE
        while not self.try_acquire():
            left = deadline - time.monotonic()
            if left <= 0:
                holder = self.holder()
                raise LockTimeout(
                    self._key, self.path, self._timeout, str(holder) if holder else None
                )
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def release(self) -> None:
        with _guard:
            hold = _holds.get(self.path)
            if hold is None or hold.thread != threading.get_ident():
                return
            hold.depth -= 1
            if hold.depth:
                return
            del _holds[self.path]
        try:
            # Before the unlock: afterwards the note could be the next holder's.
            self._remove_note(hold.note)
        finally:
            try:
                _flock.give_up(hold.descriptor)
            except OSError as error:
                # The descriptor is closed all the same, and with it the lock is gone.
                _log.debug("release of %s: %s", self.path, error)

    def holder(self) -> HolderNote | None:
        return read_holder_note(self._note_path)

    def _take(self) -> int | None:
        try:
            try:
                return _flock.take(self.path)
            except FileNotFoundError:
                os.makedirs(self._root, exist_ok=True)
                return _flock.take(self.path)
        except OSError as error:
            raise TierError(self._root, "lock", str(error), key=self._key) from error

    def read_failures(self) -> bytes:
        try:
            return read_small(self._failures_path, _MAX_NOTE)
        except (OSError, ValueError):
            return b""

    def write_failures(self, data: bytes) -> None:
        try:
            if data:
                make_own(os.path.dirname(self._failures_path))
                self._replace(self._failures_path, data)
            elif has_own(os.path.dirname(self._failures_path)):
                os.unlink(self._failures_path)
        except FileNotFoundError:
            pass
        except OSError as error:
            # Then each of those who wait finds out for itself.
            _log.debug("failure note %s: %s", self._failures_path, error)

    def _write_note(self, note: bytes) -> None:
        try:
            self._replace(self._note_path, note)
        except OSError as error:
            # Only messages are the poorer for it.
            _log.debug("holder note %s: %s", self._note_path, error)

    def _replace(self, path: str, data: bytes) -> None:
        # Whole or not at all, and 0600: a command line, or a compiler's last words, may hold what
        # this user's neighbours should not see.
        temporary = f"{self._root}/.staging/note.{uuid.uuid4().hex}"
        make_own(os.path.dirname(temporary))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600)
        try:
            write_all(descriptor, data)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)

    def _remove_note(self, note: bytes) -> None:
        # Left behind it would name a dead process, and the Neuron stack's clean-up would take the
        # lock for stale.
        try:
            if read_small(self._note_path, _MAX_NOTE) == note:
                os.unlink(self._note_path)
        except OSError as error:
            _log.debug("holder note %s: %s", self._note_path, error)


def _own_note() -> bytes:
    """The lines that the Neuron stack writes and reads, then the host, which it does not know."""
    name, command = "", []
    try:
        name = read_small("/proc/self/comm", 64).decode("utf-8", "replace").strip()
        # No more of it than lets the whole note be read again.
        words = read_small("/proc/self/cmdline", _MAX_NOTE // 8).decode("utf-8", "replace")
        command = words.rstrip("\0").split("\0")
    except (OSError, ValueError):
        pass
    # psutil, by which the stack compares the name, restores what the kernel cut off at 15 bytes.
    if command and len(name) == 15:
        full = os.path.basename(command[0])
        name = full if full.startswith(name) else name
    lines = [f"pid: {os.getpid()}", f"process_name: {name}", f"cmdline: {command!r}"]
    rank = os.environ.get("RANK", "")
    if re.fullmatch(r"\d{1,9}", rank):
        lines.append(f"rank: {rank}")
    lines += [f"timestamp: {time.time()}", f"host: {socket.gethostname()}"]
    return ("\n".join(lines) + "\n").encode()


def read_holder_note(path: str) -> HolderNote | None:
    """The note at `path`, ours or the Neuron stack's; None when there is none or it is garbage."""
    try:
        text = read_small(path, _MAX_NOTE).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    facts = dict(
        re.findall(r"^(pid|process_name|rank|timestamp|host):[ \t]*(.*?)\s*$", text, re.MULTILINE)
    )
    if not re.fullmatch(r"\d{1,10}", facts.get("pid", "")):
        return None
    try:
        timestamp = float(facts["timestamp"])
    except (KeyError, ValueError):
        timestamp = math.nan
    shown = {name: "".join(c for c in text[:80] if c.isprintable()) for name, text in facts.items()}
    return HolderNote(
        pid=int(facts["pid"]),
        process_name=shown.get("process_name", "") or "unknown",
        host=shown.get("host", "") or socket.gethostname(),
        timestamp=timestamp if math.isfinite(timestamp) else None,
        rank=shown.get("rank") or None,
    )

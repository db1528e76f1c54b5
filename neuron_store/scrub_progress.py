"""The note by which an interrupted scrub is gone on with: one line for each entry that is done."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from typing import TYPE_CHECKING, Any

from neuron_store.artifact import is_key
from neuron_store.errors import ConfigError
from neuron_store.streams import write_all

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["ScrubProgress"]

_HEADER = {"neuron_store_verify": 1}


class ScrubProgress:
    """What earlier runs have done, and what this one does. Thread-safe; without a file it forgets.

    A line that was cut off counts as not written: that entry is read once more.
    """

    def __init__(self, descriptor: int | None = None, path: str | None = None) -> None:
        self.path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._words: dict[tuple[str, str], str] = {}

    @classmethod
    def resume(cls, path: str) -> ScrubProgress:
        """Go on with the note `path`, or begin it.

        Raises:
            ConfigError: it cannot be used, holds something else, or another run uses it.
        """
        place = f"--resume {path}"
        try:
            descriptor = _open(os.path.abspath(os.path.expanduser(path)))
        except BlockingIOError:
            raise ConfigError(f"{place}: another verify is at work with it") from None
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror or error}") from error
        progress = cls(descriptor, path)
        lines = _read(descriptor).split(b"\n")
        if lines == [b""]:
            progress._append(_HEADER)
        elif _parse(lines[0]) != _HEADER:
            os.close(descriptor)
            raise ConfigError(f"{place}: not a progress note of verify; name another file")
        else:
            if lines[-1]:
                # Cut off in the middle: what follows must begin on a line of its own.
                write_all(descriptor, b"\n")
            progress._remember(map(_parse, lines[1:]))
        return progress

    @classmethod
    def begin(cls, root: Path) -> ScrubProgress:
        """A new note in the local tier's `.stats/`; one that forgets where that cannot be."""
        path = f"{root}/.stats/verify.jsonl"
        try:
            if not os.path.isdir(root):
                return cls()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = _open(path)
            os.ftruncate(descriptor, 0)
        except OSError:  # read-only, full, or another run's: work without
            return cls()
        progress = cls(descriptor, path)
        progress._append(_HEADER)
        return progress

    def is_done(self, location: str, key: str) -> bool:
        """Whether the entry was found whole, or made so."""
        return self._words.get((location, key)) in {"ok", "repaired"}

    def is_done_anywhere(self, key: str) -> bool:
        """Whether some tier's entry of the key was found whole, or made so."""
        done = {"ok", "repaired"}
        return any(k == key and word in done for (_, k), word in self._words.items())

    def is_damaged(self, location: str, key: str) -> bool:
        """Whether a repair of the entry was begun and no end of it is known."""
        return self._words.get((location, key)) == "damaged"

    def damaged(self, location: str) -> list[str]:
        """Keys of such entries: they may be gone from their names by now."""
        return [
            k for (place, k), word in self._words.items() if place == location and word == "damaged"
        ]

    def say(self, location: str, key: str, word: str) -> None:
        """Leave word of an entry: `ok`, `damaged` (a repair begins) or `repaired`."""
        with self._lock:
            self._words[location, key] = word
            self._append({"tier": location, "key": key, "outcome": word})

    def finish(self) -> None:
        """All is done: the note goes."""
        if self._descriptor is not None and self.path is not None:
            try:
                os.unlink(os.path.expanduser(self.path))
            except OSError:
                pass
        self.close()

    def close(self) -> None:
        """Leave the note for another run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, fields: dict[str, Any]) -> None:
        if self._descriptor is None:
            return
        try:
            write_all(self._descriptor, json.dumps(fields).encode() + b"\n")
        except OSError:  # a full disk costs a second reading, not the run
            self.close()

    def _remember(self, lines: Iterable[Any]) -> None:
        for line in lines:
            if not isinstance(line, dict):
                continue
            location, key, word = (line.get(name) for name in ("tier", "key", "outcome"))
            if isinstance(location, str) and is_key(key) and isinstance(word, str):
                self._words[location, str(key)] = word


def _open(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read(descriptor: int) -> bytes:
    pieces = []
    offset = 0
    while piece := os.pread(descriptor, 1 << 20, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None

"""The note by which an interrupted scrub is gone on with: one line for each entry that is done."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
import uuid
from typing import TYPE_CHECKING, Any

from neuron_store.artifact import is_key
from neuron_store.errors import ConfigError
from neuron_store.own_directory import make_own
from neuron_store.steps import step
from neuron_store.streams import write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["ScrubProgress"]

_HEADER = {"neuron_store_verify": 1}
_FIRST_LINE = json.dumps(_HEADER).encode() + b"\n"
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
        """Go on with the note `path`, or begin it under a name that is free.

        Raises:
            ConfigError: it cannot be used, is anything but a note, or another run uses it.
        """
        place = f"--resume {path}"
        full = os.path.abspath(os.path.expanduser(path))
        try:
            descriptor = _open(full) if os.path.lexists(full) else _create(full)
        except (BlockingIOError, FileExistsError):
            raise ConfigError(f"{place}: another verify is at work with it") from None
        except _NotANote as error:
            raise ConfigError(
                f"{place}: {error}; name a file that does not exist, and it is made"
            ) from None
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror or error}") from error
        progress = cls(descriptor, path)
        lines = _read(descriptor).split(b"\n")
        if lines[-1]:
            # Cut off in the middle: what follows must begin on a line of its own.
            write_all(descriptor, b"\n")
        progress._remember(map(_parse, lines[1:]))
        return progress

    @classmethod
    def begin(cls, root: Path, *, repair: bool = False) -> ScrubProgress:
        """A new note in the local tier's `.stats/`; one that forgets where that cannot be.

        What a note that was left there says of repairs without an end is taken over.

        Args:
            root: of the local tier.
            repair: the run may set entries aside, for which the note is made even where the local
                tier is not there yet.
        """
        folder = f"{root}/.stats"
        path = f"{folder}/verify.jsonl"
        try:
            if not (repair or os.path.isdir(root)):
                return cls()
            make_own(folder)
            if not os.path.lexists(path):
                return cls(_create(path), path)
            progress = cls(_open(path), path)
        except (OSError, _NotANote):  # read-only, full, or another run's: work without
            return cls()
        try:
            assert progress._descriptor is not None
            progress._remember(map(_parse, _read(progress._descriptor).split(b"\n")[1:]))
            progress._words = progress._unfinished()
            again = _exchange(path, progress._text())
        except OSError:
            # The words stay in it for the next run as well, which finds the entries whole.
            progress.close()
            progress.path = None
        else:
            progress.close()
            progress._descriptor = again
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
        """Leave word of an entry: `ok`, `damaged` (a repair begins), `repaired`, or `left` (it has
        ended, and what is damaged is where it was).
        """
        with self._lock:
            self._words[location, key] = word
            self._append(_line(location, key, word))

    def finish(self) -> None:
        """All is done: the note goes, but for word of repairs without an end."""
        if self._descriptor is not None and self.path is not None:
            path = os.path.abspath(os.path.expanduser(self.path))
            try:
                if _is_at(self._descriptor, path):
                    self._words = self._unfinished()
                    if self._words:
                        os.close(_exchange(path, self._text()))
                    else:
                        os.unlink(path)
            except OSError:
                pass
        self.close()

    def close(self) -> None:
        """Leave the note for another run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _unfinished(self) -> dict[tuple[str, str], str]:
        return {entry: word for entry, word in self._words.items() if word == "damaged"}

    def _text(self) -> bytes:
        lines = [_line(*entry, word) for entry, word in self._words.items()]
        return b"".join([_FIRST_LINE, *lines])

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            write_all(self._descriptor, line)
        except OSError:  # a full disk costs a second reading, not the run
            self.close()

    def _remember(self, lines: Iterable[Any]) -> None:
        for line in lines:
            if not isinstance(line, dict):
                continue
            location, key, word = (line.get(name) for name in ("tier", "key", "outcome"))
            if isinstance(location, str) and is_key(key) and isinstance(word, str):
                self._words[location, str(key)] = word


def _line(location: str, key: str, word: str) -> bytes:
    return json.dumps({"tier": location, "key": key, "outcome": word}).encode() + b"\n"


class _NotANote(Exception):
    """What lies there is not a progress note, and so is neither written nor removed."""


def _open(path: str) -> int:
    """The note at `path`, locked.

    Raises:
        _NotANote: something else is there.
        BlockingIOError: another run has it.
    """
    # Before it is opened: to open some devices is to act on them already.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise _NotANote("not a regular file")
    descriptor = os.open(path, _FLAGS)
    try:
        _lock_note(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock_note(descriptor: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise _NotANote("not a regular file")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not _is_at(descriptor, path):  # its run has just ended
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
    if _parse(os.pread(descriptor, 256, 0).partition(b"\n")[0]) != _HEADER:
        raise _NotANote("not a progress note of verify")


def _create(path: str) -> int:
    """A new note, locked. It appears under its name with its first line in it, so that nothing
    which is not recognisably a note is ever taken for one.
    """

    def show(draft: str) -> None:
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(path):
                raise
            os.rename(draft, path)

    return _drafted(path, _FIRST_LINE, show)


def _exchange(path: str, data: bytes) -> int:
    """A new note, locked, in place of one whose lock the caller holds: at no time is there none."""
    return _drafted(path, data, lambda draft: os.rename(draft, path))


def _drafted(path: str, data: bytes, show: Callable[[str], None]) -> int:
    draft = f"{path}.{uuid.uuid4().hex}.new"
    try:
        descriptor = os.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_all(descriptor, data)
        step("note.show")
        show(draft)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        try:
            os.unlink(draft)
        except FileNotFoundError:
            pass
    return descriptor


def _is_at(descriptor: int, path: str) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


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

"""Checking the digests of local artifacts, once for all processes that start together.

A hit checks names and sizes at all times. Rot keeps the size, so somebody has to read the bytes
once; with 32 ranks on a node that is once for the process group and not once for each. Who has
done it leaves a note in a directory that only this user can write. The note is about one state of
one entry (inodes, sizes, change times) and about one process group, told from a later one of the
same number by the start time of its leader and the boot; so a number that is used again, and an
entry that was published again or written to, are read again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    NeuronStoreError,
    TierError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from neuron_store.abc import ArtifactStore
    from neuron_store.artifact import Artifact

__all__ = ["FirstLoad", "process_group", "runtime_directory"]

_log = logging.getLogger(__name__)

_VERIFIED = b"verified\n"
_FRESH_SECONDS = 60.0
_MEMORY = "/dev/shm"  # noqa: S108  (a directory of one's own in it, checked)
_FORGOTTEN_SECONDS = 7 * 86400.0


class FirstLoad:
    """Decides when a local artifact's bytes are read before it is handed out. Thread-safe."""

    def __init__(self, mode: str = "size") -> None:
        """Args: mode, `always`, `first` (in each process group) or `size` (never)."""
        self.mode = mode
        self._seen: dict[str, tuple[int, ...]] = {}
        self._fresh: dict[str, float] = {}

    def check(self, local: ArtifactStore, path: Path, artifact: Artifact) -> bool:
        """Whether the entry at `path`, just found to be `artifact`, may be used; False: it is gone.

        Raises:
            ArtifactCorrupt: its bytes are not those of its record. It was taken from its name, if
                that could be done.
        """
        if self.mode == "size":
            return True
        key, place = artifact.key, str(path)
        if self.mode == "always":
            return self._read(local, key)
        if not artifact.has_digests:
            # An entry of the Neuron stack: there is nothing to compare with.
            return True
        try:
            found = os.stat(place)
        except FileNotFoundError:
            return False
        state = (found.st_dev, found.st_ino, found.st_mtime_ns)
        if self._seen.get(place) == state:
            return True
        fresh = time.monotonic() < self._fresh.pop(key, 0.0)
        with _note(artifact, place, state, wait=not fresh) as note:
            if not note.says_verified():
                if not fresh and not self._read(local, key):
                    return False
                note.say_verified()
        self._seen[place] = state
        return True

    def published(self, key: str) -> None:
        """Every byte of the entry was digested just now, when it was published by this process.

        Whoever publishes wants to use it, so that the note is left to its `check`.
        """
        if self.mode == "first":
            self._fresh[key] = time.monotonic() + _FRESH_SECONDS

    def _read(self, local: ArtifactStore, key: str) -> bool:
        try:
            local.verify(key)
        except ArtifactNotFound:
            return False
        except ArtifactCorrupt:
            _set_aside(local, key)
            raise
        except TierError as error:
            # A bad sector. What cannot be read here cannot be loaded either.
            _set_aside(local, key)
            raise ArtifactCorrupt(key, local.location, f"unreadable: {error.reason}") from error
        return True


def _set_aside(local: ArtifactStore, key: str) -> None:
    try:
        local.set_aside(key)
    except NeuronStoreError as error:
        _log.warning("damaged artifact %s stays in place: %s", key, error)


# -- notes ------------------------------------------------------------------------------------


class _Note:
    """One file: empty while somebody reads the entry, then it says so. None: memory only."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def says_verified(self) -> bool:
        return self._descriptor is not None and os.pread(self._descriptor, 64, 0) == _VERIFIED

    def say_verified(self) -> None:
        if self._descriptor is None:
            return
        try:
            os.pwrite(self._descriptor, _VERIFIED, 0)
        except OSError as error:
            # Others read the entry once more.
            _log.debug("no note of a verified artifact: %s", error)


@contextmanager
def _note(
    artifact: Artifact, place: str, state: tuple[int, ...], *, wait: bool = True
) -> Iterator[_Note]:
    """The note of an entry as it is now, held exclusively unless it says that all is done."""
    descriptor = _open_note(artifact, place, state)
    if descriptor is None:
        yield _Note(None)
        return
    try:
        note = _Note(descriptor)
        if wait and not note.says_verified():
            # The kernel frees it when whoever reads the entry is killed; then it is our turn.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                _log.debug("no lock in the runtime directory: %s", error)
        yield note
    finally:
        os.close(descriptor)


def _open_note(artifact: Artifact, place: str, state: tuple[int, ...]) -> int | None:
    group, runtime = process_group(), runtime_directory()
    if group is None or runtime is None:
        return None
    facts: list[object] = [place, state, artifact.write_id]
    try:
        for file in artifact.files:
            found = os.lstat(f"{place}/{file.name}")
            facts.append((file.name, found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
        folder = f"{runtime}/verified/{group}"
        if not os.path.isdir(folder):
            _make_folder(f"{runtime}/verified", group)
        name = hashlib.sha256(repr(facts).encode()).hexdigest()[:40]
        return os.open(
            f"{folder}/{name}",
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o600,
        )
    except OSError as error:
        _log.debug("no note of %s: %s", place, error)
        return None


def _make_folder(verified: str, group: str) -> None:
    """The group's own; and notes that nobody will ask for any more are removed, by one of it."""
    os.makedirs(verified, mode=0o700, exist_ok=True)
    try:
        os.mkdir(f"{verified}/{group}", 0o700)
    except FileExistsError:
        return
    _forget_dead_groups(verified, group)


def runtime_directory() -> str | None:
    """A directory of this user's own for what need not outlive the machine's run; None: none.

    `$XDG_RUNTIME_DIR/neuron_store`; else `neuron_store-<uid>` in `/dev/shm`, where a file costs
    microseconds (on a disk, up to milliseconds), or in the directory for temporary files. One that
    others own, could write to, or put a link to, is not used.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and _is_own(base):
        path = f"{base}/neuron_store"
    else:
        base = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
        path = f"{base}/neuron_store-{os.getuid()}"
    if _is_own(path):
        return path
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        _log.debug("no runtime directory: %s", error)
        return None
    if not _is_own(path):
        _log.debug("%s is not safely this user's own, and not used", path)
        return None
    return path


def _is_own(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    mine = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return stat.S_ISDIR(found.st_mode) and mine


# -- process groups -----------------------------------------------------------------------------


_group_lock = threading.Lock()
_groups: dict[tuple[int, int], str | None] = {}


def process_group() -> str | None:
    """A name of this process's group that no other group ever has; None: it has no known leader.

    torchrun makes each rank the leader of a group of its own: there the launcher's group counts.
    """
    own = os.getpgid(0)
    place = (os.getpid(), own)
    with _group_lock:
        if place not in _groups:
            leader = own
            if own == os.getpid() and os.environ.get("TORCHELASTIC_RUN_ID"):
                try:
                    leader = os.getpgid(os.getppid())
                except OSError:
                    leader = own
            started = _start_time(leader)
            _groups[place] = f"{leader}-{started}-{_machine()}" if started else None
        return _groups[place]


def _after_fork() -> None:
    global _group_lock  # noqa: PLW0603  (another thread of the parent may have held it)
    _group_lock = threading.Lock()
    _groups.clear()


os.register_at_fork(after_in_child=_after_fork)


def _start_time(pid: int) -> str | None:
    """Clock ticks from the boot to the process's start, as text."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name comes second, in parentheses, and may hold anything.
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError, ValueError):
        return None


def _machine() -> str:
    """The boot and the name space of process ids: numbers mean nothing beyond them."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()
        boot += os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = "unknown"
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def _forget_dead_groups(folder: str, mine: str) -> None:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    here = _machine()
    for name in names:
        pid, _, rest = name.partition("-")
        started, _, machine = rest.partition("-")
        if name == mine or not pid.isdigit():
            continue
        if machine == here:
            dead = _start_time(int(pid)) != started
        else:
            # Of an earlier run of the machine, or of a container beside us, whose processes are not
            # ours to see. A note that is missed costs a reading.
            dead = _age(f"{folder}/{name}") > _FORGOTTEN_SECONDS
        if dead:
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)


def _age(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0

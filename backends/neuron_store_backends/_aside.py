"""Taking a whole directory away from its name, by one process only.

A rename goes by name, so between judging a directory damaged and renaming it away another process
may have put a good one in its place, and the good one would be taken away. Therefore nobody moves a
directory without the claim that lies inside it: created exclusively, it travels with the
directory, and while a live holder has it the name keeps meaning that directory. No lock and no
wall clock is needed, which NFS without a lock daemon could not offer.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from neuron_store.artifact import RECORD_NAME
from neuron_store.steps import step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from neuron_store_backends._entry import Entry

__all__ = ["TreeFacts", "claim_and_move", "claimed", "put_back", "remove_tree", "tree_facts"]

_log = logging.getLogger(__name__)

_CLAIM = ".neuron_store.claim"
# A holder needs the claim for two system calls. One that this process sees unchanged for so long,
# by its own monotonic clock, belongs to a process that died.
CLAIM_SECONDS = 5.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSES = 3


def claim_and_move(entry: Entry, target: str, *, still: Callable[[], bool]) -> bool:
    """Rename the entry's directory to `target`; False when somebody else did, or `still` says no.

    Args:
        entry: the open directory.
        target: a path on the same file system that does not exist.
        still: asked under the claim: should it be moved at all?

    Raises:
        OSError: the directory may not be written or moved.
    """
    identity = uuid.uuid4().hex.encode()
    if not _claim(entry, identity):
        return False
    step("aside.claimed")
    if not still() or not entry.is_at_path():
        _unclaim(entry)
        return False
    step("aside.move")
    try:
        os.rename(entry.path, target)
    except OSError as error:
        # NFS reports an error for a rename that worked, when its reply was lost: `target` is a
        # random name, so whoever lies there was moved by this call.
        if not os.path.lexists(target):
            _unclaim(entry)
            if isinstance(error, FileNotFoundError):
                return False
            raise
    if _same(target, entry):
        return True
    # Only a process that was stopped here for longer than CLAIM_SECONDS, and then overtaken, comes
    # this way. What it took away goes back, unless a newer one has come in the meantime.
    try:
        os.rename(target, entry.path)
    except OSError as error:
        _log.warning("%s was moved to %s by mistake and stays there: %s", entry.path, target, error)
    return False


@contextmanager
def claimed(entry: Entry) -> Iterator[bool]:
    """Hold the entry's directory so that nobody moves it, or holds it, meanwhile; False: gone.

    Raises:
        OSError: the directory may not be written.
    """
    if not _claim(entry, uuid.uuid4().hex.encode()):
        yield False
        return
    try:
        yield entry.is_at_path()
    finally:
        _unclaim(entry)


def _same(path: str, entry: Entry) -> bool:
    mine = os.fstat(entry.fd)
    for attempt in range(_PASSES):
        try:
            there = os.stat(path, follow_symlinks=False)
        except OSError as error:
            # It was moved. A caller that is told an error now would believe that it was not.
            _log.debug("looking at %s: %s", path, error)
            time.sleep(0.02 * 2**attempt)
        else:
            return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
    return True


def _claim(entry: Entry, identity: bytes) -> bool:
    seen, since = b"", time.monotonic()
    while True:
        try:
            _create_claim(entry, identity)
        except FileExistsError:
            pass
        except FileNotFoundError:
            return False  # the directory itself was removed
        else:
            return True
        if not entry.is_at_path():
            return False
        current = _read_claim(entry)
        now = time.monotonic()
        if current != seen:
            seen, since = current, now
        elif now - since > CLAIM_SECONDS:
            # Only one of those who take it over finds the name still there.
            try:
                os.rename(
                    _CLAIM,
                    f"{_CLAIM}.{uuid.uuid4().hex}",
                    src_dir_fd=entry.fd,
                    dst_dir_fd=entry.fd,
                )
            except FileNotFoundError:
                pass
            seen, since = b"", now
            continue
        step("aside.wait")
        time.sleep(0.02)


def _create_claim(entry: Entry, identity: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        descriptor = os.open(_CLAIM, flags, 0o666, dir_fd=entry.fd)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # A full disk is emptied by deleting: a link needs no new file, and excludes as well.
        try:
            os.link(RECORD_NAME, _CLAIM, src_dir_fd=entry.fd, dst_dir_fd=entry.fd)
        except FileNotFoundError:
            raise error from None  # an entry of the Neuron stack has no record to link to
        return
    try:
        os.write(descriptor, identity)
    except OSError as error:
        # That it exists is the claim; what it says only tells one holder from the next.
        if error.errno not in _FULL:
            os.unlink(_CLAIM, dir_fd=entry.fd)
            raise
    finally:
        os.close(descriptor)


def _read_claim(entry: Entry) -> bytes:
    try:
        descriptor = os.open(_CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=entry.fd)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 64) or b"?"
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _unclaim(entry: Entry) -> None:
    try:
        os.unlink(_CLAIM, dir_fd=entry.fd)
    except FileNotFoundError:
        pass


def put_back(entry: Entry, moved: str) -> bool:
    """Undo a `claim_and_move`; False when the name is taken by now."""
    _unclaim(entry)
    try:
        os.rename(moved, entry.path)
    except OSError:
        return False
    return True


@attrs.frozen
class TreeFacts:
    """What a file or a directory takes, and when anything in it last changed."""

    size: int
    """Bytes of all files."""
    changed: float
    """Unix seconds by the file system's clock."""


def tree_facts(path: str) -> TreeFacts:
    """Look at everything below `path`, following no link; what vanishes meanwhile is left out.

    Raises:
        FileNotFoundError: nothing is there at all.
    """
    top = os.lstat(path)
    size, changed, folders = 0, top.st_mtime, []
    if stat.S_ISDIR(top.st_mode):
        folders = [path]
    else:
        size = top.st_size
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        for each in entries:
            try:
                found = each.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            changed = max(changed, found.st_mtime)
            if stat.S_ISDIR(found.st_mode):
                folders.append(each.path)
            else:
                size += found.st_size
    return TreeFacts(size, changed)


def remove_tree(path: str) -> None:
    """Remove a directory that nobody needs, whatever vanishes from it meanwhile.

    Never raises: whoever calls it has done, or failed at, what matters. Trouble that stays is
    logged.
    """
    for attempt in range(_PASSES):
        troubles: list[tuple[str, BaseException]] = []

        def note(
            _call: object,
            name: str,
            info: tuple[object, BaseException, object],
            troubles: list[tuple[str, BaseException]] = troubles,
        ) -> None:
            if not (isinstance(info[1], OSError) and info[1].errno == errno.ENOENT):
                troubles.append((name, info[1]))

        shutil.rmtree(path, onerror=note)
        if not troubles:
            return
        # ESTALE and EBUSY pass (a peer's rename, a file that somebody still has open on NFS).
        if attempt < _PASSES - 1:
            time.sleep(0.02 * 2**attempt)
    _log.warning("cannot remove %s: %s", *troubles[0])

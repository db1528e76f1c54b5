"""What a file system's errors mean: which of them pass, and what to do about the others."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, TypeVar

from neuron_store.errors import ArtifactCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PASSING", "TRIES", "again", "as_corrupt", "refused_in", "remedy"]

_T = TypeVar("_T")

PASSING = frozenset({errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR})
"""A peer's rename or unlink on NFS (ESTALE), a server at its limits (EBUSY, EAGAIN): worth another
try, and soon over."""
TRIES = 6


def again(act: Callable[[int], _T]) -> _T:
    """What `act` gives, tried again while its trouble is of the kind that passes.

    It gets the number of the try, from 0.
    """
    for attempt in range(TRIES - 1):
        try:
            return act(attempt)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            time.sleep(0.02 * 2**attempt)
    return act(TRIES - 1)


def remedy(error: OSError, *, reading: bool = False) -> str:
    """The error in words that say what to do."""
    place = _refusing(error) or error.filename
    what = f"{error.strerror or error} ({place})" if place else str(error)
    right = "read it" if reading else "write there"
    hint = {
        errno.EACCES: f"give this user the right to {right}, or name another root",
        errno.EPERM: f"give this user the right to {right}, or name another root",
        errno.EROFS: "the file system is mounted read-only; mount it rw, or name another place",
        errno.ENOSPC: "the disk is full; free space or name another root",
        errno.EFBIG: "more than this process (ulimit -f) or the file system allows in one file",
        errno.EDQUOT: "the quota is used up; free space or raise it",
        errno.ENOTDIR: "a part of the path is not a directory",
        errno.ESTALE: "the mount lost track of the file; mount it again if that goes on",
    }.get(error.errno or 0)
    return f"{what}; {hint}" if hint else what


def _refusing(error: OSError) -> str | None:
    """Of the two directories of a rename the one that may not be written; None: unknown."""
    if not isinstance(error, PermissionError) or error.filename2 is None:
        return None
    for name in (error.filename, error.filename2):
        folder = os.path.dirname(os.fsdecode(name))
        if os.path.isabs(folder) and not os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


def refused_in(folder: str, error: PermissionError) -> PermissionError:
    """The error with the directory that may not be written, in place of a name inside it."""
    return PermissionError(error.errno, error.strerror, folder)


def as_corrupt(error: Exception, key: str, location: str) -> ArtifactCorrupt:
    """The error as damage: itself, or that what it names is missing."""
    if isinstance(error, ArtifactCorrupt):
        return error
    missing = getattr(error, "filename", None) or "a file"
    return ArtifactCorrupt(key, location, f"{missing} is missing")

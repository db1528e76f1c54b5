"""Directories of our own in a place that others may write to: a tier's `.staging` and so on, an
engine's ledger and manifest.

Whoever may write there could put a link in place of one, and have everything that is moved,
written or removed in it moved, written or removed elsewhere. So a link is refused and never
followed, whoever made it.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["has_own", "make_own", "open_own"]


def has_own(path: str) -> bool:
    """Whether the directory is there; only its last component is judged.

    Raises:
        OSError: something else is there, ELOOP when it is a symbolic link; or as `os.lstat`.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        return True
    raise _in_place(path, "a symbolic link" if stat.S_ISLNK(mode) else "no directory")


def make_own(path: str) -> None:
    """Make the directory, and the root above it, where it is missing.

    Raises:
        OSError: as `has_own`; or it cannot be made.
    """
    if has_own(path):
        return
    try:
        os.makedirs(path)
    except FileExistsError:
        has_own(path)


def open_own(path: str) -> int:
    """A descriptor of the directory.

    Raises:
        FileNotFoundError: it is not there.
        OSError: as `has_own`.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            has_own(path)
        raise


def _in_place(path: str, what: str) -> OSError:
    code = errno.ELOOP if what == "a symbolic link" else errno.EEXIST
    return OSError(
        code, f"{what} in place of our own directory; remove it, nothing follows it", path
    )

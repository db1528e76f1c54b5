"""Who may read and write what is made in a tier: the umask and the root directory say.

Files get 0666 and directories 0777, less the umask, as if they were written on the spot; also those
that a compiler or `mkdtemp` made private and that a publish takes over. A set-group-id root
hands its group down. The directories beside the entries are as open as the root, whoever came
first: else that one's umask would shut everybody else out.
"""

from __future__ import annotations

import logging
import os
import re
import stat

from neuron_store.errors import InvalidArtifact
from neuron_store.own_directory import make_own
from neuron_store.streams import read_small

__all__ = [
    "group_of",
    "level_container",
    "level_directory",
    "level_file",
    "make_container",
    "umask",
]

_UMASK = re.compile(rb"^Umask:\s*([0-7]+)", re.MULTILINE)
_log = logging.getLogger(__name__)


def make_container(root: str, name: str) -> str:
    """`<root>/<name>`, made where it is missing, and no less open than the root.

    Raises:
        OSError: it cannot be made; or a link or a file is in its place.
    """
    path = f"{root}/{name}"
    make_own(path)
    level_container(path, root)
    return path


def level_container(path: str, root: str, *, sticky: bool = True) -> None:
    """Make a directory no less open than the root, where this user owns it and may.

    Args:
        path: of the directory.
        root: of the tier.
        sticky: False where one user has to be able to rename what another one made.

    Raises:
        OSError: one of them cannot be looked at.
    """
    above, found = os.stat(root), os.stat(path, follow_symlinks=False)
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        return
    wanted = stat.S_IMODE(found.st_mode | above.st_mode)
    if not sticky:
        wanted &= ~stat.S_ISVTX
    try:
        if above.st_mode & stat.S_ISGID and found.st_gid != above.st_gid:
            os.chown(path, -1, above.st_gid)
        if wanted != stat.S_IMODE(found.st_mode):
            os.chmod(path, wanted)
    except OSError as error:
        _log.debug("%s stays as it is: %s", path, error)


def umask() -> int | None:
    """The process's umask; `os.umask` would have to change it, for all threads. None: unknown."""
    try:
        found = _UMASK.search(read_small("/proc/self/status", 4096))
    except (OSError, InvalidArtifact):
        return None
    return int(found.group(1), 8) if found else None


def group_of(directory: str) -> int | None:
    """The group that a directory hands down to what is made in it; None: the maker's own."""
    found = os.stat(directory)
    return found.st_gid if found.st_mode & stat.S_ISGID else None


def level_file(descriptor: int, mask: int | None, group: int | None) -> None:
    """Give a file that was taken over mode and group of a new one."""
    found = os.fstat(descriptor)
    try:
        if group is not None and found.st_gid != group:
            os.fchown(descriptor, -1, group)
        if mask is not None and stat.S_IMODE(found.st_mode) != 0o666 & ~mask:
            os.fchmod(descriptor, 0o666 & ~mask)
    except OSError as error:  # somebody else's file
        _log.debug("a file keeps mode %o: %s", found.st_mode, error)


def level_directory(path: str, mask: int | None, group: int | None) -> None:
    """Give a directory that was taken over mode and group of a new one."""
    found = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        return
    mode = stat.S_IMODE(found.st_mode) if mask is None else 0o777 & ~mask
    wanted = mode | (stat.S_ISGID if group is not None else 0)
    try:
        if group is not None and found.st_gid != group:
            os.chown(path, -1, group)
        if stat.S_IMODE(found.st_mode) != wanted:
            os.chmod(path, wanted)
    except OSError as error:  # somebody else's directory
        _log.debug("%s stays as it is: %s", path, error)

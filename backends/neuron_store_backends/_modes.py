"""Who may read and write what is made in a tier: the umask and the root directory say.

Files get 0666 and directories 0777, less the umask, as if they were written on the spot; also those
that a compiler or `mkdtemp` made private and that a publish takes over. A set-group-id root
hands its group down. The directories beside the entries are as open as the root, whoever came
first: else that one's umask would shut everybody else out.
"""

from __future__ import annotations

import logging
import os
import stat

__all__ = ["level_directory", "level_file", "make_container", "umask"]

_log = logging.getLogger(__name__)


def make_container(root: str, name: str) -> str:
    """`<root>/<name>`, made where it is missing, and no less open than the root.

    Raises:
        OSError: it cannot be made.
    """
    path = f"{root}/{name}"
    os.makedirs(path, exist_ok=True)
    above, found = os.stat(root), os.stat(path, follow_symlinks=False)
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        return path
    wanted = stat.S_IMODE(found.st_mode | above.st_mode)
    try:
        if above.st_mode & stat.S_ISGID and found.st_gid != above.st_gid:
            os.chown(path, -1, above.st_gid)
        if wanted != stat.S_IMODE(found.st_mode):
            os.chmod(path, wanted)
    except OSError as error:
        _log.debug("%s stays as it is: %s", path, error)
    return path


def umask() -> int | None:
    """The process's umask; `os.umask` would have to change it, for all threads. None: unknown."""
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError, IndexError):
        pass
    return None


def level_file(descriptor: int, mask: int | None) -> None:
    """Give a file that was taken over the mode of a new one."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mask is None or mode == 0o666 & ~mask:
        return
    try:
        os.fchmod(descriptor, 0o666 & ~mask)
    except OSError as error:  # somebody else's file
        _log.debug("a file keeps mode %o: %s", mode, error)


def level_directory(path: str, mask: int | None) -> None:
    """Give a directory that was taken over mode and group of a new one at its place."""
    above, found = os.stat(os.path.dirname(path)), os.stat(path, follow_symlinks=False)
    if mask is None or not stat.S_ISDIR(found.st_mode):
        return
    handed_down = above.st_mode & stat.S_ISGID
    wanted = 0o777 & ~mask | handed_down
    try:
        if handed_down and found.st_gid != above.st_gid:
            os.chown(path, -1, above.st_gid)
        if stat.S_IMODE(found.st_mode) != wanted:
            os.chmod(path, wanted)
    except OSError as error:  # somebody else's directory
        _log.debug("%s stays as it is: %s", path, error)

"""`flock` on a file that is there for it, without waiting; not kept by forked children.

As filelock takes it, so that whoever uses that on the same file and this exclude each other. It is
taken here by the calls themselves since filelock spends most of a millisecond around them, at each
miss of each rank (docs/performance.md).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading

__all__ = ["give_up", "take"]

# Not through a link, and without waiting for the other end of a pipe.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100

# Held over each open and each close, and over each fork: a child knows every descriptor that it
# inherits.
_guard = threading.Lock()
_open: set[int] = set()


def take(path: str) -> int | None:
    """Lock the file `path`, which is made if need be and never removed; None: another has it.

    Returns:
        What `give_up` takes. The kernel gives it up when the process dies, however it does.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    for _ in range(_TRIES):
        with _guard:
            descriptor = os.open(path, _FLAGS, 0o644)
            _open.add(descriptor)
        try:
            if _lock(descriptor, path):
                return descriptor
        except BlockingIOError:
            _close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)
    raise OSError(errno.EBUSY, "the lock file is removed again and again", path)


def _lock(descriptor: int, path: str) -> bool:
    """Whether the file that is now locked still has its name.

    The Neuron stack unlinks what it takes for stale, and the lock of a file without a name excludes
    nobody.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.path.samestat(found, os.lstat(path))


def give_up(descriptor: int) -> None:
    """Unlock.

    Raises:
        OSError: the file system's own trouble; the descriptor is closed all the same.
    """
    try:
        # Not by closing alone: a child that is between fork and exec may have it, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        _close(descriptor)


def _close(descriptor: int) -> None:
    with _guard:
        _open.discard(descriptor)
        os.close(descriptor)


def _in_child() -> None:
    # Closed and not unlocked: the lock is the parent's. Kept open it would outlive the parent.
    for descriptor in _open:
        try:
            os.close(descriptor)
        except OSError:
            pass
    _open.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_in_child)

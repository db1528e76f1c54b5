"""Leases on a file system: `<root>/.leases/<key>/`, a directory with one empty file.

The file's name is the lease: `1,<token>,<counter>,<ttl>,<pid>,<host>`. A rename is what makes of
one version the next, and it needs the old name to be there: of the holder who renews and of all who
would take over exactly one gets through, as with a conditional replace. Names change at one stroke
and are what a listing asks the server for, so there is no content to be torn, or to be read from
NFS's cache. A free lease is taken by renaming a directory with the file inside into place, which
refuses a non-empty target; it is given back by unlinking the file, which can only be the
holder's own, and then the directory. No flock, no wall clock, no time of a file is asked.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
import uuid
from typing import TYPE_CHECKING

import attrs

from neuron_store.abc import Lease, check_ttl
from neuron_store.artifact import check_key
from neuron_store.own_directory import make_own
from neuron_store.steps import step
from neuron_store.streams import create_file
from neuron_store_backends._file_trouble import PASSING, refused_in
from neuron_store_backends._heartbeat import HeldLease, Watch, own_clock
from neuron_store_backends._lease_record import LeaseRecord, lease_held, lease_name, read_name
from neuron_store_backends._modes import level_container, make_container

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from neuron_store.errors import LeaseHeld

__all__ = ["LEASES", "DirectoryLeases"]

_log = logging.getLogger(__name__)

LEASES = ".leases"
"""Below the tier's root; holds a directory for each lease and nothing else. For `gc`: a live holder
changes its directory (and so its time of change) at least every `MAX_LEASE_TTL` / 3, so what is
older than `_lease_record.ABANDONED` may be removed, the file first. What a process leaves behind
that died while it took a lease is `.staging/lease.<uuid>`.

It and the directories in it are as open as the root, but never sticky: any user of the tier takes
over from a holder who is gone, by renaming what that one made."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_TRIES = 4


@attrs.frozen
class _Seen:
    """What a look at a key's lease found."""

    names: tuple[str, ...]
    """All that is in its directory; the name of what stands in the directory's place."""
    stranger: bool = False
    """It is no directory."""

    @property
    def leases(self) -> list[tuple[str, LeaseRecord]]:
        """Those that can be read, the youngest first."""
        found = [(name, record) for name in self.names if (record := read_name(name)) is not None]
        return sorted(found, key=lambda each: -each[1].counter)

    @property
    def version(self) -> str:
        return "/".join(self.names)


class DirectoryLeases:
    """The leases of one tier, as this process sees them.

    Args:
        root: of the tier.
        trouble: (operation, key) to a context that turns `OSError` into `TierError`.
    """

    def __init__(
        self, root: str, trouble: Callable[[str, str | None], AbstractContextManager[None]]
    ) -> None:
        self._root = root
        self._trouble = trouble
        self._watch = Watch()

    def take(self, key: str, ttl: float) -> Lease:
        """See `ArtifactStore.lease`. One listing while another holds it."""
        check_key(key)
        check_ttl(ttl)
        record = LeaseRecord.new(ttl)
        with self._trouble("lease", key):
            asked = time.monotonic()
            seen = _look(self._root, key)
            if seen is None:
                self._watch.forget(key)
                return self._create(key, record)
            unchanged = self._watch.unchanged(key, seen.version, asked)
            # A holder promised to renew within its own ttl, which may be longer than ours.
            patience = max([ttl, *(theirs.ttl for _, theirs in seen.leases)])
            if unchanged < patience:
                raise self._held(key, seen)
            return self._take_over(key, record, seen)

    def _create(self, key: str, record: LeaseRecord) -> Lease:
        staged = f"{self._root}/.staging/lease.{uuid.uuid4().hex}"
        step("lease.stage")
        make_container(self._root, ".staging")
        leases = f"{self._root}/{LEASES}"
        make_own(leases)
        level_container(leases, self._root, sticky=False)
        os.mkdir(staged)
        try:
            level_container(staged, self._root, sticky=False)
            os.close(create_file(f"{staged}/{lease_name(record)}"))
            step("lease.create")
            since = own_clock()
            try:
                os.rename(staged, f"{leases}/{key}")
            except PermissionError as error:
                # Of the two names the staged one is our own.
                writable = os.access(leases, os.W_OK | os.X_OK)
                place = f"{leases}/{key}" if writable else leases
                raise PermissionError(error.errno, error.strerror, place) from error
            except OSError as error:
                # A retransmitted NFS rename reports an error though the first one worked.
                seen = _look(self._root, key, thoroughly=True)
                if seen is None or lease_name(record) not in seen.names:
                    if error.errno not in _TAKEN | _GONE:
                        raise
                    raise self._held(key, seen) from error
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        step("lease.created")
        return self._hold(key, record, since)

    def _take_over(self, key: str, record: LeaseRecord, seen: _Seen) -> Lease:
        step("lease.take")
        if not seen.leases:
            # Whoever holds a lease that we cannot read finds out at its next renewal.
            _clear(self._root, key, seen)
            self._watch.forget(key)
            return self._create(key, record)
        since = own_clock()
        if not _rename(self._root, key, seen.leases[0][0], record):
            raise self._held(key, _look(self._root, key))
        self._watch.forget(key)
        step("lease.taken")
        return self._hold(key, record, since)

    def _hold(self, key: str, record: LeaseRecord, since: float) -> Lease:
        claim = _DirectoryClaim(self._root, key, record, self._trouble)
        return HeldLease(claim, self._root, key, record.ttl, since)

    def _held(self, key: str, seen: _Seen | None) -> LeaseHeld:
        leases = seen.leases if seen is not None else []
        theirs = leases[0][1] if leases else None
        return lease_held(key, self._root, theirs, renewed=self._watch.renewed(key))


@attrs.define
class _DirectoryClaim:
    root: str
    key: str
    record: LeaseRecord
    trouble: Callable[[str, str | None], AbstractContextManager[None]]

    def renew(self) -> bool:
        following = self.record.renewed()
        with self.trouble("renew the lease of", self.key):
            if not _rename(self.root, self.key, lease_name(self.record), following):
                return False
        self.record = following
        return True

    def remove(self) -> None:
        with self.trouble("release the lease of", self.key):
            try:
                folder = _open(self.root, self.key)
            except FileNotFoundError:
                return
            try:
                os.unlink(lease_name(self.record), dir_fd=folder)
            except FileNotFoundError:
                return
            except PermissionError as error:
                raise refused_in(_place(self.root, self.key), error) from error
            finally:
                os.close(folder)
            step("lease.unlinked")
            try:
                os.rmdir(_place(self.root, self.key))
            except OSError as error:
                # The next holder's is there already, or what NFS keeps of an open file. An empty
                # directory is in nobody's way.
                _log.debug("%s", error)


def _place(root: str, key: str) -> str:
    return f"{root}/{LEASES}/{key}"


def _open(root: str, key: str) -> int:
    """A descriptor of the key's directory, never through a link below the root.

    Raises:
        OSError: ENOENT: there is none; ENOTDIR, ELOOP: something else is there.
    """
    parent = os.open(f"{root}/{LEASES}", _DIRECTORY)
    try:
        return os.open(key, _DIRECTORY, dir_fd=parent)
    finally:
        os.close(parent)


def _look(root: str, key: str, *, thoroughly: bool = False) -> _Seen | None:
    """What is there for a key; None when nothing is.

    Args:
        root: of the tier.
        key: whose lease.
        thoroughly: a rename found something that NFS may hide for a while from look-ups by name;
            a listing of the parent shows it to them again.
    """
    for attempt in range(_TRIES):
        try:
            if thoroughly:
                os.listdir(f"{root}/{LEASES}")
            folder = _open(root, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in {errno.ENOTDIR, errno.ELOOP}:
                return _stranger(root, key)
            if error.errno != errno.ESTALE or attempt == _TRIES - 1:
                raise
            continue
        try:
            # Files that were unlinked while somebody had them open show as these on NFS.
            names = sorted(n for n in os.listdir(folder) if not n.startswith(".nfs"))
        except OSError as error:
            if error.errno not in _GONE or attempt == _TRIES - 1:
                raise
            continue
        finally:
            os.close(folder)
        return _Seen(tuple(names)) if names else None
    return None


def _stranger(root: str, key: str) -> _Seen | None:
    try:
        found = os.lstat(_place(root, key))
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        # `.leases` itself is no directory, or a link.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), f"{root}/{LEASES}")
    return _Seen((f"{found.st_ino}.{found.st_mtime_ns}",), stranger=True)


def _rename(root: str, key: str, name: str, record: LeaseRecord) -> bool:
    """Make `record` of the version that is called `name`; False when that is gone."""
    for attempt in range(_TRIES):
        try:
            folder = _open(root, key)
            try:
                return _rename_in(folder, name, lease_name(record))
            except PermissionError as error:
                raise refused_in(_place(root, key), error) from error
            finally:
                os.close(folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in PASSING or attempt == _TRIES - 1:
                raise
        time.sleep(0.02 * 2**attempt)
    return False


def _rename_in(folder: int, old: str, new: str) -> bool:
    try:
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:
        # A retransmitted NFS rename reports an error though the first one worked.
        return new in os.listdir(folder)
    return True


def _clear(root: str, key: str, seen: _Seen) -> None:
    """Take away what was there for a whole ttl and is no lease."""
    if seen.stranger:
        # Not a directory, or the call refuses: another's lease cannot be taken away here.
        try:
            os.unlink(_place(root, key))
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            _log.debug("%s", error)
        return
    folder = _open(root, key)
    try:
        for name in seen.names:
            aside = f"{root}/.staging/lease.{uuid.uuid4().hex}"
            make_container(root, ".staging")
            try:
                os.rename(name, aside, src_dir_fd=folder)
            except FileNotFoundError:
                continue
            except PermissionError as error:
                raise refused_in(_place(root, key), error) from error
            if os.path.isdir(aside) and not os.path.islink(aside):
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.unlink(aside)
    finally:
        os.close(folder)

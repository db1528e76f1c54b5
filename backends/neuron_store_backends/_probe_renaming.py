"""What the rename tiers measure of the file system they lie on."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from typing import TYPE_CHECKING

from neuron_store.abc import Check, Speed, TierReport, measure_latency
from neuron_store.own_directory import has_own
from neuron_store.streams import write_all
from neuron_store_backends._aside import remove_tree
from neuron_store_backends._modes import make_container
from neuron_store_backends._staging import sync_directory

if TYPE_CHECKING:
    from neuron_store_backends.renaming import RenamingStore

__all__ = ["probe"]

_OWN = (".staging", ".quarantine", ".leases", ".failed", ".stats", ".gc")
_SPEED_BYTES = 16 << 20
_UNFIT = (
    "publishing rests on it, so this file system cannot hold a tier: use a local disk, NFS 3 or "
    "later, Lustre, or an object store"
)


def probe(store: RenamingStore, root: str) -> TierReport:
    """Measure inside `<root>/.staging/` only, and leave nothing there."""
    place = f"{root}/.staging/probe.{uuid.uuid4().hex}"
    own = _own_directories(root)
    if not own.passed:
        return TierReport(store.location, (own,), measure_latency(store))
    try:
        make_container(root, ".staging")
        os.mkdir(place)
    except OSError as error:
        remedy = "give this user the right to write there; or set read_only=1 if it is only read"
        reason = f"{root}: {error.strerror}"
        refused = Check("writable", passed=False, detail=reason, remedy=remedy)
        return TierReport(store.location, (refused,), measure_latency(store))
    try:
        checks = (
            Check("writable", passed=True),
            own,
            _rename_refuses(place),
            _create_excludes(place),
            _flushes(place),
            _flock_excludes(place),
            _space(root),
        )
        speed = _speed(f"{place}/speed")
    finally:
        remove_tree(place)
    return TierReport(store.location, checks, measure_latency(store), speed)


def _own_directories(root: str) -> Check:
    name = "own directories"
    for folder in _OWN:
        try:
            has_own(f"{root}/{folder}")
        except OSError as error:
            if error.errno not in {errno.ELOOP, errno.EEXIST}:
                continue
            remedy = f"see who put it there, and remove it: rm {root}/{folder}"
            reason = f"{error.filename}: {error.strerror}"
            return Check(name, passed=False, detail=reason, remedy=remedy)
    return Check(name, passed=True)


def _speed(path: str) -> Speed | None:
    """Write and read back a file; None where the disk is too full for that."""
    try:
        small = _time_file(path, 1 << 20)
        # Where that was slow already, more would only keep people waiting.
        slow = small.write_seconds + small.read_seconds > 1.0
        return small if slow else _time_file(path, _SPEED_BYTES)
    except OSError:
        return None


def _time_file(path: str, size: int) -> Speed:
    piece = os.urandom(1 << 20)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        began = time.perf_counter()
        for _ in range(size >> 20):
            write_all(descriptor, piece)
        os.fsync(descriptor)
        written = time.perf_counter()
        # From the disk or the server, and not from this machine's memory.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        again = time.perf_counter()
        os.lseek(descriptor, 0, os.SEEK_SET)
        while os.read(descriptor, 1 << 20):
            pass
        return Speed(size, written - began, time.perf_counter() - again)
    finally:
        os.close(descriptor)


def _rename_refuses(place: str) -> Check:
    name = "rename refuses a non-empty directory"
    for folder in ("old", "new"):
        os.mkdir(f"{place}/{folder}")
        with open(f"{place}/{folder}/mark", "w", encoding="ascii") as file:
            file.write(folder)
    try:
        os.rename(f"{place}/new", f"{place}/old")
    except OSError as error:
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY}:
            return Check(name, passed=True)
        reason = f"it failed otherwise: {error.strerror}"
        return Check(name, passed=False, detail=reason, remedy=_UNFIT)
    reason = "it replaced it: two publishers would both win"
    return Check(name, passed=False, detail=reason, remedy=_UNFIT)


def _create_excludes(place: str) -> Check:
    name = "exclusive create"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(f"{place}/exclusive", flags))
    try:
        os.close(os.open(f"{place}/exclusive", flags))
    except FileExistsError:
        return Check(name, passed=True)
    reason = "a second O_EXCL create worked"
    return Check(name, passed=False, detail=reason, remedy=_UNFIT)


def _flushes(place: str) -> Check:
    try:
        descriptor = os.open(f"{place}/flushed", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(descriptor, b"x")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(place)
    except OSError as error:
        remedy = "what is published could be lost with the power; mend the disk, or use another"
        return Check("fsync", passed=False, detail=str(error.strerror), remedy=remedy)
    return Check("fsync", passed=True)


def _flock_excludes(place: str) -> Check:
    detail = "locks do not exclude here: data stays right, but work may be done twice"
    first = os.open(f"{place}/lock", os.O_RDWR | os.O_CREAT)
    second = os.open(f"{place}/lock", os.O_RDWR)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Check("flock excludes", passed=True, required=False)
    except OSError as error:
        detail = f"{detail} ({error.strerror})"
    finally:
        os.close(first)
        os.close(second)
    remedy = "on NFS 3 mount without nolock and run the lock daemon, or mount by NFS 4.1"
    return Check("flock excludes", passed=False, detail=detail, required=False, remedy=remedy)


def _space(root: str) -> Check:
    there = os.statvfs(root)
    free = there.f_bavail * there.f_frsize
    text = f"{free / 2**30:.1f} GiB, {there.f_favail} inodes"
    # Some file systems have no fixed number of inodes, and say 0 of 0.
    enough = free > 2**30 and (there.f_favail > 1000 or not there.f_files)
    remedy = "publishes will fail soon; free space: neuron-store gc --dry-run --max-size ..."
    return Check(
        "free space",
        passed=enough,
        detail=text,
        required=False,
        remedy="" if enough else remedy,
    )

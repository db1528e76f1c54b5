"""What the rename tiers measure of the file system they lie on."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from typing import TYPE_CHECKING

from neuron_store.abc import Check, TierReport, measure_latency
from neuron_store_backends._aside import remove_tree
from neuron_store_backends._staging import sync_directory

if TYPE_CHECKING:
    from neuron_store_backends.renaming import RenamingStore

__all__ = ["probe"]


def probe(store: RenamingStore, root: str) -> TierReport:
    """Measure inside `<root>/.staging/` only, and leave nothing there."""
    place = f"{root}/.staging/probe.{uuid.uuid4().hex}"
    try:
        os.makedirs(place)
    except OSError as error:
        refused = Check("writable", passed=False, detail=f"{root}: {error.strerror}")
        return TierReport(store.location, (refused,), measure_latency(store))
    try:
        checks = (
            Check("writable", passed=True),
            _rename_refuses(place),
            _create_excludes(place),
            _flushes(place),
            _flock_excludes(place),
            _space(root),
        )
    finally:
        remove_tree(place)
    return TierReport(store.location, checks, measure_latency(store))


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
        return Check(name, passed=False, detail=f"it failed otherwise: {error.strerror}")
    return Check(name, passed=False, detail="it replaced it: two publishers would both win")


def _create_excludes(place: str) -> Check:
    name = "exclusive create"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(f"{place}/exclusive", flags))
    try:
        os.close(os.open(f"{place}/exclusive", flags))
    except FileExistsError:
        return Check(name, passed=True)
    return Check(name, passed=False, detail="a second O_EXCL create worked")


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
        return Check("fsync", passed=False, detail=str(error.strerror))
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
    return Check("flock excludes", passed=False, detail=detail, required=False)


def _space(root: str) -> Check:
    there = os.statvfs(root)
    free = there.f_bavail * there.f_frsize
    text = f"{free / 2**30:.1f} GiB, {there.f_favail} inodes"
    return Check("free space", passed=free > 2**30, detail=text, required=False)

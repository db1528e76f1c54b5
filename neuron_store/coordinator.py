"""Single flight: of all processes that want an artifact, one compiles it and all get it.

Locks only save work. With every lock a no-op the worst case is work done twice, since the artifact
that counts is the one that publish kept.
"""

from __future__ import annotations

import atexit
import collections
import errno
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_store._once import warn_once
from neuron_store.abc import ArtifactStore, HolderNote, KeyLock, Lease, Publication, TierAnswer
from neuron_store.artifact import MAX_RECORD_BYTES, RECORD_NAME, Artifact, load_record
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactMismatch,
    ArtifactNotFound,
    CacheMiss,
    CompileError,
    CompileTimeout,
    InvalidArtifact,
    InvalidRecord,
    NeuronStoreError,
    TierError,
    TiersUnavailable,
)
from neuron_store.failures import forget_failures, note_failure, read_failures
from neuron_store.fleet import Fleet
from neuron_store.keeping import publish_or_keep
from neuron_store.neuron_layout import MARK_NAME, completion_mark, list_files, neff_name
from neuron_store.policy import CompilePolicy
from neuron_store.streams import create_file, open_regular, write_all
from neuron_store.tier_health import Stalled, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.job import CompileJob

__all__ = ["CompileCoordinator"]

_log = logging.getLogger(__name__)

# A look at the artifact costs microseconds and a try of the lock a millisecond, so a waiter looks
# often and tries seldom: both together stay well under one per cent of a core.
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.06
_LOCK_PAUSE = 1.0


class CompileCoordinator:
    """Gets artifacts from a store, and compiles what no tier has.

    Safe from threads, and under `fork` and `spawn`, for any number of processes on one local tier.
    """

    def __init__(self, store: ArtifactStore, policy: CompilePolicy | None = None) -> None:
        """Args: store, with a local side; policy, what environment and settings file say if None.

        Raises:
            ConfigError: the settings contradict each other or do not parse.
        """
        self._store = store
        self._policy = CompilePolicy.load() if policy is None else policy
        self._fleet: Fleet | None = None
        if self._policy.fleet_lease:
            self._fleet = Fleet(store, self._policy.lease_ttl, self._policy.timeout)
        self._counts: collections.Counter[str] = collections.Counter()
        self._guard = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """What this coordinator did: `hits`, `waited`, `fetched`, `compiled`, `failed`."""
        with self._guard:
            return dict(self._counts)

    def get_or_compile(self, job: CompileJob) -> Path:
        """The artifact's directory on this node.

        Raises:
            CompileError: the compile failed; equal in every process that waited for it.
            CompileTimeout: another process has been compiling for too long.
            CacheMiss: no tier has it, and compiling is forbidden.
            ArtifactMismatch: what is stored under the key was made from other components.
            TierError: the local tier cannot be used.
        """
        if self._policy.disabled:
            return self._compile_alone(job)
        path = self._hit(job)
        if path is not None:
            self._count("hits")
            return path
        path, unpromoted = self._miss(job)
        if unpromoted and self._policy.promote:
            self._promote(job.key)
        return path

    # -- the flow -------------------------------------------------------------------------------

    def _hit(self, job: CompileJob) -> Path | None:
        """A look at the local tier: no lock, no write."""
        try:
            path = self._store.path_of(job.key)
        except ArtifactCorrupt as error:
            warn_once(_log, error)
            return None
        if path is not None and job.components:
            _check_components(path, job)
        return path

    def _miss(self, job: CompileJob) -> tuple[Path, bool]:
        """The artifact, and whether it was compiled here and nobody promoted it."""
        lock = self._store.lock(job.key, self._policy.timeout)
        arrived_with = {failure.id for failure in read_failures(lock, job.key)}
        failed: list[CompileError] = []
        began = last_try = time.monotonic()
        until = began + self._policy.timeout
        pause, waited = _FIRST_PAUSE, False
        while True:
            now = time.monotonic()
            if not waited or now - last_try >= _LOCK_PAUSE:
                last_try = now
                if self._acquire(lock):
                    try:
                        led = self._lead(job, lock, arrived_with, failed, until, waited=waited)
                    finally:
                        lock.release()
                    if led is not None:
                        return led
                    # This compile failed, and another attempt is left: for whoever comes first.
                    continue
            waited = True
            path = self._hit(job)
            if path is not None:
                self._count("waited")
                return path, False
            self._raise_shared_failure(job, lock, arrived_with)
            if now - began > self._policy.timeout:
                raise self._timed_out(job, lock.holder())
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _acquire(self, lock: KeyLock) -> bool:
        try:
            return lock.try_acquire()
        except TierError as error:
            # No locks on this file system: then everybody leads, and publish keeps one.
            _log.warning("%s; going on without the lock, work may be done twice", error)
            return True

    def _lead(
        self,
        job: CompileJob,
        lock: KeyLock,
        arrived_with: set[str],
        failed: list[CompileError],
        until: float,
        *,
        waited: bool,
    ) -> tuple[Path, bool] | None:
        """Holding the lock: look again, fetch, else compile. None: failed, one more try is left."""
        path = self._hit(job)
        if path is not None:
            self._count("waited" if waited else "hits")
            return path, False
        self._raise_shared_failure(job, lock, arrived_with)
        path, answers = self._fetch(job)
        if path is not None:
            self._count("fetched")
            return path, False
        if self._policy.require_hit:
            raise CacheMiss(job.key, answers)
        leased = False
        try:
            if self._fleet is None:
                path = self._compile(job)
            else:
                fetched, path, leased = self._once_in_the_fleet(job, self._fleet, until)
                if fetched:
                    self._count("fetched")
                    return path, False
        except CompileError as error:
            self._count("failed")
            failed.append(error)
            note_failure(lock, job.key, error)
            self._raise_shared_failure(job, lock, arrived_with)
            if len(failed) >= self._policy.attempts or error.permanent:
                # The note could not be written; what this process knows by itself still counts.
                raise
            _log.warning("%s; one more attempt follows", error)
            return None
        self._count("compiled")
        forget_failures(lock)
        return path, not leased

    def _once_in_the_fleet(
        self, job: CompileJob, fleet: Fleet, until: float
    ) -> tuple[bool, Path, bool]:
        """Whether another node's artifact was fetched, the path, and whether it had a lease."""
        look = True
        while True:
            with fleet.turn(job.key, until, look=look) as turn:
                if turn.arrived or turn.lease is not None:
                    # The last holder may have promoted between our last look and its release.
                    path, _ = self._fetch(job)
                    if path is not None:
                        return True, path, False
                if turn.arrived:
                    # It is there and cannot be had. Only the lease is worth waiting for now.
                    look = False
                    continue
                path = self._compile(job)
                if turn.lease is not None:
                    self._promote_leased(job.key, turn.lease)
                return False, path, turn.lease is not None

    def _fetch(self, job: CompileJob) -> tuple[Path | None, Sequence[TierAnswer]]:
        try:
            path = self._store.get(job.key)
        except (ArtifactNotFound, TiersUnavailable) as error:
            answers = error.answers or (TierAnswer(self._store.location, "miss"),)
            _log.info("miss of %s: %s", job.key, "; ".join(map(str, answers)))
            return None, answers
        except (ArtifactCorrupt, TierError) as error:
            # Trouble with a tier never breaks a compile.
            warn_once(_log, error)
            return None, (TierAnswer(self._store.location, "error", error.reason),)
        if job.components:
            _check_components(path, job)
        return path, ()

    def _raise_shared_failure(self, job: CompileJob, lock: KeyLock, arrived_with: set[str]) -> None:
        mine = [f for f in read_failures(lock, job.key) if f.id not in arrived_with]
        if mine and (len(mine) >= self._policy.attempts or mine[-1].error.permanent):
            raise mine[-1].error

    # -- the compile ----------------------------------------------------------------------------

    def _compile(self, job: CompileJob) -> Path:
        """Compile in scratch space, publish locally.

        Raises:
            CompileError: it failed; nothing is left of it.
        """
        scratch = self._store.scratch(job.key)
        keep = False
        try:
            artifact = _run(job, scratch)
            kept = publish_or_keep(self._store, artifact, scratch)
            keep = kept.in_scratch
            if kept.answer is Publication.CONFLICT:
                _log.warning("%s was published meanwhile with other content; using that", job.key)
            return kept.path
        finally:
            if not keep:
                shutil.rmtree(scratch, ignore_errors=True)

    def _compile_alone(self, job: CompileJob) -> Path:
        """The cache is switched off: nothing is read or written but a directory of our own."""
        scratch = Path(tempfile.mkdtemp(prefix="neuron_store-"))
        atexit.register(_remove_own, scratch, os.getpid())
        try:
            _run(job, scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self._count("compiled")
        return scratch

    def _promote_leased(self, key: str, lease: Lease) -> None:
        """Before the lease is given back, or those who wait would compile after all."""
        if not lease.held():
            # The first writer would win all the same; the next holder promotes its own.
            _log.warning("%s: not promoted, since the lease was lost meanwhile", key)
            return
        to = None if self._policy.promote else lease.location
        beats = itertools.count()
        try:
            # An upload may take as long as it is large. A tier that bears no heartbeat is mute.
            bounded(
                lambda: self._promote(key, to),
                self._policy.lease_ttl,
                lambda: next(beats) if lease.held() else None,
            )
        except Stalled:
            _log.warning("%s: promote given up; %s does not answer", key, lease.location)

    def _promote(self, key: str, to: str | None = None) -> None:
        promote = getattr(self._store, "promote_in_passing", None) or getattr(
            self._store, "promote", None
        )
        if promote is None:
            return
        try:
            promote(key, to)
        except NeuronStoreError as error:
            _log.warning("%s", error)

    def _timed_out(self, job: CompileJob, holder: HolderNote | None) -> CompileTimeout:
        age = None
        if holder is not None and holder.timestamp is not None:
            age = max(0.0, time.time() - holder.timestamp)
        return CompileTimeout(
            job.key,
            self._policy.timeout,
            holder=str(holder) if holder is not None else "an unknown process",
            host=holder.host if holder is not None else "an unknown host",
            age=age,
        )

    def _count(self, what: str) -> None:
        with self._guard:
            self._counts[what] += 1


def _run(job: CompileJob, scratch: Path) -> Artifact:
    try:
        job.compile(scratch)
        return _describe(job, scratch)
    except CompileError:
        raise
    except InvalidArtifact as error:
        raise CompileError(job.key, str(error), permanent=True) from error
    except SystemExit as error:
        # A rank must not end because a compiler's library thinks that it is a program.
        raise CompileError(job.key, f"the compile called sys.exit({error.code!r})") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            # A second attempt would find the same disk.
            reason = f"disk full: {error} (working in {scratch}); free space there"
            raise CompileError(job.key, reason, permanent=True) from error
        raise CompileError(job.key, f"{type(error).__name__}: {error}") from error


def _describe(job: CompileJob, directory: Path) -> Artifact:
    """The record of what a compile left behind.

    Raises:
        CompileError: it left nothing.
        InvalidArtifact: it left a link, a device, or an unsafe name.
    """
    neff = directory / neff_name(job.key)
    if neff.is_file() and not (directory / MARK_NAME).exists():
        # The Neuron stack takes an entry without its mark for unfinished.
        descriptor = create_file(directory / MARK_NAME)
        try:
            write_all(descriptor, completion_mark(neff.stat().st_size))
        finally:
            os.close(descriptor)
    files = list_files(directory, job.key)
    if not files:
        raise CompileError(job.key, "the compile left no file behind")
    names = [f.name for f in files]
    executable = job.executable
    if executable is None:
        named = [n for n in names if n.startswith(f"graph_{job.key}.")]
        executable = named[0] if named else names[0] if len(names) == 1 else None
    elif executable not in names:
        raise CompileError(job.key, f"the compile left no {executable}")

    def component(name: str) -> str | None:
        value = job.components.get(name)
        return value if isinstance(value, str) else None

    return Artifact(
        key=job.key,
        files=tuple(files),
        executable=executable,
        compiler=component("compiler"),
        compiler_version=component("compiler_version"),
        components=job.components,
        host=job.host,
    )


def _check_components(path: Path, job: CompileJob) -> None:
    """Refuse an artifact that was made from something else, whatever its key says.

    An entry of the Neuron stack has no record, and so nothing to compare.
    """
    try:
        descriptor = open_regular(path / RECORD_NAME)
    except OSError:
        return
    try:
        data = os.read(descriptor, MAX_RECORD_BYTES)
    finally:
        os.close(descriptor)
    try:
        artifact, _ = load_record(data, key=job.key, source=str(path))
    except InvalidRecord:
        return
    stored: Mapping[str, Any] = artifact.components
    if not stored or stored == job.components:
        return
    different = {
        name: (stored.get(name), job.components.get(name))
        for name in {*stored, *job.components}
        if stored.get(name) != job.components.get(name)
    }
    raise ArtifactMismatch(job.key, str(path), different)


def _remove_own(path: Path, pid: int) -> None:
    # A forked child runs the parent's exit handlers; the directory is the parent's.
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)

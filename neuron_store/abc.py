"""The interface of a tier: all that coordinator, emitter and command line may see of one.

It imports no implementation. What holds for every implementation, tested for each of them by
`neuron_store.testing.ArtifactStoreContract`:

* A reader sees a whole artifact or none.
* Among concurrent publishers of one key exactly one gets CREATED.
* A CREATED that was returned outlives its publisher.
* A crash at any step leaves nothing visible, and nothing that blocks the next publisher.
* Only errors of `neuron_store.errors` escape, the original as `__cause__`.
* Instances may be used from several threads, and in a child after fork.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import time
from typing import TYPE_CHECKING, BinaryIO, Self

import attrs

from neuron_store.artifact import check_key
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ConfigError,
    NeuronStoreError,
    TierError,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from neuron_store.artifact import Artifact
    from neuron_store.collector import Collector

__all__ = [
    "MAX_LEASE_TTL",
    "MIN_LEASE_TTL",
    "ArtifactStore",
    "Check",
    "KeyLock",
    "Lease",
    "Publication",
    "Speed",
    "TierAnswer",
    "TierReport",
    "check_ttl",
]

# Seconds. Below, a busy machine misses its own heartbeats; above, the dead block for too long.
MIN_LEASE_TTL = 0.1
MAX_LEASE_TTL = 900.0


class Publication(enum.Enum):
    """What became of a publish. Losing a race is a value, not an error."""

    CREATED = "created"
    """The artifact is there now and was not before."""
    PRESENT = "present"
    """The same bytes were there already."""
    CONFLICT = "conflict"
    """Other bytes are there; the first writer's stay."""
    REPAIRED = "repaired"
    """An incomplete or damaged entry was replaced by this artifact."""


@attrs.frozen
class TierAnswer:
    """What one tier said when it was asked for a key."""

    location: str
    outcome: str
    """`hit`, `miss`, `error`, `corrupt`, `refused` (nobody trusted vouches for what is there) or
    `skipped` (left alone after repeated trouble)."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.outcome}" + (f" ({self.detail})" if self.detail else "")


@attrs.frozen
class Check:
    """One measured property of a tier."""

    name: str
    passed: bool
    detail: str = ""
    required: bool = True
    """False where a failure costs only work or speed, never a wrong artifact."""
    remedy: str = ""
    """Where it failed: what that means for whoever runs the tier, and what to do."""


@attrs.frozen
class Speed:
    """What writing and reading back a few MiB took."""

    size: int
    """Bytes written, and read back."""
    write_seconds: float
    """Until they were safe: flushed, or the store's word for it."""
    read_seconds: float


@attrs.frozen
class TierReport:
    """What `ArtifactStore.probe` measured."""

    location: str
    checks: tuple[Check, ...]
    latency: float | None = None
    """Seconds for one small look-up, the median of a few."""
    speed: Speed | None = None
    """None where nothing could, or may, be written."""

    @property
    def refused(self) -> str | None:
        """Why the tier must not be used, or None when it is fit."""
        failed = [c for c in self.checks if c.required and not c.passed]
        return "; ".join(f"{c.name}: {c.detail or 'failed'}" for c in failed) or None


class KeyLock(abc.ABC):
    """Node-local exclusion for one key. It only saves work; correctness never rests on it.

    Re-entrant for the thread that holds it. Used as a context manager it waits up to the timeout
    it was made with, then raises `LockTimeout`.
    """

    @abc.abstractmethod
    def try_acquire(self) -> bool:
        """Take the lock if it is free; never waits."""

    @abc.abstractmethod
    def acquire(self) -> None:
        """Wait for the lock; raises `LockTimeout`."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give the lock back. The lock file stays: unlinking it would let two holders in."""

    @abc.abstractmethod
    def holder(self) -> HolderNote | None:
        """Who says that it holds the lock, for messages only; None when nobody says so."""

    @abc.abstractmethod
    def read_failures(self) -> bytes:
        """What `write_failures` left for the processes that wait; empty when nothing."""

    @abc.abstractmethod
    def write_failures(self, data: bytes) -> None:
        """Leave word of failed compiles to those who wait; empty takes it away. Best effort."""

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@attrs.frozen
class HolderNote:
    """What the holder of a key's lock wrote about itself."""

    pid: int
    process_name: str
    host: str
    timestamp: float | None
    """Unix seconds when the lock was taken."""
    rank: str | None = None

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank is not None else ""
        return f"pid {self.pid} ({self.process_name}{rank})"


class Lease(abc.ABC):
    """A fleet-wide claim on a key, kept alive by a heartbeat. Losing it costs work, no more.

    It belongs to the process that took it: in a forked child `held` is False and `release` does
    nothing.
    """

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """The location of the tier that gave it, where those who wait look for the artifact."""

    @abc.abstractmethod
    def held(self) -> bool:
        """Whether this holder can still be sure of it (asks the tier when in doubt).

        Asked before a promote: a holder that was stopped, and overtaken meanwhile, finds out here.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give the lease back; idempotent, harmless when it was lost, and never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ArtifactStore(abc.ABC):
    """One place that keeps artifacts. See the module's docstring for the guarantees."""

    # -- abstract -----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Where it is, for logs and the manifest; never holds a secret."""

    @abc.abstractmethod
    def find(self, key: str) -> Artifact | None:
        """The complete artifact's record, or None when the tier answered that it has none.

        Raises:
            InvalidKey: before anything is asked.
            ArtifactCorrupt: a committed entry is provably damaged.
            TierError: the tier could not answer. An error is never a miss.
        """

    @abc.abstractmethod
    def open_file(self, key: str, name: str) -> BinaryIO:
        """One file of an artifact as a binary stream, which the caller closes.

        The bytes are not checked against the digest; `fetch` does that.

        Raises:
            ArtifactNotFound: no such artifact, or no such file in it.
            ArtifactCorrupt: the record names the file, and it is not there.
            TierError: the tier could not answer.
        """

    @abc.abstractmethod
    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        """Create the artifact from the directory `source`: all or nothing, first writer wins.

        Args:
            artifact: the record; digests it has are checked while the bytes are copied, digests
                it lacks are computed.
            source: a directory that holds every file the record names.
            consume: the directory may be taken over by a rename instead of copied.

        Raises:
            ArtifactCorrupt: `source` does not hold what the record says.
            InvalidArtifact: `source` holds a symbolic link or a device under a recorded name.
            TierError: the tier could not be written. Nothing torn is visible: of the attempt either
                nothing, or, where only the last flush or reply failed, the whole artifact.
        """

    @abc.abstractmethod
    def keys(self) -> Iterator[str]:
        """Keys of complete artifacts only: no staging, locks or strangers' files."""

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Remove an artifact; False when there was none. Hides it before it frees it.

        Of several who delete at once, one is told True; where the store's own delete has no
        condition (object stores), those who all saw it may all be.
        """

    # -- concrete: may be overridden for speed, never for meaning -------------------------------

    def damaged(self) -> Iterator[str]:
        """Keys of committed entries that `keys` leaves out because their damage shows at a look.

        For whoever checks or repairs the tier. None by default: `keys` then lists such entries
        too, and `find` raises for them.
        """
        return iter(())

    @property
    def name(self) -> str:
        """Short name for tables and counters; `location` unless the URL gave one."""
        return self.location

    def fetch(self, key: str, into: Path) -> Artifact:
        """Write the artifact's files into the empty directory `into`, every digest checked.

        Raises:
            InvalidArtifact: `into` is not an empty directory; nothing in it was touched.
            ArtifactNotFound: there is none.
            ArtifactCorrupt: a file is missing, short or wrong; `into` may hold some files then.
            TierError: the tier could not answer.
        """
        from neuron_store.streams import (  # noqa: PLC0415  (the interface imports no implementation)
            copy_stream,
            require_empty,
        )

        check_key(key)
        require_empty(into)
        artifact = self.find(key)
        if artifact is None:
            raise ArtifactNotFound(key, self.location)
        files = []
        for file in artifact.files:
            with self.open_file(key, file.name) as stream, self._trouble("fetch", key):
                files.append(copy_stream(stream, into, file, key=key, location=self.location))
        return attrs.evolve(artifact, files=tuple(files))

    def fetch_accepted(
        self, key: str, into: Path, accept: Callable[[Artifact], object]
    ) -> Artifact:
        """As `fetch`, once `accept` has let the record pass; what that raises ends it.

        No byte is brought before. The bytes that come are those of a record that was accepted.
        """
        artifact = self.find(check_key(key))
        if artifact is None:
            raise ArtifactNotFound(key, self.location)
        accept(artifact)
        artifact = self.fetch(key, into)
        # Somebody may have put another one there since.
        accept(artifact)
        return artifact

    def endorse(self, artifact: Artifact) -> bool:
        """Add the artifact's signatures to its record here, where that says the same.

        Nothing else of the record changes, and no reader sees it half written.

        Returns:
            True when the record carries them all now; False when there is none, or one that says
            something else than `artifact`.

        Raises:
            ArtifactCorrupt: the entry is damaged.
            TierError: the tier could not be written.
            Unsupported: this kind of tier cannot; publishing signed artifacts is all it does.
        """
        del artifact
        raise Unsupported("endorse", type(self).__name__, "publish the artifact signed")

    def set_aside(self, key: str) -> bool:
        """Take a damaged entry from its name, so that the next publish finds the place free.

        It is read once more before that. False: it is whole, gone, or in use; or this kind of
        tier leaves it in place, and a publish repairs it there.
        """
        check_key(key)
        return False

    def verify(self, key: str) -> Artifact:
        """Read every byte and check every digest. Raises as `fetch` does."""
        from neuron_store.streams import digest_stream  # noqa: PLC0415  (the interface imports no implementation)

        artifact = self.find(key)
        if artifact is None:
            raise ArtifactNotFound(key, self.location)
        files = []
        for file in artifact.files:
            with self.open_file(key, file.name) as stream, self._trouble("verify", key):
                size, digest = digest_stream(stream)
            if size != file.size or (file.sha256 or digest) != digest:
                raise ArtifactCorrupt(
                    key,
                    self.location,
                    f"{file.name} has {size} bytes, sha256 {digest}; "
                    f"the record says {file.size}, {file.sha256}",
                )
            files.append(attrs.evolve(file, sha256=digest))
        return attrs.evolve(artifact, files=tuple(files))

    @contextlib.contextmanager
    def _trouble(self, operation: str, key: str | None = None) -> Iterator[None]:
        """Let only our own errors escape."""
        try:
            yield
        except NeuronStoreError:
            raise
        except OSError as error:
            reason = self._reason(error, operation)
            raise TierError(self.location, operation, reason, key=key, code=error.errno) from error

    def _reason(self, error: OSError, operation: str) -> str:
        """What the system's error means here, in words."""
        del operation
        return str(error)

    def path_of(self, key: str) -> Path | None:
        """The artifact's own directory where the tier is one, so that a hit copies nothing.

        None when there is no complete artifact, or when the tier keeps no directories.
        """
        check_key(key)
        return None

    def locate(self, key: str) -> tuple[Path, Artifact] | None:
        """`path_of` and `find` in one look; None where `path_of` gives none."""
        path = self.path_of(key)
        artifact = None if path is None else self.find(key)
        return None if path is None or artifact is None else (path, artifact)

    def get(self, key: str) -> Path:
        """The artifact as a local directory, brought there if need be.

        Raises:
            ArtifactNotFound: every tier that was asked answered, and none has it.
            TierError: a tier could not answer, and no other has it.
            Unsupported: there is no local side.
        """
        path = self.path_of(key)
        if path is not None:
            return path
        if self.find(key) is None:
            raise ArtifactNotFound(key, self.location)
        raise Unsupported("get", type(self).__name__, "it keeps no local directories")

    def lock(self, key: str, timeout: float) -> KeyLock:
        """Node-local exclusion for one key; `timeout` in seconds is what `acquire` waits."""
        del key, timeout
        raise Unsupported("lock", type(self).__name__, "only the local tier locks keys")

    def scratch(self, key: str) -> Path:
        """A new private directory on the artifacts' own file system; the caller removes it."""
        del key
        raise Unsupported("scratch", type(self).__name__, "only the local tier has scratch space")

    def lease(self, key: str, ttl: float) -> Lease:
        """Claim a key among all users of the tier. One look, which never waits.

        At most one live holder has it. Whoever wants it calls again and again, on the same store: a
        call that finds the lease as this process saw it for a whole ttl before, by its own
        monotonic clock, takes it over, and of several such calls exactly one does. No wall clock is
        asked.

        Args:
            key: what is claimed; no artifact need be there.
            ttl: seconds without a heartbeat after which others may take the lease over, from
                0.1 to 900.

        Raises:
            LeaseHeld: somebody else holds it, or held it less than a ttl ago.
            Unsupported: this kind of tier has no leases, or its store cannot keep them honestly.
            TierError: the tier could not answer.
            ConfigError: the ttl is out of bounds.
        """
        del key, ttl
        raise Unsupported("lease", type(self).__name__)

    def collector(self) -> Collector:
        """What `neuron_store.collecting` needs to free space here. Raises `Unsupported`."""
        raise Unsupported("gc", type(self).__name__)

    def probe(self) -> TierReport:
        """Measure the tier, inside its own prefix only, and leave nothing behind."""
        from neuron_store.probing import probe_store  # noqa: PLC0415  (only doctor needs it)

        return probe_store(self)

    def preload(self) -> None:  # noqa: B027  (most tiers have nothing to load)
        """Import and read what using the store takes, so that forked children need not each do so.

        Nothing is asked of the tier, and no error is raised: whoever uses it is told.
        """

    def close(self) -> None:  # noqa: B027  (most tiers have nothing to close)
        """Give up connections and handles. The store may be used again afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"


def check_ttl(seconds: float, what: str = "lease ttl") -> float:
    """Return a lease's time to live, or raise `ConfigError` naming `what`."""
    if not MIN_LEASE_TTL <= seconds <= MAX_LEASE_TTL:
        raise ConfigError(
            f"{what}={seconds!r} is not a number of seconds from {MIN_LEASE_TTL:g} to "
            f"{MAX_LEASE_TTL:g}"
        )
    return seconds


def measure_latency(store: ArtifactStore, rounds: int = 5) -> float:
    """Median seconds of a look-up of a key that is not there."""
    spent = []
    for _ in range(rounds):
        began = time.perf_counter()
        store.find("latency-probe")
        spent.append(time.perf_counter() - began)
    return sorted(spent)[len(spent) // 2]

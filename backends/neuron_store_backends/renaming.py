"""Publishing by rename: for the local disk and for POSIX mounts (NFS, FSx for Lustre, EFS).

An artifact is assembled in `<root>/.staging/`, flushed to the disk, its record written last, and
the directory renamed to `<root>/<key>/`. The rename refuses a non-empty target, which is what
makes the first writer win; the record is always inside before it, and the final path is never
made beforehand. Files are read and written with the operating system's own calls and not through
fsspec: it cannot refuse links, flush, or read through a directory's descriptor.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, TypeVar

import attrs

from neuron_store.abc import ArtifactStore, Publication
from neuron_store.artifact import (
    Artifact,
    check_artifact,
    check_file_name,
    check_key,
    is_key,
    new_write_id,
)
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ConfigError,
    NeuronStoreError,
    TierError,
)
from neuron_store.neuron_layout import check_loadable, foreign_fault
from neuron_store.steps import step
from neuron_store.streams import copy_stream, empty_directory, require_empty
from neuron_store_backends._aside import claim_and_move, put_back, remove_tree, tree_facts
from neuron_store_backends._entry import Entry
from neuron_store_backends._file_trouble import PASSING, TRIES, again, as_corrupt, remedy
from neuron_store_backends._modes import make_container
from neuron_store_backends._staging import Staging, sync_directory, with_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from neuron_store.abc import TierReport
    from neuron_store.artifact import ArtifactFile
    from neuron_store.collector import Collector
    from neuron_store.tier_url import TierURL

__all__ = ["RenamingStore"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Told of the file that is written, while another is read.
_WRITTEN_SIDE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EEXIST})
_READING = frozenset({"find", "open", "fetch", "verify", "list"})
# NFS may answer from its negative cache for acdirmin seconds (30 by default) that a name is not
# there which a rename has just found taken.
_VISIBLE_SECONDS = 40.0


class RenamingStore(ArtifactStore):
    """A directory of artifacts on one file system."""

    scheme = "posix"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        name: str | None = None,
        read_only: bool = False,
    ) -> None:
        """Args: root, an absolute directory, made when first written to; name, for tables;
        read_only, damage that a fetch finds is left in place.
        """
        text = os.path.expanduser(os.fspath(root))
        if not os.path.isabs(text) or "\0" in text:
            raise ConfigError(f"tier root {text[:200]!r} is not an absolute path")
        self._root = os.path.normpath(text)
        self._name = name
        self._read_only = read_only

    @classmethod
    def from_url(cls, url: TierURL) -> Self:
        """Open the tier that a URL names."""
        url.checked_options(())
        return cls(url.address, name=url.name, read_only=url.read_only)

    @property
    def root(self) -> Path:
        """The directory whose entries are the artifacts."""
        return Path(self._root)

    @property
    def location(self) -> str:
        return self._root

    @property
    def name(self) -> str:
        return self._name or self.location

    # -- reading --------------------------------------------------------------------------------

    def find(self, key: str) -> Artifact | None:
        check_key(key)
        with self._trouble("find", key):
            try:
                return self._read(key, lambda _entry, artifact: artifact)
            except ArtifactNotFound:
                return None

    def path_of(self, key: str) -> Path | None:
        found = self.locate(key)
        return None if found is None else found[0]

    def locate(self, key: str) -> tuple[Path, Artifact] | None:
        artifact = self.find(key)
        return None if artifact is None else (Path(self._root, key), artifact)

    def open_file(self, key: str, name: str) -> BinaryIO:
        check_key(key)
        check_file_name(name)

        def use(entry: Entry, artifact: Artifact) -> BinaryIO:
            if artifact.file(name) is None:
                raise ArtifactNotFound(key, f"{self.location} (it has no file {name})")
            return os.fdopen(entry.open(name), "rb")

        with self._trouble("open", key):
            return self._read(key, use)

    def fetch(self, key: str, into: Path) -> Artifact:
        return self.fetch_accepted(key, into, lambda _artifact: None)

    def fetch_accepted(
        self, key: str, into: Path, accept: Callable[[Artifact], object]
    ) -> Artifact:
        check_key(key)

        def use(entry: Entry, artifact: Artifact) -> Artifact:
            accept(artifact)
            files = []
            empty_directory(into)
            for file in artifact.files:
                step("fetch.copy")
                with os.fdopen(entry.open(file.name), "rb", buffering=0) as stream:
                    files.append(self._copy(stream, into, file, key))
            return attrs.evolve(artifact, files=tuple(files))

        require_empty(into)
        step("fetch.look")
        with self._trouble("fetch", key):
            try:
                return self._read(key, use)
            except ArtifactCorrupt:
                # Read twice before a shared entry is taken from everybody: the first time the
                # network or this machine may have been at fault.
                try:
                    return self._read(key, use)
                except ArtifactCorrupt:
                    self._try_quarantine(key)
                    raise

    def _copy(self, stream: BinaryIO, into: Path, file: ArtifactFile, key: str) -> ArtifactFile:
        try:
            return copy_stream(stream, into, file, key=key, location=self.location)
        except OSError as error:
            # A full disk is the one that is written to, and no fault of this tier.
            if error.errno in _WRITTEN_SIDE:
                raise TierError(
                    str(into), "write", remedy(error), key=key, code=error.errno
                ) from error
            raise

    def _read(self, key: str, use: Callable[[Entry, Artifact], _T]) -> _T:
        """What `use` makes of the artifact as it is now; again when it is exchanged meanwhile.

        Raises:
            ArtifactNotFound: there is no complete artifact.
            ArtifactCorrupt: there is one, and it is damaged.
            OSError: the file system's own trouble.
        """
        for attempt in range(TRIES):
            try:
                with Entry(self._root, key) as entry:
                    try:
                        artifact = entry.artifact()
                        if artifact is not None:
                            return use(entry, artifact)
                        if entry.is_at_path():
                            break
                    except (ArtifactCorrupt, FileNotFoundError) as error:
                        # A directory that was taken away under us is being emptied.
                        if entry.is_at_path():
                            raise as_corrupt(error, key, self.location) from error
            except FileNotFoundError:
                break
            except NotADirectoryError:
                # A file under the key's name is no entry; one in the way of the root is trouble.
                self._require_root()
                break
            except OSError as error:
                if error.errno not in PASSING or attempt == TRIES - 1:
                    raise
                time.sleep(0.01 * 2**attempt)
        raise ArtifactNotFound(key, self.location)

    def verify(self, key: str) -> Artifact:
        try:
            artifact = super().verify(key)
        except ArtifactNotFound:
            if fault := self._fault(key):
                raise ArtifactCorrupt(key, self.location, fault) from None
            raise
        with self._trouble("verify", key):
            if artifact.compiler == "neuronx-cc":
                check_loadable(Path(self._root, key), key, self.location)
        return artifact

    def keys(self) -> Iterator[str]:
        return (name for name, good in self._entries() if good)

    def damaged(self) -> Iterator[str]:
        return (name for name, good in self._entries() if not good)

    def _entries(self) -> Iterator[tuple[str, bool]]:
        """Each committed entry's key, and whether it is complete and can be read here."""
        with self._trouble("list"):
            try:
                names = again(lambda _attempt: os.listdir(self._root))
            except FileNotFoundError:
                return
        for name in filter(is_key, names):
            try:
                if self.find(name) is not None:
                    yield name, True
                elif self._fault(name) is not None:
                    yield name, False
            except ArtifactCorrupt:
                yield name, False
            except TierError as error:
                # A newer release's record, or an entry that this user may not read, is one
                # entry's trouble: whoever looks at the key is told. Anything else is the tier's.
                cause = error.__cause__
                if isinstance(cause, OSError) and cause.errno not in {errno.EACCES, errno.EPERM}:
                    raise
                yield name, False

    def _fault(self, key: str) -> str | None:
        """Why a directory that holds no artifact is a damaged one; None: it never was one."""
        return foreign_fault(Path(self._root, key), key)

    # -- writing --------------------------------------------------------------------------------

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        artifact = attrs.evolve(check_artifact(artifact), write_id=new_write_id())
        with self._trouble("publish", artifact.key):

            def once(attempt: int) -> Publication:
                if attempt and self._is_ours(artifact):
                    # The try before got as far as the rename, and then met trouble that passed.
                    sync_directory(self._root)
                    return Publication.CREATED
                return self._publish_once(artifact, source, consume=consume)

            return again(once)

    def _publish_once(self, artifact: Artifact, source: Path, *, consume: bool) -> Publication:
        step("publish.look")
        judged = self._judge(artifact, source)
        if judged in {Publication.PRESENT, Publication.CONFLICT}:
            return judged
        with Staging(self._root, artifact, source, consume=consume) as staging:
            return self._commit(staging)

    def _judge(self, artifact: Artifact, source: Path) -> Publication | None:
        """What a publish meets: PRESENT, CONFLICT, REPAIRED (it must repair), None (nothing)."""
        key = artifact.key
        try:
            existing = self.find(key)
        except ArtifactCorrupt:
            return Publication.REPAIRED
        if existing is None:
            return Publication.REPAIRED if os.path.lexists(f"{self._root}/{key}") else None
        try:
            theirs = existing if existing.has_digests else self.verify(key)
        except ArtifactCorrupt:
            # Looked at again before it is taken away: it may be another one by then.
            return Publication.REPAIRED
        except ArtifactNotFound:
            return self._judge(artifact, source)
        mine = with_digests(artifact, source)
        return Publication.PRESENT if theirs.same_bytes(mine) else Publication.CONFLICT

    def _commit(self, staging: Staging) -> Publication:
        artifact, final = staging.artifact, f"{self._root}/{staging.artifact.key}"
        repaired = False
        deadline = time.monotonic() + _VISIBLE_SECONDS
        passing = 0
        while True:
            repaired = repaired or os.path.lexists(final)
            step("publish.rename")
            try:
                staging.rename(final)
            except OSError as error:
                # A retransmitted NFS rename reports an error though the first one worked.
                if self._is_ours(artifact):
                    staging.settled()
                elif error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                    answer = self._make_way(artifact, staging.path, deadline)
                    if answer is not None:
                        return answer
                    repaired = True
                    continue
                elif error.errno in PASSING and passing < TRIES:
                    passing += 1
                    time.sleep(0.02 * 2**passing)
                    continue
                else:
                    raise
            step("publish.renamed")
            sync_directory(self._root)
            step("publish.done")
            return Publication.REPAIRED if repaired else Publication.CREATED

    def _make_way(self, artifact: Artifact, staged: str, deadline: float) -> Publication | None:
        """Something is at the final path: the publish's answer, or None when it may try again."""
        judged = self._judge(artifact, Path(staged))
        if judged in {Publication.PRESENT, Publication.CONFLICT}:
            return judged
        if judged is Publication.REPAIRED:
            self._quarantine(artifact.key)
            return None
        # The rename met something that a look-up does not see: gone since, or hidden by NFS.
        if artifact.key not in os.listdir(self._root):
            return None
        if time.monotonic() > deadline:
            raise TierError(
                self.location,
                "publish",
                f"the name is taken, and what is there stayed invisible for {_VISIBLE_SECONDS:g} s",
                key=artifact.key,
            )
        time.sleep(0.25)
        return None

    def _is_ours(self, artifact: Artifact) -> bool:
        try:
            there = self.find(artifact.key)
        except NeuronStoreError:
            return False
        return there is not None and there.write_id == artifact.write_id

    def _quarantine(self, key: str) -> bool:
        """Take a damaged entry away from its name. Whoever else does it, or repairs it, is fine."""
        final = f"{self._root}/{key}"
        target = f"{make_container(self._root, '.quarantine')}/{key}.{uuid.uuid4().hex}"

        try:
            entry = Entry(self._root, key)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            # A stranger's file or link under a key's name: one rename takes the name itself.
            try:
                os.rename(final, target)
            except FileNotFoundError:
                return False
            return True
        with entry:
            return claim_and_move(entry, target, still=lambda: self._damaged(entry))

    def _try_quarantine(self, key: str) -> None:
        if self._read_only:
            return
        try:
            self._quarantine(key)
        except (OSError, NeuronStoreError) as error:
            _log.warning("damaged artifact %s at %s stays in place: %s", key, self.location, error)

    def _damaged(self, entry: Entry) -> bool:
        try:
            if entry.artifact() is None:
                return True
            self.verify(entry.key)
        except (ArtifactCorrupt, ArtifactNotFound):
            return True
        return False

    def set_aside(self, key: str) -> bool:
        check_key(key)
        with self._trouble("set aside", key):
            return self._quarantine(key)

    def endorse(self, artifact: Artifact) -> bool:
        from neuron_store_backends._endorsing import endorse_entry  # noqa: PLC0415  (rarely needed)

        with self._trouble("endorse", artifact.key):
            try:
                with Entry(self._root, check_artifact(artifact).key) as entry:
                    return endorse_entry(entry, artifact)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def delete(self, key: str) -> bool:
        return self.take_away(check_key(key)) is not None

    def take_away(
        self,
        key: str,
        still: Callable[[Entry], bool] | None = None,
        regret: Callable[[], bool] | None = None,
    ) -> int | None:
        """Hide an artifact, then free it; bytes freed, None when there is none, or it stays.

        Args:
            key: checked.
            still: asked right before it is hidden: shall it go?
            regret: asked right after it was hidden: shall it come back?
        """
        with self._trouble("delete", key):
            return again(lambda _attempt: self._take_away_once(key, still, regret))

    def _take_away_once(
        self,
        key: str,
        still: Callable[[Entry], bool] | None,
        regret: Callable[[], bool] | None,
    ) -> int | None:
        target = f"{self._root}/.staging/{key}.{uuid.uuid4().hex}"
        try:
            with Entry(self._root, key) as entry:
                if not self._holds_artifact(entry):
                    return None
                make_container(self._root, ".staging")
                step("delete.hide")
                wanted = still or (lambda _entry: True)
                gone = claim_and_move(entry, target, still=lambda: wanted(entry))
                if gone and regret is not None and regret() and put_back(entry, target):
                    return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not gone:
            return None
        step("delete.free")
        size = _freed(target)
        remove_tree(target)
        return size

    def holds_artifact(self, key: str) -> bool:
        """Whether a committed entry, be it damaged, is under the key."""
        with self._trouble("find", key):
            try:
                with Entry(self._root, key) as entry:
                    return self._holds_artifact(entry)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def collector(self) -> Collector:
        from neuron_store_backends._collecting_renaming import RenamingCollector  # noqa: PLC0415  (gc only)

        return RenamingCollector(self)

    def _require_root(self) -> None:
        """Raise `OSError` when the root is there and is no directory."""
        try:
            kind = os.stat(self._root).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(kind):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._root)

    @staticmethod
    def _holds_artifact(entry: Entry) -> bool:
        # An incomplete directory without a record may be a compile of the Neuron stack at work.
        try:
            return entry.artifact() is not None
        except ArtifactCorrupt:
            return True

    # -- the rest -------------------------------------------------------------------------------

    def probe(self) -> TierReport:
        from neuron_store_backends._probe_renaming import probe  # noqa: PLC0415  (only doctor)

        with self._trouble("probe"):
            return probe(self, self._root)

    def _reason(self, error: OSError, operation: str) -> str:
        return remedy(error, reading=operation in _READING)


def _freed(path: str) -> int:
    try:
        return tree_facts(path).size
    except OSError as error:
        # It is hidden already, which is what counts; the size is only told.
        _log.debug("size of %s unknown: %s", path, error)
        return 0

"""Assembling an artifact beside the published ones, until one rename shows it to everybody."""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from neuron_store.artifact import RECORD_NAME, Artifact, ArtifactFile, dump_record
from neuron_store.errors import ArtifactCorrupt
from neuron_store.steps import step
from neuron_store.streams import (
    copy_stream,
    create_file,
    digest_stream,
    open_regular,
    start_writing,
    write_all,
)
from neuron_store_backends._aside import remove_tree
from neuron_store_backends._modes import (
    group_of,
    level_directory,
    level_file,
    make_container,
    umask,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Staging", "sync_directory", "with_digests"]

_FLUSHED_AT_ONCE = 64
_TRIES = 3

_log = logging.getLogger(__name__)


class Staging:
    """`<root>/.staging/<key>.<uuid>`, filled and flushed, the record written last.

    Left without a rename it is removed; a source that was taken over is put back, so that a
    compile's result survives a publish that failed.
    """

    def __init__(self, root: str, artifact: Artifact, source: Path, *, consume: bool) -> None:
        self._root = root
        self._source = source
        self._consume = consume
        self._taken = False
        self._done = False
        # What is written here are the files themselves.
        self.artifact = artifact.without_forms()
        self.path = f"{root}/.staging/{artifact.key}.{uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        try:
            self._fill()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clean()

    def rename(self, final: str) -> None:
        """The commit. Refuses a non-empty target with EEXIST or ENOTEMPTY."""
        os.rename(self.path, final)
        self._done = True

    def settled(self) -> None:
        """The rename turned out to have worked although it reported an error."""
        self._done = True

    def _fill(self) -> None:
        make_container(self._root, ".staging")
        with _Flush() as flush:
            step("stage.files")
            if not (self._consume and self._take(flush)):
                self._copy(flush)
            step("stage.record")
            descriptor = create_file(f"{self.path}/{RECORD_NAME}")
            try:
                write_all(descriptor, dump_record(self.artifact))
            finally:
                flush.add(descriptor)
            step("stage.sync")
            flush.finish()
        folders = {os.path.dirname(f"{self.path}/{f.name}") for f in self.artifact.files}
        for folder in [*(folders - {self.path}), self.path]:
            sync_directory(folder)
        step("stage.ready")

    def _take(self, flush: _Flush) -> bool:
        try:
            os.rename(self._source, self.path)
        except OSError as error:
            if error.errno == errno.EXDEV:
                return False
            # NFS reports an error for a rename that worked, when its reply was lost; the name
            # being random, what lies there is the source.
            if not os.path.lexists(self.path):
                raise
        self._taken = True
        _remove_record(self.path)
        files, mask, group = list[ArtifactFile](), umask(), group_of(os.path.dirname(self.path))
        for file in self.artifact.files:
            descriptor = _open_source(self.path, file, self.artifact.key)
            try:
                level_file(descriptor, mask, group)
                if file.sha256 is None:
                    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as stream:
                        files.append(attrs.evolve(file, sha256=digest_stream(stream)[1]))
                else:
                    files.append(file)
            finally:
                flush.add(descriptor)
        if not self.artifact.has_digests:
            self.artifact = attrs.evolve(self.artifact, files=tuple(files))
        folders = {os.path.dirname(f.name) for f in files} - {""}
        parts = {"/".join(f.split("/")[:n]) for f in folders for n in range(1, f.count("/") + 2)}
        for path in [self.path, *(f"{self.path}/{part}" for part in sorted(parts))]:
            level_directory(path, mask, group)
        return True

    def _copy(self, flush: _Flush) -> None:
        try:
            os.mkdir(self.path)
        except FileExistsError:
            # The name is random: our own, a retransmitted NFS request having met its own success.
            if os.listdir(self.path):
                raise
        files = []
        for file in self.artifact.files:
            step("stage.copy")
            descriptor = _open_source(str(self._source), file, self.artifact.key)
            with os.fdopen(descriptor, "rb", buffering=0) as stream:
                files.append(
                    copy_stream(
                        stream,
                        Path(self.path),
                        file,
                        key=self.artifact.key,
                        location=str(self._source),
                        early=True,
                    )
                )
        for file in files:
            flush.add(open_regular(f"{self.path}/{file.name}"))
        self.artifact = attrs.evolve(self.artifact, files=tuple(files))

    def _clean(self) -> None:
        if self._done:
            return
        if self._taken:
            self._put_back()
        elif os.path.lexists(self.path):
            remove_tree(self.path)

    def _put_back(self) -> None:
        for attempt in range(_TRIES):
            try:
                _remove_record(self.path)
                os.rename(self.path, self._source)
            except OSError as error:
                if not os.path.lexists(self.path):
                    return  # it worked, and the reply was lost
                if attempt == _TRIES - 1:
                    _log.warning("%s stays at %s: %s", self._source, self.path, error)
                time.sleep(0.02 * 2**attempt)
            else:
                return


def _remove_record(directory: str) -> None:
    try:
        os.unlink(f"{directory}/{RECORD_NAME}")
    except FileNotFoundError:
        pass


def _open_source(directory: str, file: ArtifactFile, key: str) -> int:
    try:
        descriptor = open_regular(f"{directory}/{file.name}")
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactCorrupt(key, directory, f"{file.name} is missing") from None
    size = os.fstat(descriptor).st_size
    if size != file.size:
        os.close(descriptor)
        raise ArtifactCorrupt(
            key, directory, f"{file.name} has {size} bytes, the record says {file.size}"
        )
    return descriptor


def with_digests(artifact: Artifact, source: Path) -> Artifact:
    """The artifact with every digest known, computed from `source` where it was not.

    Raises:
        ArtifactCorrupt: a file is missing or of another size.
    """
    if artifact.has_digests:
        return artifact
    files = []
    for file in artifact.files:
        if file.sha256 is None:
            descriptor = _open_source(str(source), file, artifact.key)
            with os.fdopen(descriptor, "rb", buffering=0) as stream:
                files.append(attrs.evolve(file, sha256=digest_stream(stream)[1]))
        else:
            files.append(file)
    return attrs.evolve(artifact, files=tuple(files))


class _Flush:
    """Flushes files to the disk, up to 64 of them on their way at once.

    One after another, each fsync would wait for its own data and for a commit of the file system's
    journal; so the later ones find most of their work done by the first.
    """

    def __init__(self) -> None:
        self._open: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def add(self, descriptor: int) -> None:
        """Have the disk begin on a file; its descriptor is closed here."""
        self._open.append(descriptor)
        start_writing(descriptor, 0, 0)
        if len(self._open) == _FLUSHED_AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Return when everything that was added is on the disk. Raises `OSError`."""
        for descriptor in self._open:
            os.fsync(descriptor)
        self._close()

    def _close(self) -> None:
        while self._open:
            os.close(self._open.pop())


def sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for directories; their rename is synchronous.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)

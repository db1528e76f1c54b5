"""One artifact's directory, read through a descriptor.

The descriptor stays on the same directory when somebody renames it away meanwhile, so a reader
sees one whole artifact; and nothing is ever followed through a symbolic link, since the directory
may lie on a tier that others write to.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from neuron_store.artifact import MAX_RECORD_BYTES, RECORD_NAME, Artifact, load_record
from neuron_store.errors import ArtifactCorrupt, InvalidRecord, TierError
from neuron_store.neuron_layout import foreign_artifact, has_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Entry"]

_T = TypeVar("_T")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Entry:
    """The directory `<root>/<key>` as it is now. A context manager; holds one descriptor."""

    def __init__(self, root: str, key: str) -> None:
        """Open it.

        Raises:
            FileNotFoundError: there is nothing of that name.
            NotADirectoryError: a file or a symbolic link is there.
            OSError: as `os.open`.
        """
        self.key = key
        self.path = f"{root}/{key}"
        try:
            self.fd = os.open(self.path, _DIRECTORY)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotADirectoryError(errno.ENOTDIR, "a symbolic link", self.path) from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.fd)

    def artifact(self) -> Artifact | None:
        """The complete artifact in it, checked as far as names and sizes go; None: incomplete.

        Raises:
            ArtifactCorrupt: there is a record, and it or the files are damaged.
            OSError: the directory cannot be read.
        """
        data = self.record_bytes()
        if data is None:
            return self._foreign()
        try:
            artifact, _ = load_record(data, key=self.key, source=f"{self.path}/{RECORD_NAME}")
        except InvalidRecord as error:
            if error.newer:
                raise TierError(self.path, "read", error.reason, key=self.key) from error
            raise ArtifactCorrupt(self.key, self.path, str(error)) from error
        for file in artifact.files:
            try:
                found = self._stat(file.name)
            except (FileNotFoundError, NotADirectoryError):
                raise ArtifactCorrupt(self.key, self.path, f"{file.name} is missing") from None
            if not stat.S_ISREG(found.st_mode):
                raise ArtifactCorrupt(self.key, self.path, f"{file.name} is not a regular file")
            if found.st_size != file.size:
                raise ArtifactCorrupt(
                    self.key,
                    self.path,
                    f"{file.name} has {found.st_size} bytes, the record says {file.size}",
                )
        return artifact

    def record_bytes(self) -> bytes | None:
        """The record as it is stored, or None when there is none.

        Raises:
            ArtifactCorrupt: a link or a device lies in its place, or it is too large to read.
        """
        try:
            descriptor = os.open(RECORD_NAME, _FILE, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:
                raise ArtifactCorrupt(
                    self.key, self.path, f"{RECORD_NAME} is a link or a device"
                ) from None
            raise
        try:
            data = os.read(descriptor, 1 << 16)
            if len(data) == 1 << 16:
                pieces = [data]
                while (piece := os.read(descriptor, 1 << 20)) and sum(
                    map(len, pieces)
                ) <= MAX_RECORD_BYTES:
                    pieces.append(piece)
                data = b"".join(pieces)
        finally:
            os.close(descriptor)
        return data

    def open(self, name: str) -> int:
        """A descriptor of a regular file of the artifact; `name` was checked by the record.

        Raises:
            FileNotFoundError: it is not there.
            ArtifactCorrupt: a link, a device or a pipe lies in its place.
        """
        try:
            descriptor = self._at(name, lambda leaf, fd: os.open(leaf, _FILE, dir_fd=fd))
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}:
                raise ArtifactCorrupt(
                    self.key, self.path, f"{name} is a link or a device; refused"
                ) from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ArtifactCorrupt(self.key, self.path, f"{name} is not a regular file; refused")
        return descriptor

    def is_at_path(self) -> bool:
        """Whether the directory still lies under its name."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        here = os.fstat(self.fd)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def is_empty(self) -> bool:
        """Whether nothing at all is in it."""
        with os.scandir(self.fd) as entries:
            return next(entries, None) is None

    def _stat(self, name: str) -> os.stat_result:
        if "/" not in name:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return self._at(name, lambda leaf, fd: os.stat(leaf, dir_fd=fd, follow_symlinks=False))

    def _at(self, name: str, call: Callable[[str, int], _T]) -> _T:
        """Run `call` on the last component, having walked there without following a link."""
        *folders, leaf = name.split("/")
        opened: list[int] = []
        try:
            for folder in folders:
                opened.append(os.open(folder, _DIRECTORY, dir_fd=opened[-1] if opened else self.fd))
            return call(leaf, opened[-1] if opened else self.fd)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _foreign(self) -> Artifact | None:
        path = Path(self.path)
        artifact = foreign_artifact(path, self.key)
        # The look went by path: what it saw counts only while that is still this directory, and
        # no record appeared (then the record has the word, next time).
        if artifact is not None and (not self.is_at_path() or has_record(path)):
            return None
        return artifact

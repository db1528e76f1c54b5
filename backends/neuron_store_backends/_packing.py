"""The files of one publish that are worth compressing, compressed into a private directory."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from neuron_store.artifact import StoredForm
from neuron_store.errors import TierError
from neuron_store.steps import step
from neuron_store.streams import create_below, write_all
from neuron_store_backends._encoding import ZSTD, zstd_module
from neuron_store_backends._streaming import checked_pieces, open_source

if TYPE_CHECKING:
    from types import TracebackType

    from neuron_store.artifact import ArtifactFile

__all__ = ["LEVEL", "SMALLEST", "WORTH", "Packing"]

_log = logging.getLogger(__name__)

LEVEL = 3
SMALLEST = 16 << 10
"""Bytes. Below, the request costs more than what is saved of it."""
WORTH = 0.8
"""Of its size is what a file must shrink below, else it is sent as it is."""
_SAMPLE = 1 << 20
_PIECE = 1 << 20


class Packing:
    """Compresses files of one source directory, each once. `with` removes what it made.

    A process that is killed leaves its directory, `neuron_store-zstd.*`, to the system's cleaning
    of temporary files.
    """

    def __init__(self, source: Path, key: str) -> None:
        self._source = source
        self._key = key
        self._folder: Path | None = None
        self._forms: dict[str, StoredForm | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def folder(self) -> Path:
        """Where the compressed files are, by their names in the artifact."""
        if self._folder is None:
            # Not `TemporaryDirectory`: a forked child that ends would take it from its parent.
            self._folder = Path(tempfile.mkdtemp(prefix="neuron_store-zstd."))
        return self._folder

    def packed(self, file: ArtifactFile) -> ArtifactFile:
        """The file in the form in which it is best stored.

        Raises:
            ArtifactCorrupt, InvalidArtifact: it is not what the record says.
            TierError: it cannot be read.
        """
        if file.name not in self._forms:
            self._forms[file.name] = self._judge(file)
        return attrs.evolve(file, stored=self._forms[file.name])

    def _judge(self, file: ArtifactFile) -> StoredForm | None:
        if file.size < SMALLEST:
            return None
        try:
            zstd = zstd_module()
        except ImportError:  # asked for only to bring back what others compressed
            return None
        step("conditional.judge")
        sample = self._sample(file)
        if len(zstd.compress(sample, level=LEVEL)) >= WORTH * len(sample):
            return None
        step("conditional.compress")
        try:
            return self._compress(zstd, file)
        except TierError:
            raise
        except OSError as error:
            # A full disk here need not keep the artifact from where it is wanted.
            _log.warning("%s is sent as it is, not compressed: %s", file.name, error)
            return None

    def _sample(self, file: ArtifactFile) -> bytes:
        descriptor = open_source(self._source, file, self._key)
        try:
            return os.pread(descriptor, _SAMPLE, 0)
        except OSError as error:
            reason = f"{file.name}: {error.strerror}"
            raise TierError(
                str(self._source), "read", reason, key=self._key, code=error.errno
            ) from error
        finally:
            os.close(descriptor)

    def _compress(self, zstd: Any, file: ArtifactFile) -> StoredForm | None:
        """The whole file, piece by piece; given up where it turns out not to be worth it."""
        frame, digest, size = zstd.ZstdCompressor(level=LEVEL), hashlib.sha256(), 0
        descriptor = create_below(self.folder, file.name)
        try:
            pieces = checked_pieces(self._source, file, self._key, _PIECE)
            for data in _compressed(frame, pieces):
                size += len(data)
                if size >= WORTH * file.size:
                    break
                digest.update(data)
                write_all(descriptor, data)
            else:
                return StoredForm(ZSTD, size, digest.hexdigest())
        finally:
            os.close(descriptor)
        (self.folder / file.name).unlink()
        return None


def _compressed(frame: Any, pieces: Any) -> Any:
    for piece in pieces:
        yield frame.compress(piece)
    yield frame.flush()

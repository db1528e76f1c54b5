"""Reading back files that an object store keeps compressed: Zstandard, one frame for each file.

What lies in a bucket is not trusted. Whatever a frame claims, no more comes out of it than the
record's size and one byte, and it gets no more memory than a window of 128 MiB.
"""

from __future__ import annotations

import functools
import importlib
import io
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from neuron_store.artifact import BUNDLE
from neuron_store.errors import ArtifactCorrupt, MissingExtra, TierError

if TYPE_CHECKING:
    from neuron_store.artifact import ArtifactFile

__all__ = ["ZSTD", "decoded", "require_decoder", "require_zstd", "zstd_module"]

ZSTD = "zstd"
_PACKAGE = "backports.zstd"
# The library's own default, 2 ** 27 bytes, said here so that it stays; level 3 needs 2 MiB.
_WINDOW_LOG = 27
_TAKEN = 1 << 20
_GIVEN = 1 << 20


@functools.cache
def zstd_module() -> Any:
    """The standard library's module, or its backport; raises `ImportError` without either."""
    try:
        return importlib.import_module("compression.zstd")
    except ImportError:  # before Python 3.14, or built without the library
        return importlib.import_module(_PACKAGE)


def require_zstd(location: str) -> None:
    """Raise `MissingExtra` where a tier that is to compress cannot."""
    try:
        zstd_module()
    except ImportError as error:
        raise MissingExtra(f"tier {location} with compress={ZSTD}", "zstd", _PACKAGE) from error


def require_decoder(file: ArtifactFile, *, key: str, location: str) -> None:
    """Refuse what cannot be decoded here. It may be fine, so it is no damage.

    Raises:
        TierError: the encoding is unknown, or its module is not installed.
    """
    if file.stored is None or file.stored.encoding == BUNDLE:
        return
    if file.stored.encoding != ZSTD:
        reason = (
            f"{file.name} is stored as {file.stored.encoding}, which this release cannot read: "
            "upgrade neuron-store"
        )
        raise TierError(location, "read", reason, key=key)
    try:
        zstd_module()
    except ImportError as error:
        reason = (
            f"{file.name} is stored as {ZSTD}, and {_PACKAGE} is not installed; "
            "run: pip install 'neuron-store[zstd]'"
        )
        raise TierError(location, "read", reason, key=key) from error


def decoded(stream: BinaryIO, file: ArtifactFile, *, key: str, location: str) -> BinaryIO:
    """The file's own bytes, from the stream of those that are stored; closes it when closed."""
    return cast("BinaryIO", _Decoded(stream, file, key, location))


class _Decoded(io.RawIOBase):
    """A frame that is read; raises `ArtifactCorrupt` where it is none, or is cut off."""

    def __init__(self, stream: BinaryIO, file: ArtifactFile, key: str, location: str) -> None:
        super().__init__()
        self._stream = stream
        self._name = file.name
        self._left = file.size + 1
        self._key = key
        self._location = location
        zstd = zstd_module()
        self._error = zstd.ZstdError
        self._frame = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        )

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        room = min(len(view), self._left, _GIVEN)
        if not room:
            return 0
        while not self._frame.eof:
            data = self._decode(room)
            if data:
                view[: len(data)] = data
                self._left -= len(data)
                return len(data)
        if self._frame.unused_data or self._stream.read(1):
            raise self._corrupt("goes on after the end of its frame")
        return 0

    def _decode(self, room: int) -> bytes:
        taken = b""
        if self._frame.needs_input:
            taken = self._stream.read(_TAKEN)
            if not taken:
                raise self._corrupt("is cut off")
        try:
            data: bytes = self._frame.decompress(taken, max_length=room)
        except self._error as error:
            raise self._corrupt(f"cannot be decoded ({error})") from error
        except MemoryError as error:
            raise self._corrupt("asks for more memory than there is") from error
        return data

    def _corrupt(self, what: str) -> ArtifactCorrupt:
        return ArtifactCorrupt(self._key, self._location, f"{self._name} as stored {what}")

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()

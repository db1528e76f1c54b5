"""What the payload of an artifact consists of: a file to an object, or many small ones in one.

A bundle is small files, one after the other in the order of the record. It is no larger than one
piece, so that one request sends it, and one brings it. Its name is the digest of its files' names,
sizes and digests: whoever reads the record can tell where each file begins, and that no other
files were meant.
"""

from __future__ import annotations

import hashlib
import io
import mmap
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import attrs

from neuron_store.artifact import BUNDLE, ArtifactFile, StoredForm
from neuron_store.errors import ArtifactCorrupt, InvalidRecord
from neuron_store.streams import copy_stream, digest_stream
from neuron_store_backends._objects import PIECE, Parcel
from neuron_store_backends._streaming import Outgoing
from neuron_store_backends._trouble import Missing, Vanished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = [
    "FEWEST",
    "LARGEST",
    "bundled",
    "digest_parcel",
    "parcels",
    "read_parcel",
    "receive_parcel",
    "require_whole_bundles",
    "whole",
]

LARGEST = 1 << 20
"""Bytes of a file that is bundled. Above, a request of its own costs little beside its bytes."""
FEWEST = 5
"""Files that are bundled at all. Fewer are brought side by side, each at its own name: that is
what an entry of the Neuron stack has."""


def bundled(files: Sequence[ArtifactFile]) -> Sequence[ArtifactFile]:
    """The files in the form in which they are stored best; one that has a form keeps it."""
    small = [f for f in files if f.stored is None and f.size <= LARGEST]
    if len(small) < FEWEST:
        return files
    groups, room = [list[ArtifactFile]()], PIECE
    for file in small:
        if file.size > room:
            groups.append([])
            room = PIECE
        groups[-1].append(file)
        room -= file.size
    forms: dict[str, StoredForm] = {}
    for group in groups:
        if len(group) > 1:
            forms |= dict.fromkeys((f.name for f in group), _form(group))
    return [attrs.evolve(f, stored=forms.get(f.name, f.stored)) for f in files]


def _form(group: Sequence[ArtifactFile]) -> StoredForm:
    # With the names: two bundles of equal bytes are two, and whoever exchanges the names of two
    # files in a record has another bundle.
    lines = "".join(f"{f.name} {f.size} {f.sha256}\n" for f in group)
    return StoredForm(
        BUNDLE, sum(f.size for f in group), hashlib.sha256(lines.encode()).hexdigest()
    )


def _grouped(files: Iterable[ArtifactFile]) -> Iterable[tuple[ArtifactFile, ...]]:
    """Files that lie in one object, each time."""
    groups: dict[ArtifactFile, list[ArtifactFile]] = {}
    for file in files:
        groups.setdefault(file.at_rest, []).append(file)
    return map(tuple, groups.values())


def parcels(root: str, files: Iterable[ArtifactFile]) -> list[Parcel]:
    """The objects in which `files` lie below `root`. All files of a bundle must be among them."""
    found = []
    for group in _grouped(files):
        lies = group[0].at_rest
        found.append(Parcel(f"{root}/{lies.sha256}/{lies.name}", group))
    return found


def require_whole_bundles(files: Iterable[ArtifactFile], source: str) -> None:
    """Refuse a record whose bundles cannot be what it says.

    Raises:
        InvalidRecord: sizes or digests of a bundle's files do not make up its name; or it is
            larger than any that this release makes and could hold.
    """
    for group in _grouped(f for f in files if f.stored and f.stored.encoding == BUNDLE):
        form = group[0].stored
        if form is not None and form.size > PIECE:
            reason = f"a bundle of {form.size} bytes; this release reads {PIECE}: upgrade"
            raise InvalidRecord(f"{reason} neuron-store", source=source, newer=True)
        if form != _form(group):
            names = ", ".join(f.name for f in group[:3])
            raise InvalidRecord(f"the bundle of {names} is not made of them", source=source)


def read_parcel(source: Path, parcel: Parcel, key: str) -> tuple[bytes | mmap.mmap, str | None]:
    """The bytes of an object of one piece that is published, and their digest where it is known.

    Raises what `Outgoing` does.
    """
    if not parcel.is_bundle or not parcel.size:
        file = parcel.files[0]
        with Outgoing(source, file, key) as outgoing:
            return outgoing.piece(0, max(file.size, 1)), outgoing.finish()
    # Each file is read into its place. The pages come into being as they are written, by the
    # kernel and beside other threads; joining bytes, or an array that is zeroed first, takes
    # longer than reading and digesting them.
    together = mmap.mmap(-1, parcel.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    end = 0
    with memoryview(together) as view:
        for file in parcel.files:
            start, end = end, end + file.size
            with Outgoing(source, file, key) as outgoing, view[start:end] as place:
                outgoing.fill(place)
                outgoing.finish()
    # No second digest of what was digested file by file.
    return together, None


def receive_parcel(
    stream: Callable[[], BinaryIO], parcel: Parcel, into: Path, *, key: str, location: str
) -> None:
    """Write the files of an object below `into`, sizes and digests checked.

    Args:
        stream: opens the object, decoded.
        parcel: the object.
        into: directory of the artifact.
        key: named in errors.
        location: named in errors: where the object is.

    Raises:
        Missing: there is no such object any more; says which.
        ArtifactCorrupt: it has other bytes.
        TierError: it cannot be read.
        OSError: the disk's own trouble.
    """
    try:
        with stream() as opened:
            for file in parcel.files:
                copy_stream(_part(opened, parcel, file), into, file, key=key, location=location)
    except (Missing, Vanished) as error:
        raise Missing(parcel.path) from error


def digest_parcel(stream: BinaryIO, parcel: Parcel, *, key: str, location: str) -> None:
    """Check the bytes of every file.

    Args:
        stream: the object's, decoded.
        parcel: the object.
        key: named in errors.
        location: named in errors.

    Raises:
        ArtifactCorrupt: they are not those of the record.
    """
    for file in parcel.files:
        size, digest = digest_stream(_part(stream, parcel, file), file.size)
        if (size, digest) != (file.size, file.sha256):
            reason = (
                f"{file.name} has {size} bytes, sha256 {digest}; "
                f"the record says {file.size}, {file.sha256}"
            )
            raise ArtifactCorrupt(key, location, reason)


def whole(stream: BinaryIO, file: ArtifactFile, *, key: str, location: str) -> BinaryIO:
    """The stream of one file, which raises `ArtifactCorrupt` where it ends before its time."""

    def short(got: int) -> ArtifactCorrupt:
        return ArtifactCorrupt(key, location, f"{file.name} has {got} of {file.size} bytes")

    return cast("BinaryIO", _Part(stream, file.size, short, close=True))


def _part(stream: BinaryIO, parcel: Parcel, file: ArtifactFile) -> BinaryIO:
    """What the next file of the object is read from."""
    return cast("BinaryIO", _Part(stream, file.size)) if parcel.is_bundle else stream


class _Part(io.RawIOBase):
    """The next bytes of a stream, as a stream that ends after them."""

    def __init__(
        self,
        stream: BinaryIO,
        size: int,
        short: Callable[[int], Exception] | None = None,
        *,
        close: bool = False,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._size = self._left = size
        self._short = short
        self._close = close

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")[: self._left]
        if not view:
            return 0
        count: int = self._stream.readinto(view)  # type: ignore[attr-defined]  # every one has it
        self._left -= count
        if not count and self._short is not None:
            raise self._short(self._size - self._left)
        return count

    def close(self) -> None:
        if self._close and not self.closed:
            self._stream.close()
        super().close()

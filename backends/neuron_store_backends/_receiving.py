"""Payload on its way in: as it lies in the store, or decoded as it streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO

from neuron_store.streams import copy_stream
from neuron_store_backends._encoding import decoded, require_decoder
from neuron_store_backends._trouble import Missing, Vanished

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from neuron_store.artifact import ArtifactFile
    from neuron_store_backends._objects import Objects

__all__ = ["open_payload", "receive_payload"]

# Each may hold 4 MiB and its frame's window.
_DECODERS = 8


def open_payload(objects: Objects, path: str, file: ArtifactFile, *, key: str) -> BinaryIO:
    """The file's own bytes as a stream, in which damage may be found while it is read.

    Raises:
        Missing: there is no such object.
        TierError: it cannot be read, or not be decoded here.
    """
    require_decoder(file, key=key, location=objects.location)
    stream = objects.open(path, file.at_rest.size, key=key)
    if file.stored is None:
        return stream
    return decoded(stream, file, key=key, location=objects.location)


def receive_payload(
    objects: Objects, targets: Mapping[str, ArtifactFile], into: Path, *, key: str
) -> Sequence[ArtifactFile]:
    """`Objects.receive`, and beside it what is decoded on its way; in any order."""
    plain = [target for target in targets.items() if target[1].stored is None]
    encoded = [target for target in targets.items() if target[1].stored is not None]
    if not encoded:
        return objects.receive(plain, into, key=key)
    for _, file in encoded:
        # Before anything is asked for: in vain, all of it.
        require_decoder(file, key=key, location=objects.location)

    def one(target: tuple[str, ArtifactFile]) -> ArtifactFile:
        path, file = target
        try:
            with open_payload(objects, path, file, key=key) as stream:
                return copy_stream(stream, into, file, key=key, location=objects.location)
        except (Missing, Vanished) as error:
            raise Missing(path) from error

    # No thread writes any more when the pool is left, whatever failed.
    with ThreadPoolExecutor(min(_DECODERS, len(encoded))) as pool:
        decoding = [pool.submit(one, target) for target in encoded]
        try:
            received = list(objects.receive(plain, into, key=key))
            return received + [future.result() for future in decoding]
        finally:
            for future in decoding:
                future.cancel()

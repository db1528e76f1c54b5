"""Payload on its way in: as it lies in the store, or decoded as it streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO

from neuron_store_backends._encoding import decoded, require_decoder
from neuron_store_backends._parcels import receive_parcel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from neuron_store_backends._objects import Objects, Parcel

__all__ = ["open_payload", "receive_payload"]

# Each may hold 4 MiB and its frame's window.
_DECODERS = 8


def open_payload(objects: Objects, parcel: Parcel, *, key: str) -> BinaryIO:
    """The bytes of its files as a stream, in which damage may be found while it is read.

    Raises:
        Missing: there is no such object.
        TierError: it cannot be read, or not be decoded here.
    """
    file = parcel.files[0]
    require_decoder(file, key=key, location=objects.location)
    stream = objects.open(parcel.path, parcel.size, key=key)
    if not parcel.is_encoded:
        return stream
    return decoded(stream, file, key=key, location=objects.location)


def receive_payload(objects: Objects, parcels: Sequence[Parcel], into: Path, *, key: str) -> None:
    """`Objects.receive`, and beside it what is decoded on its way."""
    plain = [parcel for parcel in parcels if not parcel.is_encoded]
    encoded = [parcel for parcel in parcels if parcel.is_encoded]
    if not encoded:
        objects.receive(plain, into, key=key)
        return
    for parcel in encoded:
        # Before anything is asked for: in vain, all of it.
        require_decoder(parcel.files[0], key=key, location=objects.location)

    def one(parcel: Parcel) -> None:
        receive_parcel(
            lambda: open_payload(objects, parcel, key=key),
            parcel,
            into,
            key=key,
            location=objects.location,
        )

    # No thread writes any more when the pool is left, whatever failed.
    with ThreadPoolExecutor(min(_DECODERS, len(encoded))) as pool:
        decoding = [pool.submit(one, parcel) for parcel in encoded]
        try:
            objects.receive(plain, into, key=key)
            for future in decoding:
                future.result()
        finally:
            for future in decoding:
                future.cancel()

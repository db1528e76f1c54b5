"""A small reader of the protobuf wire format over a seekable stream.

Fields that nobody asks for are skipped by their length and never read. The bytes are not trusted:
every length is checked, and the number of fields bounded.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

from neuron_store.errors import HloError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BYTES", "MAX_FIELDS", "VARINT", "Span", "Spans", "Wire"]

MAX_FIELDS = 1_000_000
"""Wire fields that are looked at in one module; the largest real ones have some 100,000."""
VARINT, _FIXED64, BYTES, _FIXED32 = 0, 1, 2, 5
_WINDOW = 64 << 10

# Where a message's bytes lie. Several ranges: a message that occurs twice is merged, which for
# the wire format means that its occurrences are read one after the other.
Span = tuple[int, int]
Spans = list[Span]


class Wire:
    """The stream through one window; counts fields, so that hostile bytes cost bounded time."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        try:
            self.size = stream.seek(0, io.SEEK_END)
        except io.UnsupportedOperation:
            raise HloError("the stream cannot seek; read the file into memory first") from None
        self.base = 0
        self.window = b""
        self.fields = 0

    def load(self, position: int) -> None:
        """Bring the window to `position`; it then holds at least one field's header."""
        self.stream.seek(position)
        parts, wanted = [], min(_WINDOW, self.size - position)
        while wanted > 0:
            part = self.stream.read(wanted)
            if not part:
                raise HloError("the file became shorter while it was read")
            parts.append(part)
            wanted -= len(part)
        self.base, self.window = position, b"".join(parts)

    def read(self, spans: Spans, limit: int = 1 << 20) -> bytes:
        """The bytes themselves; for names, which are short."""
        total = sum(end - start for start, end in spans)
        if total > limit:
            raise HloError(f"a name of {total} bytes")
        parts = []
        for start, end in spans:
            position = start
            while position < end:
                if not self.base <= position < self.base + len(self.window):
                    self.load(position)
                part = self.window[position - self.base : end - self.base]
                parts.append(part)
                position += len(part)
        return b"".join(parts)

    def varint(self, position: int, end: int) -> tuple[int, int]:
        """A varint's value, as unsigned 64 bits, and where it ends."""
        offset = position - self.base
        # One byte within the window: nearly every time.
        if 0 <= offset < len(self.window) and position < end and self.window[offset] < 0x80:
            return self.window[offset], position + 1
        if not self.base <= position or (
            min(position + 10, self.size) > self.base + len(self.window)
        ):
            self.load(position)
        window, offset = self.window, position - self.base
        stop = min(len(window), offset + 10, end - self.base)
        value = shift = 0
        while offset < stop:
            byte = window[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF, self.base + offset
            shift += 7
        raise HloError(f"damaged at byte {position}: an integer that does not end")

    def walk(self, spans: Spans) -> Iterator[tuple[int, int, int, int]]:
        """Fields as (number, wire type, value or start, end of the bytes)."""
        for start, end in spans:
            position = start
            while position < end:
                self.fields += 1
                if self.fields > MAX_FIELDS:
                    raise HloError(
                        f"more than {MAX_FIELDS} fields; not a module of a real compiler"
                    )
                at = position
                tag, position = self.varint(position, end)
                number, kind = tag >> 3, tag & 7
                if not 0 < number < 1 << 29:
                    raise HloError(f"damaged at byte {at}: field number {number}")
                if kind == VARINT:
                    value, position = self.varint(position, end)
                    yield number, kind, value, position
                elif kind == BYTES:
                    length, position = self.varint(position, end)
                    if length > end - position:
                        raise HloError(
                            f"damaged at byte {at}: field {number} has {length} bytes, "
                            f"{end - position} are there"
                        )
                    yield number, kind, position, position + length
                    position += length
                elif kind in {_FIXED64, _FIXED32}:
                    length = 8 if kind == _FIXED64 else 4
                    if length > end - position:
                        raise HloError(f"damaged at byte {at}: field {number} is cut off")
                    position += length
                else:
                    raise HloError(f"damaged at byte {at}: wire type {kind}")

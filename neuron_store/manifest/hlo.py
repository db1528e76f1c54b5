"""Reads parameter and result shapes from a serialised HLO module, and nothing else of it.

A small reader of the protobuf wire format, over a seekable stream: what is not needed (constants
of gigabytes, above all) is skipped by its length and never read. Field numbers are those of XLA's
`xla/service/hlo.proto` and `xla/xla_data.proto`. The bytes are not trusted: time, memory and depth
are bounded, and only `HloError` and the stream's own `OSError` escape.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

import attrs

from neuron_store.errors import HloError
from neuron_store.manifest.shapes import input_shape, output_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ProgramShape", "Shape", "read_output_shapes", "read_program_shape"]

MAX_FIELDS = 4_000_000
"""Wire fields that are looked at in one module; the largest real ones have some 100,000."""
MAX_DEPTH = 64
"""Tuples within tuples."""
MAX_PARTS = 200_000
"""Computations, instructions or parameters that are kept track of."""
MAX_SIZES = 1_000_000
"""Shapes and dimensions, all together."""

TUPLE, OPAQUE, TOKEN = 13, 14, 17
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WINDOW = 64 << 10
# HloModuleProto
_NAME, _ENTRY_NAME, _COMPUTATIONS, _HOST_SHAPE, _ENTRY_ID = 1, 2, 3, 4, 6
# HloComputationProto
_COMPUTATION_NAME, _INSTRUCTIONS, _PROGRAM_SHAPE, _COMPUTATION_ID, _ROOT_ID = 1, 2, 4, 5, 6
# HloInstructionProto
_INSTRUCTION_SHAPE, _INSTRUCTION_ID = 3, 35
# ProgramShapeProto
_PARAMETERS, _RESULT = 1, 2
# ShapeProto
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES, _DYNAMIC = 2, 3, 4, 6

# Where a message's bytes lie. Several ranges: a message that occurs twice is merged, which for
# the wire format means that its occurrences are read one after the other.
_Span = tuple[int, int]
_Spans = list[_Span]


@attrs.frozen
class Shape:
    """One array, or a tuple of shapes."""

    element_type: int
    """XLA's PrimitiveType."""
    dimensions: tuple[int, ...] = ()
    """A dynamic dimension has its upper bound; a negative one is unbounded."""
    dynamic: tuple[bool, ...] = ()
    """One for each dimension where the module says it, else empty."""
    tuple_shapes: tuple[Shape, ...] = ()

    @property
    def is_tuple(self) -> bool:
        """Whether it has elements instead of dimensions."""
        return self.element_type == TUPLE

    def leaves(self) -> list[Shape]:
        """Its arrays in order, nested tuples flattened; none for an empty tuple."""
        if not self.is_tuple:
            return [self]
        return [leaf for element in self.tuple_shapes for leaf in element.leaves()]


@attrs.frozen
class ProgramShape:
    """What a module takes and gives."""

    parameters: tuple[Shape, ...]
    result: Shape

    def output_shapes(self) -> list[str]:
        """The result as the manifest spells it: `["4", "4, 49152"]`."""
        return [output_shape(leaf.dimensions) for leaf in self.result.leaves()]

    def input_shapes(self) -> list[str]:
        """The parameters as the manifest spells inputs: `["4,", "4, 2048"]`."""
        return [input_shape(leaf.dimensions) for p in self.parameters for leaf in p.leaves()]


def read_output_shapes(stream: BinaryIO | bytes) -> list[str]:
    """The entry's result shapes as the manifest spells them; see `read_program_shape`."""
    return _read(stream, parameters=False).output_shapes()


def read_program_shape(stream: BinaryIO | bytes) -> ProgramShape:
    """Parameter and result shapes of the module's entry computation.

    The entry is the computation whose id the module names (absent means 0, as proto3 leaves out
    zeros), else the one of that name. Where it carries no program shape, the module's own is taken,
    and then the shape of the entry's root instruction. A file that wraps the module in an HloProto
    is understood.

    Args:
        stream: the bytes, or a binary stream that can seek and tell its end.

    Raises:
        HloError: no HLO module, a damaged one, or one beyond the bounds.
        OSError: the stream's own trouble.
    """
    return _read(stream, parameters=True)


def _read(stream: BinaryIO | bytes, *, parameters: bool) -> ProgramShape:
    wire = _Wire(io.BytesIO(stream) if isinstance(stream, bytes) else stream)
    module = [(0, wire.size)]
    scan = _scan_module(wire, module)
    if scan.wrapped:
        # HloProto: hlo_module is field 1, where a bare module has its name.
        try:
            inner = _scan_module(wire, scan.name)
        except HloError:
            inner = None
        if inner is not None and (inner.computations or inner.host_shape):
            scan = inner
    if not scan.computations and not scan.host_shape:
        raise HloError("no HLO module: it has neither computations nor a program shape")
    entry = _entry(wire, scan)
    for spans in (entry.program_shape if entry is not None else [], scan.host_shape):
        if spans:
            shape = _program_shape(wire, spans, parameters=parameters)
            if shape is not None:
                return shape
    root = _root_shape(wire, entry) if entry is not None else None
    if root is None:
        raise HloError("the HLO module names no entry computation with a result shape")
    return ProgramShape((), root)


class _Wire:
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

    def read(self, spans: _Spans, limit: int = 1 << 20) -> bytes:
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

    def walk(self, spans: _Spans) -> Iterator[tuple[int, int, int, int]]:
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
                if kind == _VARINT:
                    value, position = self.varint(position, end)
                    yield number, kind, value, position
                elif kind == _BYTES:
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


@attrs.define
class _Module:
    """Where a module's parts lie."""

    name: _Spans = attrs.Factory(list)
    entry_name: _Spans = attrs.Factory(list)
    entry_id: int = 0
    computations: _Spans = attrs.Factory(list)
    host_shape: _Spans = attrs.Factory(list)
    wrapped: bool = False
    """It may be an HloProto: nothing but the fields that one has was seen."""


def _scan_module(wire: _Wire, spans: _Spans) -> _Module:
    module = _Module()
    others = False
    for number, kind, value, end in wire.walk(spans):
        if kind == _BYTES and number == _NAME:
            _keep(module.name, (value, end))
        elif kind == _BYTES and number == _COMPUTATIONS:
            _keep(module.computations, (value, end))
        else:
            others = True
            if kind == _BYTES and number == _ENTRY_NAME:
                module.entry_name = [(value, end)]
            elif kind == _BYTES and number == _HOST_SHAPE:
                _keep(module.host_shape, (value, end))
            elif kind == _VARINT and number == _ENTRY_ID:
                module.entry_id = value
    module.wrapped = bool(module.name) and not others
    return module


@attrs.define
class _Computation:
    identity: int = 0
    root: int = 0
    name: _Spans = attrs.Factory(list)
    program_shape: _Spans = attrs.Factory(list)
    instructions: _Spans = attrs.Factory(list)


def _scan_computation(wire: _Wire, span: _Span, *, instructions: bool = False) -> _Computation:
    found = _Computation()
    for number, kind, value, end in wire.walk([span]):
        if kind == _BYTES:
            if number == _INSTRUCTIONS:
                if instructions:
                    _keep(found.instructions, (value, end))
            elif number == _PROGRAM_SHAPE:
                _keep(found.program_shape, (value, end))
            elif number == _COMPUTATION_NAME:
                found.name = [(value, end)]
        elif kind == _VARINT:
            if number == _COMPUTATION_ID:
                found.identity = value
            elif number == _ROOT_ID:
                found.root = value
    return found


def _entry(wire: _Wire, module: _Module) -> _Computation | None:
    wanted = wire.read(module.entry_name)
    by_id: list[tuple[_Computation, _Span]] = []
    by_name: list[tuple[_Computation, _Span]] = []
    # XLA writes callees first, so that the entry is the last one.
    for span in reversed(module.computations):
        computation = _scan_computation(wire, span)
        if computation.identity == module.entry_id:
            by_id.append((computation, span))
            # An id that is there is unique; absent ones all read as 0.
            if module.entry_id:
                break
        if wanted and wire.read(computation.name) == wanted:
            by_name.append((computation, span))
    both = [pair for pair in by_id if pair in by_name]
    for candidates in (both, by_id if module.entry_id or not by_name else by_name, by_id):
        if candidates:
            computation, span = candidates[0]
            if computation.program_shape:
                return computation
            return _scan_computation(wire, span, instructions=True)
    return None


def _program_shape(wire: _Wire, spans: _Spans, *, parameters: bool) -> ProgramShape | None:
    result: _Spans = []
    taken: list[_Span] = []
    for number, kind, value, end in wire.walk(spans):
        if kind == _BYTES and number == _PARAMETERS:
            if parameters:
                _keep(taken, (value, end))
        elif kind == _BYTES and number == _RESULT:
            _keep(result, (value, end))
    if not result:
        return None
    budget = [MAX_SIZES]
    return ProgramShape(
        tuple(_shape(wire, [span], budget) for span in taken), _shape(wire, result, budget)
    )


def _root_shape(wire: _Wire, entry: _Computation) -> Shape | None:
    for span in reversed(entry.instructions):
        identity = 0
        shape: _Spans = []
        for number, kind, value, end in wire.walk([span]):
            if kind == _VARINT and number == _INSTRUCTION_ID:
                identity = value
            elif kind == _BYTES and number == _INSTRUCTION_SHAPE:
                _keep(shape, (value, end))
        if identity == entry.root and shape:
            return _shape(wire, shape, [MAX_SIZES])
    return None


def _shape(wire: _Wire, spans: _Spans, budget: list[int], depth: int = 0) -> Shape:
    _spend(budget)
    if depth > MAX_DEPTH:
        raise HloError(f"tuples within tuples, more than {MAX_DEPTH} deep")
    element = 0
    dimensions: list[int] = []
    dynamic: list[int] = []
    elements: list[Shape] = []
    for number, kind, value, end in wire.walk(spans):
        if number == _ELEMENT_TYPE and kind == _VARINT:
            element = value & 0xFFFFFFFF
        elif number == _TUPLE_SHAPES and kind == _BYTES:
            elements.append(_shape(wire, [(value, end)], budget, depth + 1))
        elif number in {_DIMENSIONS, _DYNAMIC}:
            into = dimensions if number == _DIMENSIONS else dynamic
            if kind == _VARINT:
                _spend(budget)
                into.append(value)
            elif kind == _BYTES:
                position = value
                while position < end:
                    _spend(budget)
                    item, position = wire.varint(position, end)
                    into.append(item)
    if element in {TUPLE, OPAQUE, TOKEN}:
        dimensions = []
    return Shape(
        element,
        tuple(size - (1 << 64) if size >= 1 << 63 else size for size in dimensions),
        tuple(map(bool, dynamic)),
        tuple(elements) if element == TUPLE else (),
    )


def _spend(budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0:
        raise HloError(f"more than {MAX_SIZES} shapes and dimensions")


def _keep(parts: _Spans, span: _Span) -> None:
    if len(parts) >= MAX_PARTS:
        raise HloError(f"more than {MAX_PARTS} parts of one kind in the module")
    parts.append(span)

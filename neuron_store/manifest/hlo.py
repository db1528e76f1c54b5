"""Reads parameter and result shapes from a serialised HLO module, and nothing else of it.

What is not needed (constants of gigabytes, above all) is skipped and never read. Field numbers are
those of XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`. The bytes are not trusted: time,
memory and depth are bounded, and only `HloError` and the stream's own `OSError` escape.
"""

from __future__ import annotations

import io
from typing import BinaryIO

import attrs

from neuron_store.errors import HloError
from neuron_store.manifest._wire import BYTES, VARINT, Span, Spans, Wire
from neuron_store.manifest.shapes import input_shape, output_shape

__all__ = ["ProgramShape", "Shape", "read_output_shapes", "read_program_shape"]

MAX_DEPTH = 64
"""Tuples within tuples."""
MAX_PARTS = 200_000
"""Computations, instructions or parameters that are kept track of."""
MAX_SIZES = 1_000_000
"""Shapes and dimensions, all together."""

TUPLE, OPAQUE, TOKEN = 13, 14, 17
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
    wire = Wire(io.BytesIO(stream) if isinstance(stream, bytes) else stream)
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


@attrs.define
class _Module:
    """Where a module's parts lie."""

    name: Spans = attrs.Factory(list)
    entry_name: Spans = attrs.Factory(list)
    entry_id: int = 0
    computations: Spans = attrs.Factory(list)
    host_shape: Spans = attrs.Factory(list)
    wrapped: bool = False
    """It may be an HloProto: nothing but the fields that one has was seen."""


def _scan_module(wire: Wire, spans: Spans) -> _Module:
    module = _Module()
    others = False
    for number, kind, value, end in wire.walk(spans):
        if kind == BYTES and number == _NAME:
            _keep(module.name, (value, end))
        elif kind == BYTES and number == _COMPUTATIONS:
            _keep(module.computations, (value, end))
        else:
            others = True
            if kind == BYTES and number == _ENTRY_NAME:
                module.entry_name = [(value, end)]
            elif kind == BYTES and number == _HOST_SHAPE:
                _keep(module.host_shape, (value, end))
            elif kind == VARINT and number == _ENTRY_ID:
                module.entry_id = value
    module.wrapped = bool(module.name) and not others
    return module


@attrs.define
class _Computation:
    identity: int = 0
    root: int = 0
    name: Spans = attrs.Factory(list)
    program_shape: Spans = attrs.Factory(list)
    instructions: Spans = attrs.Factory(list)


def _scan_computation(wire: Wire, span: Span, *, instructions: bool = False) -> _Computation:
    found = _Computation()
    for number, kind, value, end in wire.walk([span]):
        if kind == BYTES:
            if number == _INSTRUCTIONS:
                if instructions:
                    _keep(found.instructions, (value, end))
            elif number == _PROGRAM_SHAPE:
                _keep(found.program_shape, (value, end))
            elif number == _COMPUTATION_NAME:
                found.name = [(value, end)]
        elif kind == VARINT:
            if number == _COMPUTATION_ID:
                found.identity = value
            elif number == _ROOT_ID:
                found.root = value
    return found


def _entry(wire: Wire, module: _Module) -> _Computation | None:
    wanted = wire.read(module.entry_name)
    both: tuple[_Computation, Span] | None = None
    by_id: tuple[_Computation, Span] | None = None
    by_name: tuple[_Computation, Span] | None = None
    # XLA writes callees first, so that the entry is the last one. The first that is found counts.
    for span in reversed(module.computations):
        computation = _scan_computation(wire, span)
        named = bool(wanted) and wire.read(computation.name) == wanted
        if named:
            by_name = by_name or (computation, span)
        if computation.identity == module.entry_id:
            by_id = by_id or (computation, span)
            if named:
                both = both or (computation, span)
            # An id that is there is unique; absent ones all read as 0.
            if module.entry_id:
                break
    found = both or ((by_id or by_name) if module.entry_id else (by_name or by_id))
    if found is None:
        return None
    computation, span = found
    if computation.program_shape:
        return computation
    return _scan_computation(wire, span, instructions=True)


def _program_shape(wire: Wire, spans: Spans, *, parameters: bool) -> ProgramShape | None:
    result: Spans = []
    taken: list[Span] = []
    for number, kind, value, end in wire.walk(spans):
        if kind == BYTES and number == _PARAMETERS:
            if parameters:
                _keep(taken, (value, end))
        elif kind == BYTES and number == _RESULT:
            _keep(result, (value, end))
    if not result:
        return None
    budget = [MAX_SIZES]
    return ProgramShape(
        tuple(_shape(wire, [span], budget) for span in taken), _shape(wire, result, budget)
    )


def _root_shape(wire: Wire, entry: _Computation) -> Shape | None:
    for span in reversed(entry.instructions):
        identity = 0
        shape: Spans = []
        for number, kind, value, end in wire.walk([span]):
            if kind == VARINT and number == _INSTRUCTION_ID:
                identity = value
            elif kind == BYTES and number == _INSTRUCTION_SHAPE:
                _keep(shape, (value, end))
        if identity == entry.root and shape:
            return _shape(wire, shape, [MAX_SIZES])
    return None


def _shape(wire: Wire, spans: Spans, budget: list[int], depth: int = 0) -> Shape:
    _spend(budget)
    if depth > MAX_DEPTH:
        raise HloError(f"tuples within tuples, more than {MAX_DEPTH} deep")
    element = 0
    dimensions: list[int] = []
    dynamic: list[int] = []
    elements: list[Shape] = []
    for number, kind, value, end in wire.walk(spans):
        if number == _ELEMENT_TYPE and kind == VARINT:
            element = value & 0xFFFFFFFF
        elif number == _TUPLE_SHAPES and kind == BYTES:
            elements.append(_shape(wire, [(value, end)], budget, depth + 1))
        elif number in {_DIMENSIONS, _DYNAMIC}:
            into = dimensions if number == _DIMENSIONS else dynamic
            if kind == VARINT:
                _spend(budget)
                into.append(value)
            elif kind == BYTES:
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


def _keep(parts: Spans, span: Span) -> None:
    if len(parts) >= MAX_PARTS:
        raise HloError(f"more than {MAX_PARTS} parts of one kind in the module")
    parts.append(span)

"""A serialised HloModuleProto without the paths of the machine that traced it.

A rewrite on the wire: fields are skipped by their length, nothing large is copied, and whatever is
unknown stays as it is. Field numbers: xla/service/hlo.proto and xla/xla_data.proto.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from typing import TYPE_CHECKING, TypeAlias

from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["aliased_inputs", "compiler_input", "is_hlo", "key_input", "output_count"]

# What to do with a length-delimited field: descend, or replace its bytes (None keeps them).
_Rule: TypeAlias = "dict[int, _Rule] | Callable[[bytes], bytes | None]"
_Field: TypeAlias = "tuple[int, int, int, int, int]"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TUPLE = 13


def is_hlo(data: bytes) -> bool:
    """Whether these are the bytes of a HloModuleProto: well formed, with a computation."""
    try:
        key_input(data)
    except ConfigError:
        return False
    return True


def compiler_input(data: bytes) -> list[bytes | memoryview]:
    """The module for the compiler, in pieces: source files by their last name only.

    What the compiler needs to find (a kernel's binary) keeps its path.

    Raises:
        ConfigError: it is not a serialised HloModuleProto.
    """
    return _rewritten(data, _module_rules({}))


def key_input(data: bytes) -> list[bytes | memoryview]:
    """The module for the key, in pieces: as `compiler_input`, and a kernel's binary by its digest.

    Raises:
        ConfigError: it is not a serialised HloModuleProto.
    """
    return _rewritten(data, _module_rules({43: _kernel_by_content}))


def output_count(data: bytes) -> int | None:
    """How many results the entry computation gives; None where the module does not say.

    Raises:
        ConfigError: it is not a serialised HloModuleProto.
    """
    view = memoryview(data)
    entry = _last(view, 6) or 0
    for start, end in _messages(view, 0, len(view), 3):
        if (_last(view[start:end], 5) or 0) != entry:
            continue
        for shape_start, shape_end in _messages(view, start, end, 4):
            for result_start, result_end in _messages(view, shape_start, shape_end, 2):
                if _last(view[result_start:result_end], 2) != _TUPLE:
                    return 1
                return sum(1 for _ in _messages(view, result_start, result_end, 4))
    return None


def aliased_inputs(data: bytes) -> dict[int, int]:
    """Which results share memory with which parameters: result number to parameter number.

    Raises:
        ConfigError: it is not a serialised HloModuleProto.
    """
    view = memoryview(data)
    found: dict[int, int] = {}
    for start, end in _messages(view, 0, len(view), 8):
        for entry_start, entry_end in _messages(view, start, end, 1):
            entry = view[entry_start:entry_end]
            found[_first_index(entry)] = _last(entry, 2) or 0
    return found


def _module_rules(instruction: dict[int, _Rule]) -> dict[int, _Rule]:
    # computations.instructions.metadata.source_file, and stack_frame_index.file_names
    return {3: {2: {7: {3: _last_name}, **instruction}}, 17: {1: _last_name}}


def _last_name(path: bytes) -> bytes | None:
    return path.rsplit(b"/", 1)[-1] if b"/" in path else None


def _kernel_by_content(config: bytes) -> bytes | None:
    """A custom call's configuration with the kernel's file named by what is in it.

    Kernels of NKI lie below /var/tmp under a random name; the call holds only the path. By the path
    two nodes would never agree, without the content a changed kernel would go unnoticed. A file
    that is not here counts as empty.
    """
    try:
        text = config if config.startswith(b"{") else base64.b64decode(config, validate=True)
        call = json.loads(text)
        binary = call["klir_binary"]
        path = binary["binary"]
    except (ValueError, binascii.Error, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(path, str) or not isinstance(binary, dict):
        return None
    content = ""
    try:
        # A pipe under that name would make us wait for ever.
        if os.path.isfile(path):
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        content = ""
    changed = {**call, "klir_binary": {**binary, "binary": content}}
    return json.dumps(changed, sort_keys=True).encode()


# -- the wire format ------------------------------------------------------------------------------


def _rewritten(data: bytes, rules: dict[int, _Rule]) -> list[bytes | memoryview]:
    view = memoryview(data)
    if next(_messages(view, 0, len(view), 3), None) is None:
        raise ConfigError(
            "the graph has no computations, so it is not a bare HloModuleProto; of an HloProto "
            "give its hlo_module"
        )
    return _rewrite(view, 0, len(view), rules) or [view]


def _rewrite(
    view: memoryview, start: int, end: int, rules: dict[int, _Rule]
) -> list[bytes | memoryview] | None:
    """The message in pieces, or None when nothing in it changes."""
    pieces: list[bytes | memoryview] = []
    kept = start
    for number, wire, tag, first, last in _fields(view, start, end):
        rule = rules.get(number)
        if rule is None or wire != _BYTES:
            continue
        if isinstance(rule, dict):
            inner = _rewrite(view, first, last, rule)
        else:
            value = rule(bytes(view[first:last]))
            inner = None if value is None else [value]
        if inner is None:
            continue
        length = sum(len(piece) for piece in inner)
        pieces += (view[kept:tag], _varint(number << 3 | _BYTES), _varint(length), *inner)
        kept = last
    if not pieces:
        return None
    pieces.append(view[kept:end])
    return pieces


def _fields(view: memoryview, start: int, end: int) -> Iterator[_Field]:
    """Each field: number, wire type, where its tag starts, where its value starts and ends."""
    at = start
    while at < end:
        tag = at
        header, at = _read_varint(view, at, end)
        number, wire = header >> 3, header & 7
        first = at
        if wire == _VARINT:
            _, at = _read_varint(view, at, end)
        elif wire == _BYTES:
            length, first = _read_varint(view, at, end)
            at = first + length
        elif wire == _FIXED64:
            at += 8
        elif wire == _FIXED32:
            at += 4
        else:
            raise _not_hlo(f"wire type {wire} at byte {tag}")
        if at > end or number == 0:
            raise _not_hlo(f"field {number} at byte {tag} is cut off")
        yield number, wire, tag, first, at


def _messages(view: memoryview, start: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    for found, wire, _, first, last in _fields(view, start, end):
        if found == number and wire == _BYTES:
            yield first, last


def _last(message: memoryview, number: int) -> int | None:
    """The value of an integer field; absent means 0 in proto3, which is not written."""
    value = None
    for found, wire, _, first, last in _fields(message, 0, len(message)):
        if found == number and wire == _VARINT:
            value, _ = _read_varint(message, first, last)
    return value


def _first_index(entry: memoryview) -> int:
    """The first number of `output_shape_index`, packed or not; 0 for a result that is no tuple."""
    for number, _, _, first, last in _fields(entry, 0, len(entry)):
        if number == 1 and last > first:
            return _read_varint(entry, first, last)[0]
    return 0


def _read_varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _not_hlo(f"a number at byte {at} has no end")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _not_hlo(reason: str) -> ConfigError:
    return ConfigError(
        f"the graph is not a serialised HloModuleProto ({reason}); give the bytes of "
        "hlo_module.SerializeToString()"
    )

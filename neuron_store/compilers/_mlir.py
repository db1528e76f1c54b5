"""MLIR without the places in source files that it came from.

Two checkouts of one model at different paths trace to graphs that differ in nothing else.
"""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["is_bytecode", "strip_locations"]

# A string, a comment, or where a location opens. Strings and comments are matched so that what
# looks like a location inside them is passed over.
_TOKEN = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|//[^\n]*|(?<![\w.$-])loc\(')
_INSIDE = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|[()]')
_NAME = re.compile(rb"#[\w.$-]+")
_ALIAS = re.compile(rb"^(#[\w.$-]+)\s*=\s*loc\(unknown\)[^\S\n]*\n?", re.MULTILINE)


def is_bytecode(data: bytes) -> bool:
    """Whether it is MLIR's binary form, which is taken as it is."""
    return data.startswith(b"ML\xefR")


def strip_locations(data: bytes) -> bytes:
    """The same program with every location unknown; byte code and text without one unchanged.

    `loc(unknown)` stands wherever a location may stand, so the text stays well formed. Definitions
    of location aliases, which nothing refers to any more, go.
    """
    if is_bytecode(data) or b"loc(" not in data:
        return data
    pieces: list[bytes] = []
    done = at = 0
    while (found := _TOKEN.search(data, at)) is not None:
        at = found.end()
        if not found[0].endswith(b"loc("):
            continue
        end = _closing(data, at)
        if end is None:
            break
        pieces += (data[done : found.start()], b"loc(unknown)")
        done = at = end
    pieces.append(data[done:])
    text = b"".join(pieces)
    aliases = {found[1] for found in _ALIAS.finditer(text)}
    uses = Counter(_NAME.findall(text))
    unused = {name for name in aliases if uses[name] == 1}
    return _ALIAS.sub(lambda found: b"" if found[1] in unused else found[0], text)


def _closing(data: bytes, at: int) -> int | None:
    depth = 1
    while (found := _INSIDE.search(data, at)) is not None:
        at = found.end()
        depth += {b"(": 1, b")": -1}.get(found[0], 0)
        if depth == 0:
            return at
    return None

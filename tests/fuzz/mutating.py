"""Changes valid input: bytes anywhere, JSON by its parts. The same seed gives the same input."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_INPUT = 32 << 10

# Where readers of text, of JSON and of numbers go wrong.
TOKENS = (
    b"\0",
    b"\n",
    b"\r\n",
    b'"',
    b"'",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\x1b[31m",
    b"../",
    b"/etc/passwd",
    b"~root",
    b"%00",
    b"%2e%2e/",
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"9" * 30,
    b"9" * 400,
    b"9" * 5000,
    b"0x" + b"f" * 4000,
    b"[" * 3000,
    b'{"a":' * 1500,
    b"a" * 300,
    b"\xff" * 10,
    b"\xff\xfe",
    b"\xed\xa0\x80",
    "\u2028".encode(),
    "٣".encode(),
    "²".encode(),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**400,
    -0.0,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\0",
    "\ud800",
    "a\nb",
    "..",
    "../../x",
    "/etc/passwd",
    ".neuron_store.json",
    "a" * 300,
    "0" * 64,
    [],
    {},
    [[]],
    {"a": {}},
    ["a"],
    [0],
)


class Mutator:
    """Makes inputs out of seeds.

    Args:
        seed: of its random numbers.
        tokens: what this kind of input is made of.
    """

    def __init__(self, seed: int, tokens: Sequence[bytes] = ()) -> None:
        self.chance = random.Random(seed)
        # Its own words count more than everybody's.
        self._tokens = (*TOKENS, *tokens * 3)

    def mutant(self, pool: Sequence[bytes]) -> bytes:
        """A new input out of one or two of the pool's."""
        data = self.chance.choice(pool)
        kind = self.chance.randrange(10)
        if kind < 4:
            changed = self._json(data)
            data = data if changed is None else changed
            if changed is not None and kind < 3:
                return data[:MAX_INPUT]
        elif kind == 4:
            data = self._crossed(data, self.chance.choice(pool))
        for _ in range(self.chance.choice((1, 1, 1, 2, 3, 8))):
            data = self._bytes(data)
        return data[:MAX_INPUT]

    def _crossed(self, one: bytes, other: bytes) -> bytes:
        return (
            one[: self.chance.randrange(len(one) + 1)]
            + other[self.chance.randrange(len(other) + 1) :]
        )

    def _bytes(self, data: bytes) -> bytes:
        chance = self.chance
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(9)
        some = chance.choice((1, 1, 2, 4, 16, 64))
        if kind == 0 and at < len(data):
            return data[:at] + bytes((data[at] ^ 1 << chance.randrange(8),)) + data[at + 1 :]
        if kind == 1 and at < len(data):
            return data[:at] + bytes((chance.randrange(256),)) + data[at + 1 :]
        if kind == 2:
            return data[:at] + data[at + some :]
        if kind == 3:
            return data[:at]
        if kind == 4:
            source = chance.randrange(len(data) + 1)
            return data[:at] + data[source : source + some] + data[at:]
        token = chance.choice(self._tokens)
        if kind == 5:
            return data[:at] + token + data[at + len(token) :]
        if kind == 6:
            return data[:at] + token + data[at + some :]
        return data[:at] + token + data[at:]

    def _json(self, data: bytes) -> bytes | None:
        """With one value of it replaced, removed, moved or wrapped; None if it is no JSON."""
        try:
            value = json.loads(data)
            places = list(_places(value))
            if not places:
                return None
            holder, name = self.chance.choice(places)
            kind = self.chance.randrange(6)
            if kind == 0:
                del holder[name]
            elif kind == 1:
                other, its = self.chance.choice(places)
                holder[name] = other[its]
            elif kind == 2:
                holder[name] = [holder[name]]
            elif kind == 3 and isinstance(holder, dict):
                new = self.chance.choice([v for v in VALUES if isinstance(v, str)])
                holder[new] = holder.pop(name)
            else:
                holder[name] = self.chance.choice(VALUES)
            return json.dumps(value).encode()
        # A value may have come to contain itself.
        except (ValueError, RecursionError, LookupError):
            return None


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict):
            names: list[Any] = list(holder)
        elif isinstance(holder, list):
            names = list(range(len(holder)))
        else:
            continue
        found.extend((holder, name) for name in names)
        waiting.extend(holder[name] for name in names)
    return found


def shrunk(data: bytes, fails: Any, tries: int = 400) -> bytes:
    """A shorter input for which `fails(data)` still holds; each part is left out in turn."""
    size = max(1, len(data) // 2)
    while size and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            tries -= 1
            shorter = data[:at] + data[at + size :]
            if fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data

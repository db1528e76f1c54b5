"""Mutates HLO modules and reads them. A long fuzz: `fuzz_hlo.py 100000 [seed]`."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
# Lengths, tags and integers at which readers go wrong.
SPLICES = [
    b"\xff" * 10,
    b"\xff" * 9 + b"\x01",
    b"\x80" * 10,
    b"\x1a\xff\xff\xff\xff\x0f",
    b"\x22\x00",
    b"\x0b",
    b"\x0c",
    b"\x00",
    b"\x08",
    b"\x1a\x00",
    b"\x22\x02\x12\x00",
    b"\x22\x02\x22\x00" * 8,
    b"\x18" + b"\xff" * 9 + b"\x01",
]


def varint(value: int) -> bytes:
    """Of the value's low 64 bits, as two's complement gives them."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def seeds() -> list[bytes]:
    modules = [path.read_bytes() for path in sorted(FIXTURES.glob("*.hlo"))]
    small = [data for data in modules if len(data) < 10_000]
    # The wrapper: HloProto.hlo_module is field 1.
    return small + [b"\x0a" + varint(len(data)) + data for data in small]


def mutate(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = chance.randrange(256)
        elif kind == 2:
            out[at:at] = chance.choice(SPLICES)
        elif kind == 3:
            del out[at : at + chance.choice((1, 2, 8, 64))]
        elif kind == 4:
            del out[at:]
        else:
            source = chance.randrange(len(out) + 1)
            out[at:at] = out[source : source + chance.choice((1, 4, 32, 256))]
        if not out:
            out = bytearray(b"\x0a")
    return bytes(out)


def run(rounds: int, seed: int) -> dict[str, float]:
    """Raises whatever is no HloError; returns counts and the slowest read in seconds."""
    from neuron_store.errors import HloError
    from neuron_store.manifest.hlo import read_program_shape

    chance = random.Random(seed)
    modules = seeds()
    read = refused = 0
    slowest = 0.0
    for _ in range(rounds):
        data = mutate(chance.choice(modules), chance)
        began = time.perf_counter()
        try:
            shape = read_program_shape(data)
            shape.output_shapes()
            shape.input_shapes()
            read += 1
        except HloError:
            refused += 1
        except BaseException:
            Path("hlo-crash.bin").write_bytes(data)
            raise
        slowest = max(slowest, time.perf_counter() - began)
    return {"rounds": rounds, "read": read, "refused": refused, "slowest": round(slowest, 4)}


if __name__ == "__main__":
    import resource

    result = run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(result)

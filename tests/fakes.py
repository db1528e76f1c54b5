"""Compile functions that behave like a compiler: they sleep, and write the Neuron stack's files."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import attrs

from neuron_store import CompileJob


def neff(payload: bytes) -> bytes:
    return struct.pack("<QQQ", 2, 1024, len(payload)).ljust(1024, b"\0") + payload


@attrs.frozen
class FakeCompile:
    """Picklable. Appends a line to `log` at each start, so that compiles can be counted."""

    key: str
    log: str
    seconds: float = 0.0
    fail: str = ""
    """Raise RuntimeError with this text, at the end."""
    fail_times: int = 10**9
    """How often, counted over all processes; then it succeeds."""
    payload: bytes = b"payload"

    def __call__(self, workdir: Path) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()} {time.monotonic()}\n")
        time.sleep(self.seconds)
        if self.fail and len(starts(self.log)) <= self.fail_times:
            raise RuntimeError(self.fail)
        write_entry(workdir, self.key, self.payload)

    def job(self, **facts: object) -> CompileJob:
        return CompileJob(self.key, self, **facts)  # type: ignore[arg-type]


def starts(log: str | os.PathLike[str]) -> list[int]:
    """The pids of the compiles that were started, in order."""
    try:
        return [int(line.split()[0]) for line in Path(log).read_text().splitlines()]
    except FileNotFoundError:
        return []


def write_entry(
    directory: Path, key: str, payload: bytes = b"payload", *, mark: bool = True
) -> None:
    """The four files of the Neuron stack, the mark last, and what it leaves for debugging."""
    data = neff(payload)
    (directory / "graph.hlo").write_bytes(b"\x0a\x04test")
    (directory / f"graph_{key}.neff").write_bytes(data)
    (directory / ".artifact_metadata_v0.json").write_text(
        f'{{\n  "version": 0,\n  "cache_key": "{key}",\n  "output_count": 1\n}}'
    )
    (directory / "command.txt").write_text(f"neuronx-cc compile {directory}/graph.hlo")
    (directory / "log-neuron-cc.txt").write_text("compiled")
    if mark:
        (directory / ".compilation_complete").write_text(
            f"completed:{time.time()}\nneff_size:{len(data)}\n"
        )

"""What happened in a soak: one line for each event, in a file that all processes append to.

A line is written by one `os.write` to a descriptor opened with O_APPEND, so that lines of
processes that are killed at any moment are whole or absent.
"""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path
from typing import Any

import attrs


class Journal:
    """One process's way into the file."""

    def __init__(self, path: str, worker: int = -1, life: int = 0, node: int = -1) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._who = {"worker": worker, "life": life, "node": node}

    def say(self, event: str, **facts: Any) -> None:
        line = json.dumps({"t": time.monotonic(), "event": event, **self._who, **facts}) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        os.close(self._descriptor)


@attrs.define
class Operation:
    """One operation of a worker; `end` is infinite when its process did not live to see it."""

    worker: int
    life: int
    node: int
    name: str
    key: str | None
    begin: float
    end: float = float("inf")
    outcome: str = "killed"


class History:
    """The journal, read once the soak is over."""

    def __init__(self, path: str) -> None:
        self.events = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.operations: list[Operation] = []
        at_work: dict[tuple[int, int], Operation] = {}
        for event in self.events:
            who = (event["worker"], event["life"])
            if event["event"] == "begin":
                at_work[who] = Operation(*who, event["node"], event["op"], event["key"], event["t"])
                self.operations.append(at_work[who])
            elif event["event"] == "end" and who in at_work:
                done = at_work.pop(who)
                done.end, done.outcome = event["t"], event["outcome"]

    def of(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in names]

    def count(self, name: str, *by: str) -> collections.Counter[Any]:
        return collections.Counter(tuple(e[b] for b in by) for e in self.of(name))

    def disturbed(self) -> list[Operation]:
        """Operations during which their process was killed or stopped."""
        stops = collections.defaultdict(list)
        for event in self.of("kill", "stop"):
            stops[event["target"], event["target_life"]].append(event["t"])
        # A signal lands a little after its line.
        return [
            op
            for op in self.operations
            if any(op.begin - 1.0 <= t <= op.end + 0.5 for t in stops[op.worker, op.life])
            or (op.outcome == "killed" and (op.worker, op.life) in stops)
        ]

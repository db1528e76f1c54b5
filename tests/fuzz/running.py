"""Runs targets: one input, or for a time in several processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from neuron_store.registry import get_compiler
from tests.fuzz.guarding import Broken, check_logged, check_told, confined, listening
from tests.fuzz.mutating import Mutator, shrunk
from tests.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from tests.fuzz.target import Target

STUBS = Path(__file__).parents[1] / "stubs"
SLICE = 0.5
MEMORY = 2 << 30
KEPT = 20
LARGEST_KEPT = 4 << 10
POOL = 400


@attrs.frozen
class Finding:
    """An input that broke a promise."""

    target: str
    what: str
    data: bytes


@attrs.define
class Found:
    """What one process did to one target."""

    executions: int = 0
    slowest: float = 0.0
    findings: dict[str, Finding] = attrs.Factory(dict)
    outcomes: dict[str, bytes] = attrs.Factory(dict)
    """Kind of outcome to the shortest input that had it."""

    def add(self, other: Found) -> None:
        self.executions += other.executions
        self.slowest = max(self.slowest, other.slowest)
        self.findings.update(other.findings)
        for kind, data in other.outcomes.items():
            self.note(kind, data)

    def note(self, kind: str, data: bytes) -> bool:
        known = self.outcomes.get(kind)
        if known is None or len(data) < len(known):
            self.outcomes[kind] = data
        return known is None


def run_one(target: Target, data: bytes, home: Path, logged: list[str]) -> str:
    """Give the target one input; what kind of outcome it had.

    Raises:
        Broken: a promise was broken.
        Exception: whatever is not one of the target's errors.
    """
    logged.clear()
    secret = target.secret(data)
    with confined(str(home)):
        try:
            kind = f"value {target.call(data, home / target.name)!r}"
        except target.allowed as error:
            check_told(error, secret=secret)
            kind = f"{type(error).__name__} {_kind(str(error))}"
    check_logged(logged, secret=secret)
    return kind


def _kind(text: str) -> str:
    # What the input brought does not count, its numbers neither.
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+|/\S+", "#", text)[:100]


def told(error: BaseException) -> str:
    """An exception's kind and where it came from: the same for inputs that hit the same fault."""
    ours = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    inside = [f for f in ours if "/tests/" not in f.filename] or ours
    place = inside[-1] if inside else None
    where = f"{Path(place.filename).name}:{place.lineno}" if place is not None else "?"
    text = _kind(str(error)) if isinstance(error, Broken) else ""
    return f"{type(error).__name__} at {where} {text}".rstrip()


@attrs.define
class Runner:
    """One process's part."""

    home: Path
    logged: list[str]
    seed: int
    found: dict[str, Found] = attrs.Factory(dict)
    _pools: dict[str, tuple[list[bytes], Mutator]] = attrs.Factory(dict)

    def run(self, targets: Sequence[Target], seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for target in targets:
                self.turn(target, min(SLICE, left / len(targets)))

    def turn(self, target: Target, seconds: float) -> None:
        found = self.found.setdefault(target.name, Found())
        if target.name not in self._pools:
            pool = target.inputs()
            self._pools[target.name] = (pool, Mutator(self.seed, target.tokens))
            for data in pool:
                self.give(target, data, found)
        pool, mutator = self._pools[target.name]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            data = mutator.mutant(pool)
            if self.give(target, data, found) and len(pool) < POOL:
                pool.append(data)

    def give(self, target: Target, data: bytes, found: Found) -> bool:
        """Whether its outcome is of a new kind."""
        found.executions += 1
        began = time.process_time()
        try:
            kind = run_one(target, data, self.home, self.logged)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.keep(target, data, error, found)
            return False
        found.slowest = max(found.slowest, time.process_time() - began)
        return found.note(kind, data)

    def keep(self, target: Target, data: bytes, error: BaseException, found: Found) -> None:
        kind = told(error)
        if kind in found.findings:
            return

        def fails(shorter: bytes) -> bool:
            try:
                run_one(target, shorter, self.home, self.logged)
            except KeyboardInterrupt:
                raise
            except BaseException as other:
                return told(other) == kind
            return False

        small = data if "processor" in kind else shrunk(data, fails)
        text = "".join(traceback.format_exception(error)[-3:])
        found.findings[kind] = Finding(target.name, f"{kind}\n{text}", small)


def fuzz(
    targets: Sequence[Target], seconds: float, *, processes: int = 2, seed: int = 0
) -> dict[str, Found]:
    """Run the targets in turns for so long, in so many processes; what they found."""
    context = multiprocessing.get_context("fork")
    started = []
    for number in range(processes):
        here, there = context.Pipe(duplex=False)
        # Each begins elsewhere, so that a short run also reaches all.
        turned = [*targets[number * len(targets) // processes :], *targets]
        mine = list(dict.fromkeys(turned))
        process = context.Process(
            target=_work, args=(mine, seconds, seed * 1000 + number, there), daemon=True
        )
        process.start()
        there.close()
        started.append((process, here))
    total: dict[str, Found] = {target.name: Found() for target in targets}
    for process, here in started:
        try:
            for name, found in here.recv().items():
                total[name].add(found)
        except EOFError:
            process.join()
            finding = Finding("?", f"a process died with {process.exitcode}", b"")
            total[targets[0].name].findings[finding.what] = finding
        process.join()
    return total


def _work(targets: Sequence[Target], seconds: float, seed: int, answer: Connection) -> None:
    with in_home() as home, listening() as logged:
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
        runner = Runner(home, logged, seed)
        runner.run(targets, seconds)
    answer.send(runner.found)
    answer.close()
    sys.stdout.flush()
    # Daemon threads of clients' libraries must not hold up the end.
    os._exit(0)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


class in_home:  # noqa: N801  (reads as what it does)
    """A new directory in memory where there is one, as the current directory."""

    def __enter__(self) -> Path:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._before = os.getcwd()
        self.path = Path(
            os.path.realpath(tempfile.mkdtemp(prefix="neuron_store_fuzz.", dir=memory))
        )
        os.chdir(self.path)
        # Asked for by the readers of compiler flags: finding one writes a file.
        tempfile.gettempdir()
        # As does asking the stub that stands for neuronx-cc for its version: a process.
        self._path = os.environ["PATH"]
        os.environ["PATH"] = f"{STUBS}:{self._path}"
        get_compiler("neuronx-cc").version()
        return self.path

    def __exit__(self, *_: object) -> None:
        os.environ["PATH"] = self._path
        os.chdir(self._before)
        shutil.rmtree(self.path, ignore_errors=True)


def file_name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def save(target: Target, found: Found) -> int:
    """Add to the corpus what it has room for, findings first; how many were added."""
    kept = {path.name for path in target.corpus.iterdir()} if target.corpus.is_dir() else set()
    wanted = [finding.data for finding in found.findings.values()]
    known = {file_name(seed) for seed in target.seeds()}
    for data in _spread(found.outcomes):
        if len(kept) + len(wanted) >= KEPT:
            break
        wanted.append(data)
    added = 0
    for data in wanted:
        name = file_name(data)
        if len(data) < LARGEST_KEPT and name not in kept | known:
            target.corpus.mkdir(parents=True, exist_ok=True)
            (target.corpus / name).write_bytes(data)
            added += 1
    return added


def _spread(outcomes: dict[str, bytes]) -> Iterator[bytes]:
    """Short inputs of different kinds: one of each error's beginning before the second of any."""
    groups: dict[str, list[bytes]] = {}
    for kind, data in sorted(outcomes.items(), key=lambda pair: (len(pair[1]), pair[0])):
        groups.setdefault(kind[:40], []).append(data)
    while groups:
        for name in list(groups):
            yield groups[name].pop(0)
            if not groups[name]:
                del groups[name]


__all__ = ["TARGETS", "Finding", "Found", "Runner", "fuzz", "in_home", "run_one", "save", "told"]

"""Many graphs at once: each key asked for in every tier, and compiled where none has it."""

from __future__ import annotations

import collections
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store._strict_json import load_written_json
from neuron_store.compilers._graph import read_graph, read_input
from neuron_store.compilers._process import interrupt_compiles
from neuron_store.coordinator import CompileCoordinator
from neuron_store.errors import CompileError, ConfigError, NeuronStoreError, TierError
from neuron_store.job import CompileJob
from neuron_store.opening import open_store
from neuron_store.policy import CompilePolicy
from neuron_store.registry import get_compiler
from neuron_store.settings import load_settings, local_root_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from neuron_store.abc import ArtifactStore

__all__ = [
    "JobOutcome",
    "Precompiled",
    "Progress",
    "available_memory",
    "get_or_compile",
    "precompile",
    "read_jobs",
    "worker_limit",
]

# Bytes that one compile may take at its peak, where the caller does not say: neuronx-cc takes
# several GiB for a layer of a large model, iree-compile 170 MiB for the block in examples/graphs.
_MEMORY = {"neuronx-cc": 8 << 30, "iree": 1 << 30}
_MEMORY_OTHERWISE = 2 << 30
_FIELDS = frozenset({"compiler", "graph", "flags", "extra"})
_PAUSE = 0.25
# A jobs file names graphs; it holds none.
_LARGEST_FILE = 256 << 20


@attrs.frozen
class JobOutcome:
    """What became of one job."""

    key: str
    outcome: str
    """`hit` (this node had it), `fetched`, `compiled` or `failed`."""
    seconds: float
    path: Path | None = None
    """The artifact's directory, where it is on this node."""
    error: NeuronStoreError | None = None


@attrs.frozen
class Progress:
    """Where a precompile stands, told after each job."""

    done: int
    total: int
    running: int
    failed: int
    eta: float | None
    """Seconds until the last job is done, as the ones so far went; None before the first."""
    last: JobOutcome | None = None


@attrs.frozen
class Precompiled:
    """The summary of a precompile."""

    outcomes: tuple[JobOutcome, ...]
    """One for each distinct key, in the order of the jobs."""
    seconds: float
    workers: int
    """The most that ran at once."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Outcome to how many jobs had it."""
        return dict(collections.Counter(o.outcome for o in self.outcomes))

    @property
    def failed(self) -> tuple[JobOutcome, ...]:
        """The jobs that failed; empty when all is well."""
        return tuple(o for o in self.outcomes if o.outcome == "failed")


def precompile(
    jobs: Iterable[CompileJob],
    *,
    workers: int | None = None,
    store: ArtifactStore | None = None,
    policy: CompilePolicy | None = None,
    memory_per_compile: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Precompiled:
    """Have every job's artifact on this node, distinct keys in parallel.

    A job that fails stops no other. Jobs of one key are one job.

    Args:
        jobs: what `Compiler.job` made, or `read_jobs` read.
        workers: compiles at once; None: `NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS`, and no more
            than there are cores. Memory may allow fewer, see `worker_limit`.
        store: what the settings describe if None.
        policy: how to compile, what the settings say if None.
        memory_per_compile: bytes that one compile may take at its peak.
        progress: called in this thread after each job.

    Raises:
        ConfigError: a setting that cannot be used.
        KeyboardInterrupt: after every running compiler was ended; no failure is noted for them.
    """
    distinct = list({_checked(job).key: job for job in jobs}.values())
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ConfigError(f"workers={workers!r:.40} is not a count of at least 1")
    if policy is None:
        policy = CompilePolicy.load()
    wanted = _default_workers() if workers is None else workers
    share = memory_per_compile or max((_memory_of(job) for job in distinct), default=1)
    limit = worker_limit(min(wanted, max(1, len(distinct))), share)
    if store is not None:
        return _Run(distinct, store, policy, progress).finish(limit, share)
    with open_store() as opened:
        return _Run(distinct, opened, policy, progress).finish(limit, share)


def _checked(job: object) -> CompileJob:
    if not isinstance(job, CompileJob):
        kind = type(job).__name__
        raise ConfigError(f"a job of type {kind}; give what a compiler's `job` or `read_jobs` made")
    return job


def get_or_compile(
    job: CompileJob, store: ArtifactStore, policy: CompilePolicy | None = None
) -> JobOutcome:
    """One job's artifact, and how it came. A failure is an outcome; nothing is raised for it."""
    began = time.monotonic()
    try:
        # A coordinator for each job, so that its counts are this job's.
        coordinator = CompileCoordinator(store, policy)
        path = coordinator.get_or_compile(job)
    except TierError as error:
        refused = local_root_refused(error)
        return JobOutcome(job.key, "failed", time.monotonic() - began, error=refused)
    except NeuronStoreError as error:
        return JobOutcome(job.key, "failed", time.monotonic() - began, error=error)
    except Exception as error:  # noqa: BLE001  (one job's bug must not stop the others)
        wrapped = CompileError(job.key, f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return JobOutcome(job.key, "failed", time.monotonic() - began, error=wrapped)
    counts = coordinator.counts
    outcome = next((name for name in ("compiled", "fetched") if counts.get(name)), "hit")
    return JobOutcome(job.key, outcome, time.monotonic() - began, path=path)


def read_jobs(file: str | os.PathLike[str], *, inline: bool = False) -> list[CompileJob]:
    """The jobs of a JSON-lines file.

    Each line is an object: `compiler`, `graph` (a path, relative to the file's own directory), and
    perhaps `flags` (a list or one string) and `extra` (an object of further key components).

    Args:
        file: its path.
        inline: read the graphs now, so that the jobs can run on a host that has not the files.

    Raises:
        ConfigError: names the file and the line that cannot be used.
    """
    path = Path(file)
    try:
        lines = read_input(path, "jobs file", _LARGEST_FILE).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"jobs file {path} cannot be read: {error}") from error
    jobs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            jobs.append(_job(line, path.parent, inline=inline))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    if not jobs:
        raise ConfigError(f"jobs file {path} has no jobs; write one JSON object a line")
    return jobs


def _job(line: str, folder: Path, *, inline: bool) -> CompileJob:
    try:
        said: Any = load_written_json(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error})") from None
    if not isinstance(said, dict):
        raise ConfigError('not an object such as {"compiler": "iree", "graph": "prefill.mlir"}')
    unknown = sorted(set(said) - _FIELDS)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    for name in ("compiler", "graph"):
        if not isinstance(said.get(name), str) or not said[name]:
            raise ConfigError(f"{name} is not a non-empty string")
    flags, extra = said.get("flags", []), said.get("extra", {})
    if not isinstance(flags, str | list):
        raise ConfigError("flags is neither a list nor a string")
    if not isinstance(extra, dict):
        raise ConfigError("extra is not an object")
    graph = folder / said["graph"]
    try:
        there = graph.exists()
    except OSError as error:
        raise ConfigError(f"graph {str(graph)[:200]} cannot be read: {error.strerror}") from error
    if not there:
        raise ConfigError(f"graph {str(graph)[:200]} is not there")
    compiler = get_compiler(said["compiler"])
    more = {"extra": extra} if extra else {}
    return compiler.job(read_graph(graph) if inline else graph, flags=flags, **more)


# -- how many at once ------------------------------------------------------------------


def available_memory() -> int | None:
    """Bytes that may still be used here: the kernel's estimate and the control group's limit.

    None where the system does not say.
    """
    found = [
        int(line.split()[1]) << 10
        for line in _read("/proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    for group in (_cgroup(), "/sys/fs/cgroup"):
        limit, used = (_read(f"{group}/memory.{name}").strip() for name in ("max", "current"))
        if limit.isdigit() and used.isdigit():
            # Page cache counts as used there, and is given back when a process asks for memory.
            cached = sum(
                int(line.split()[1])
                for line in _read(f"{group}/memory.stat").splitlines()
                if line.startswith("inactive_file ")
            )
            found.append(max(0, int(limit) - int(used) + cached))
    return min(found, default=None)


def worker_limit(wanted: int, memory_per_compile: int) -> int:
    """How many compiles may run at once: as many as wanted and as fit into memory, at least one."""
    memory = available_memory()
    if memory is None:
        return wanted
    return max(1, min(wanted, memory // memory_per_compile))


def _cgroup() -> str:
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return f"/sys/fs/cgroup{line[3:].rstrip('/')}"
    return "/sys/fs/cgroup"


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64 << 10)
    except OSError:
        return ""


def _default_workers() -> int:
    return min(load_settings().workers, len(os.sched_getaffinity(0)))


def _memory_of(job: CompileJob) -> int:
    return _MEMORY.get(str(job.components.get("compiler")), _MEMORY_OTHERWISE)


# -- the run ----------------------------------------------------------------------------


class _Run:
    def __init__(
        self,
        jobs: Sequence[CompileJob],
        store: ArtifactStore,
        policy: CompilePolicy,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._policy = policy
        self._progress = progress
        self._workers = 1
        self._began = time.monotonic()
        self._finished: queue.SimpleQueue[JobOutcome] = queue.SimpleQueue()
        self._running: dict[str, threading.Thread] = {}
        self._outcomes: dict[str, JobOutcome] = {}

    def finish(self, workers: int, memory: int) -> Precompiled:
        """Run all; at most `workers` at once, each with room for `memory` bytes."""
        self._workers = workers
        waiting = collections.deque(self._jobs)
        most = 0
        try:
            while waiting or self._running:
                while waiting and self._may_start(memory):
                    self._start(waiting.popleft())
                most = max(most, len(self._running))
                self._collect()
        except BaseException:
            interrupt_compiles(t.ident for t in self._running.values() if t.ident is not None)
            # One that waits for another process's compile is left behind; it is a daemon.
            for thread in self._running.values():
                thread.join(2.0)
            raise
        return Precompiled(
            tuple(self._outcomes[job.key] for job in self._jobs),
            time.monotonic() - self._began,
            most,
        )

    def _may_start(self, needed: int) -> bool:
        if len(self._running) >= self._workers:
            return False
        # The limit was right at the start; others on this host may have taken memory since.
        memory = available_memory() if self._running else None
        return memory is None or memory >= needed

    def _start(self, job: CompileJob) -> None:
        def work() -> None:
            try:
                outcome = get_or_compile(job, self._store, self._policy)
            except KeyboardInterrupt:
                return
            self._finished.put(outcome)

        thread = threading.Thread(target=work, name=f"precompile-{job.key[:8]}", daemon=True)
        self._running[job.key] = thread
        thread.start()

    def _collect(self) -> None:
        try:
            outcome = self._finished.get(timeout=_PAUSE)
        except queue.Empty:
            return
        self._running.pop(outcome.key).join()
        self._outcomes[outcome.key] = outcome
        if self._progress is not None:
            self._progress(self._now(outcome))

    def _now(self, last: JobOutcome) -> Progress:
        done, total = len(self._outcomes), len(self._jobs)
        return Progress(
            done=done,
            total=total,
            running=len(self._running),
            failed=sum(o.outcome == "failed" for o in self._outcomes.values()),
            eta=self._eta(total - done),
            last=last,
        )

    def _eta(self, remaining: int) -> float:
        # Hits take no time and say nothing about the compiles still to come.
        spent = [o.seconds for o in self._outcomes.values() if o.outcome != "hit"] or [0.0]
        return sum(spent) / len(spent) * remaining / max(1, min(self._workers, remaining))

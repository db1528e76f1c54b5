"""A soak as its first process sees it: servers, faults, signals, and the end. See `soak`."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from benchmarks.soak_findings import Judge, left_behind, right
from benchmarks.soak_journal import History, Journal
from benchmarks.soak_worker import BUCKET, PREFIX, Plan, main, open_tiers
from neuron_store import CompileCoordinator, CompileJob, TieredStore
from neuron_store.collecting import collect
from neuron_store.errors import CollectorBusy, NeuronStoreError
from neuron_store.policy import CompilePolicy
from neuron_store_backends import _sweeping
from tests.servers.faults import Fault, FaultProxy, Faults
from tests.servers.moto import CREDENTIALS, MotoServer
from tests.servers.seaweed import client, seaweed

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
_SLOW = b"<Error><Code>SlowDown</Code></Error>"
_ERROR = b"<Error><Code>InternalError</Code></Error>"
# Kind, chance, method, part of the path, what the proxy does.
_FAULTS: tuple[tuple[str, float, str, str, dict[str, Any]], ...] = (
    ("drop", 0.01, "", "", {"action": "drop"}),
    ("500", 0.01, "", "", {"action": "answer", "status": "500 Internal", "body": _ERROR}),
    ("503", 0.01, "", "", {"action": "answer", "status": "503 Slow Down", "body": _SLOW}),
    ("409", 0.1, "PUT", "/index/", {"action": "answer", "status": "409 C", "body": _CONFLICT}),
    ("lost reply", 0.015, "", "", {"action": "lose_reply"}),
    ("truncated", 0.02, "GET", "", {"action": "truncate"}),
    ("trickle", 0.004, "GET", "", {"action": "trickle"}),
    ("corrupt", 0.005, "GET", "/payload/", {"action": "corrupt"}),
)


class RandomFaults(Faults):
    """Draws for each request; now and then nothing works for seconds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(f"{seed}:faults")
        self.counts: collections.Counter[str] = collections.Counter()
        self.requests = 0
        self.quiet = True
        self._out_until = 0.0

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.requests += 1
            if self.quiet:
                return None
            if time.monotonic() < self._out_until or self._rng.random() < 0.0002:
                if time.monotonic() >= self._out_until:
                    self._out_until = time.monotonic() + self._rng.uniform(1, 4)
                self.counts["outage"] += 1
                return Fault("drop")
            for kind, chance, verb, part, facts in _FAULTS:
                if verb in method and part in path and self._rng.random() < chance:
                    self.counts[kind] += 1
                    return Fault(**facts)
        return None


@attrs.define
class _Slot:
    worker: int
    life: int
    process: Any


class Soak:
    def __init__(self, plan: Plan, workers: int) -> None:
        self.plan = plan
        self.rng = random.Random(f"{plan.seed}:signals")
        self.journal = Journal(plan.journal)
        # Forked from a small process without threads: a life begins within milliseconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.soak_worker", "botocore.session"])
        self.slots = [_Slot(n, -1, None) for n in range(workers)]
        self.stopped: dict[int, float] = {}

    def run(self) -> Iterator[str]:
        """Until the time is over and all workers have ended."""
        for slot in self.slots:
            self._spawn(slot)
        kill_at = stop_at = time.monotonic() + 3
        try:
            while time.monotonic() < self.plan.end:
                time.sleep(0.05)
                now = time.monotonic()
                self._go_on(now)
                if now >= kill_at:
                    kill_at = now + self.rng.expovariate(1 / 1.5)
                    # The first on each node live throughout: by them leaks are measured.
                    self._kill(self.rng.choice(self.slots[self.plan.nodes :]))
                if now >= stop_at:
                    stop_at = now + self.rng.expovariate(1 / 2.0)
                    self._stop(self.rng.choice(self.slots), now)
                for slot in self.slots:
                    if not slot.process.is_alive() and now < self.plan.end - 1:
                        if slot.process.exitcode != -signal.SIGKILL:
                            yield f"worker {slot.worker} ended with {slot.process.exitcode}"
                        self._spawn(slot)
            self._go_on(float("inf"))
            yield from self._wait_for_all(200.0)
        finally:
            for slot in self.slots:
                slot.process.kill()
                slot.process.join()

    def _wait_for_all(self, seconds: float) -> Iterator[str]:
        until = time.monotonic() + seconds
        for slot in self.slots:
            slot.process.join(max(0.0, until - time.monotonic()))
            if slot.process.is_alive():
                os.kill(slot.process.pid, signal.SIGUSR1)
                time.sleep(1.0)
                where = Path(self.plan.folder, "stacks", f"{slot.worker}.{slot.life}").read_text()
                yield f"worker {slot.worker} did not come to an end:\n{where}"
            elif slot.process.exitcode not in {0, -signal.SIGKILL}:
                yield f"worker {slot.worker} ended with {slot.process.exitcode}"

    def _spawn(self, slot: _Slot) -> None:
        slot.life += 1
        slot.process = self._context.Process(target=main, args=(self.plan, slot.worker, slot.life))
        slot.process.start()

    def _kill(self, slot: _Slot) -> None:
        if slot.process.is_alive():
            self.journal.say("kill", target=slot.worker, target_life=slot.life)
            slot.process.kill()
            slot.process.join()
            self.stopped.pop(slot.worker, None)

    def _stop(self, slot: _Slot, now: float) -> None:
        if slot.process.is_alive() and slot.worker not in self.stopped:
            self.journal.say("stop", target=slot.worker, target_life=slot.life)
            os.kill(slot.process.pid, signal.SIGSTOP)
            self.stopped[slot.worker] = now + self.rng.uniform(0.2, 6.0)

    def _go_on(self, now: float) -> None:
        for worker, until in list(self.stopped.items()):
            if now >= until:
                del self.stopped[worker]
                process = self.slots[worker].process
                if process.is_alive():
                    os.kill(process.pid, signal.SIGCONT)


def settle(plan: Plan, history: History) -> Iterator[str]:
    """After the storm: nothing lost, every key to be had, nothing left behind."""
    judge = Judge(plan, history)
    yield from judge.findings()
    tiers = [open_tiers(plan, node) for node in range(plan.nodes)]
    shared = tiers[0][1:]
    yield from judge.lost(shared)
    for each in tiers:
        coordinator = CompileCoordinator(TieredStore(each), CompilePolicy(timeout=60.0))
        yield from _stuck(plan, coordinator)
    # A dead sweeper's mark keeps others from its key for ten times that. All are dead by now.
    _sweeping.DEAD_SECONDS = plan.grace / 10
    time.sleep(plan.grace + 1)
    for tier in [*(each[0] for each in tiers), *shared]:
        yield from _swept(plan, tier)
    yield from left_behind(plan)


def _stuck(plan: Plan, coordinator: CompileCoordinator) -> Iterator[str]:
    done: list[str] = []
    wrong: list[str] = []

    def get_all() -> None:
        for key in plan.keys:
            try:
                path = coordinator.get_or_compile(CompileJob(key, _Compile(plan.seed, key)))
            except NeuronStoreError as error:
                wrong.append(f"{key} cannot be had: {error}")
            else:
                if not right(plan, key, path):
                    wrong.append(f"{key} is wrong in {path}")
            done.append(key)

    thread = threading.Thread(target=get_all, daemon=True)
    thread.start()
    thread.join(120.0)
    yield from wrong
    if thread.is_alive():
        yield f"stuck: {plan.keys[len(done)]} was not had within two minutes"


@attrs.frozen
class _Compile:
    seed: int
    key: str

    def __call__(self, workdir: Path) -> None:
        from benchmarks.soak_worker import files_of

        for name, data in files_of(self.seed, self.key).items():
            (workdir / name).write_bytes(data)


def _swept(plan: Plan, tier: Any) -> Iterator[str]:
    until = time.monotonic() + 60
    while True:
        try:
            collect(tier, grace=plan.grace)
            break
        except CollectorBusy as error:
            if time.monotonic() > until:
                yield f"{tier.name}: {error}"
                return
    found = collect(tier, grace=plan.grace, dry_run=True)
    for removal in found.removals:
        yield f"{tier.name}: still there after a sweep: {removal}"


@contextlib.contextmanager
def server(kind: str, folder: Path) -> Iterator[str]:
    if kind == "moto":
        with MotoServer() as moto:
            yield moto.url
    else:
        with seaweed(folder) as url:
            yield url


def soak(
    seconds: float, seed: int, *, workers: int, keys: int, grace: float, kind: str, folder: str
) -> int:
    """Run it, and print what happened. Returns the number of findings."""
    os.environ.update(CREDENTIALS)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for name in ("outside", "posix", "server", "stacks", "work"):
        Path(folder, name).mkdir()
    names_of_keys = tuple(hashlib.md5(f"{seed}:{n}".encode()).hexdigest() for n in range(keys))
    faults = RandomFaults(seed)
    with server(kind, Path(folder, "server")) as url, FaultProxy(url, faults) as proxy:
        client(url).create_bucket(Bucket=BUCKET)
        client(url).put_object(Bucket=BUCKET, Key="tier/beside", Body=b"not ours")
        plan = Plan(folder, seed, time.monotonic() + seconds, proxy.url, names_of_keys, 4, grace)
        faults.quiet = False
        findings = list(Soak(plan, workers).run())
        faults.quiet = True
        history = History(plan.journal)
        findings += settle(plan, history)
        listed = client(url).get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        names = {each["Key"] for page in listed for each in page.get("Contents", ())}
        strange = {n for n in names if not n.startswith(f"{PREFIX}/")} ^ {"tier/beside"}
        findings += [f"outside the prefix, or gone from there: {name}" for name in strange]
    report(plan, history, faults, findings)
    return len(findings)


def report(plan: Plan, history: History, faults: RandomFaults, findings: list[str]) -> None:
    def row(what: str, *values: object) -> None:
        print(f"{what:<28}" + "  ".join(map(str, values)))

    row("operations", len(history.operations))
    for name, count in collections.Counter(op.name for op in history.operations).most_common():
        ends = collections.Counter(op.outcome for op in history.operations if op.name == name)
        row(f"  {name}", f"{count:>7}", ", ".join(f"{k} {v}" for k, v in ends.most_common()))
    row("requests to S3", faults.requests)
    row("faults injected", sum(faults.counts.values()))
    for kind, count in faults.counts.most_common():
        row(f"  {kind}", f"{count:>7}")
    row("kills, stops", len(history.of("kill")), len(history.of("stop")))
    row("compiles, failed ones", len(history.of("compile")), len(history.of("failed")))
    tiers = collections.Counter(e["tier"] for e in history.of("created"))
    row("created by promotes", dict(tiers))
    row("removals begun", dict(collections.Counter(e["tier"] for e in history.of("remove"))))
    row(
        "evicted, swept by gc",
        *(sum(e[w] for e in history.of("collected")) for w in ("evicted", "swept")),
    )
    row("damaged on purpose", len(history.of("damage")))
    row("given, then removed", len(history.of("vanished")))
    for who, (warm, end) in Judge(plan, history).vitals().items():
        shown = (f"{w} {warm[w]:.0f} -> {end[w]:.0f}" for w in ("fds", "threads"))
        memory = f"rss {warm['rss'] / 2**20:.0f} -> {end['rss'] / 2**20:.0f} MiB"
        row(f"worker {who}", *shown, memory)
    row("findings", len(findings))
    for finding in findings[:50]:
        print(f"  {finding}")

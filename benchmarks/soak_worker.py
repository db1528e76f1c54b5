"""One process of a soak: does what its seed says until it is killed or the time is over."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import struct
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import attrs

from benchmarks.soak_journal import Journal
from neuron_store import CompileCoordinator, CompileJob, Publication, TieredStore, tier_health
from neuron_store.artifact import is_key
from neuron_store.collecting import collect
from neuron_store.errors import (
    CollectorBusy,
    CompileTimeout,
    NeuronStoreError,
    PromoteError,
)
from neuron_store.policy import CompilePolicy
from neuron_store.scrub import Scrub, by_key
from neuron_store.scrub_progress import ScrubProgress
from neuron_store_backends import _guarding, _sweeping
from neuron_store_backends._options import Times
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from neuron_store_backends.s3 import S3Store

BUCKET, PREFIX = "soak", "tier/below"


@attrs.frozen
class Plan:
    """All that a worker must know."""

    folder: str
    seed: int
    end: float
    """`time.monotonic()`, which is one clock for all processes of a machine."""
    endpoint: str
    keys: tuple[str, ...]
    nodes: int
    grace: float
    lease_ttl: float = 3.0

    @property
    def journal(self) -> str:
        return f"{self.folder}/journal"

    def leased(self, key: str) -> bool:
        """Half of the keys are compiled once in the fleet."""
        return self.keys.index(key) % 2 == 0


def files_of(seed: int, key: str) -> dict[str, bytes]:
    """What the compiler makes of a key: the same bytes whoever compiles, whenever."""
    rng = random.Random(f"{seed}:{key}")
    payload = rng.randbytes(rng.choice((200, 6_000, 60_000, 400_000)))
    neff = struct.pack("<QQQ", 2, 1024, len(payload)).ljust(1024, b"\0") + payload
    about = {"version": 0, "cache_key": key, "output_count": 1}
    return {
        "graph.hlo": rng.randbytes(5_000),
        f"graph_{key}.neff": neff,
        ".artifact_metadata_v0.json": json.dumps(about).encode(),
        ".compilation_complete": f"completed:1.0\nneff_size:{len(neff)}\n".encode(),
    }


def digests_of(seed: int, key: str) -> dict[str, str]:
    files = files_of(seed, key)
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def open_tiers(plan: Plan, node: int) -> tuple[LocalStore, PosixStore, S3Store]:
    # Everything that waits for the dead waits in proportion to the soak, not to a day.
    _guarding.TTL = 6.0
    _sweeping.SWEEP_SECONDS, _sweeping.DEAD_SECONDS = 5.0, 30.0
    tier_health._FIRST_REST, tier_health._LONGEST_REST = 2.0, 5.0
    times = Times(connect_timeout=3, read_timeout=4, timeout=12, stall_timeout=12)
    far = S3Store(f"{BUCKET}/{PREFIX}", endpoint_url=plan.endpoint, times=times, name="s3")
    far.grace = plan.grace
    return (
        LocalStore(f"{plan.folder}/node{node}", name="local"),
        PosixStore(f"{plan.folder}/posix", name="posix"),
        far,
    )


class _Words(logging.Handler):
    """Notes in the journal what the library tells of leases, promotes and tiers in trouble."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(logging.WARNING)
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        key = next((k for k in self._worker.plan.keys if k in text), self._worker.key)
        self._worker.journal.say("warning", key=key, text=text[:300])


class _Told(TieredStore):
    """Notes every publication in a shared tier."""

    journal: Journal

    def promote(self, key: str, to: Any = None, **more: Any) -> Any:
        began = time.monotonic()
        done: Any = {}
        try:
            done = super().promote(key, to, **more)
        except PromoteError as error:
            done = error.done
            for tier, why in error.failures.items():
                self.journal.say("unpromoted", tier=tier, key=key, why=type(why).__name__)
            raise
        finally:
            for tier, answer in done.items():
                if answer in {Publication.CREATED, Publication.REPAIRED}:
                    self.journal.say("created", tier=tier, key=key, began=began)
                elif answer is Publication.CONFLICT:
                    self.journal.say("conflict", tier=tier, key=key)
        return done


class Worker:
    def __init__(self, plan: Plan, worker: int, life: int) -> None:
        self.plan, self.node, self.key = plan, worker % plan.nodes, ""
        self.rng = random.Random(f"{plan.seed}:{worker}:{life}")
        self.journal = Journal(plan.journal, worker, life, self.node)
        self.tiers = open_tiers(plan, self.node)
        self.store = _Told(self.tiers, deadline=10.0, lock_timeout=60.0)
        self.store.journal = self.journal
        policy = CompilePolicy(timeout=150.0, promote=True, lease_ttl=plan.lease_ttl)
        self.coordinators = {
            leased: CompileCoordinator(self.store, attrs.evolve(policy, fleet_lease=leased))
            for leased in (False, True)
        }
        self.work = Path(plan.folder, "work", f"{worker}.{life}")
        self.work.mkdir()
        logging.getLogger("neuron_store").addHandler(_Words(self))
        logging.getLogger("neuron_store_backends").addHandler(_Words(self))

    def run(self) -> None:
        operations = {
            self.get: 60,
            self.promote: 10,
            self.fetch: 10,
            self.delete: 6,
            self.collect: 6,
            self.scrub: 5,
            self.damage: 1,
        }
        noted = 0.0
        while time.monotonic() < self.plan.end:
            operation = self.rng.choices(list(operations), list(operations.values()))[0]
            # A few are hot, so that processes meet.
            keys = self.plan.keys
            self.key = keys[int(len(keys) * self.rng.random() ** 2)]
            name = operation.__name__
            self.journal.say("begin", op=name, key=self.key)
            try:
                outcome = operation(self.key)
            except NeuronStoreError as error:
                outcome = type(error).__name__
                what = "stuck" if isinstance(error, CompileTimeout) else "refused"
                self.journal.say(what, key=self.key, text=str(error)[:400])
            except Exception as error:
                outcome = "unexpected"
                text = f"{name}: {type(error).__name__}: {error}"
                self.journal.say("unexpected", key=self.key, text=text[:600])
            self.journal.say("end", op=name, outcome=outcome)
            if time.monotonic() - noted > 2.0:
                noted = time.monotonic()
                self.vitals()
        self.vitals()
        self.store.close()
        shutil.rmtree(self.work)

    def vitals(self) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        fds = len(os.listdir("/proc/self/fd"))
        self.journal.say("vitals", fds=fds, rss=resident, threads=threading.active_count())

    # -- operations -----------------------------------------------------------------------------

    def get(self, key: str) -> str:
        job = CompileJob(key, _Compile(self.plan, key, self.journal, self.rng.random()))
        began = time.monotonic()
        path = self.coordinators[self.plan.leased(key)].get_or_compile(job)
        return self.check(key, path, began)

    def check(self, key: str, path: Path, began: float) -> str:
        """Whether the bytes that this process was just given are the right ones."""
        outcome = "ok"
        for name, digest in digests_of(self.plan.seed, key).items():
            try:
                data = (path / name).read_bytes()
            except FileNotFoundError:
                # Removed before it could be read. Whether anybody did that is for the end to say.
                private = self.work in path.parents
                self.journal.say("vanished", key=key, name=name, began=began, private=private)
                return "vanished"
            if hashlib.sha256(data).hexdigest() != digest:
                self.journal.say("wrong", key=key, name=name, size=len(data))
                outcome = "wrong"
        return outcome

    def promote(self, key: str) -> str:
        self.store.promote(key)
        return "ok"

    def fetch(self, key: str) -> str:
        into = self.work / uuid.uuid4().hex
        into.mkdir()
        try:
            tier = self.rng.choice(self.tiers)
            began = time.monotonic()
            tier.fetch(key, into)
            return self.check(key, into, began)
        finally:
            shutil.rmtree(into)

    def remove(self, tier: str, key: str) -> None:
        self.journal.say("remove", tier=tier, key=key)

    def delete(self, key: str) -> str:
        tier = self.rng.choices(self.tiers, (4, 1, 1))[0]
        self.remove(tier.name, key)
        if tier.delete(key):
            return "ok"
        self.journal.say("kept", tier=tier.name, key=key)
        return "nothing"

    def collect(self, key: str) -> str:
        tier = self.rng.choices(self.tiers, (2, 1, 1))[0]

        def about(name: str) -> None:
            if is_key(name):
                self.journal.say("remove", tier=tier.name, key=name, by="gc")

        limit = {"max_size": self.rng.randrange(1_000_000, 8_000_000)}
        if self.rng.random() < 0.5:
            limit = {"older_than": self.rng.randrange(8, 40)}
        try:
            found = collect(tier, grace=self.plan.grace, min_age=4.0, progress=about, **limit)
        except CollectorBusy:
            return "busy"
        gone = [r.kind for r in found.removals if r.outcome == "removed"]
        for removal in found.removals:
            # A local one may have been hidden for a moment, and put back.
            if removal.outcome == "kept" and removal.kind == "artifact" and tier.name != "local":
                self.journal.say("kept", tier=tier.name, key=removal.key)
        evicted = gone.count("artifact")
        swept = len(gone) - evicted
        self.journal.say("collected", tier=tier.name, evicted=evicted, swept=swept)
        return "ok"

    def scrub(self, key: str) -> str:
        with contextlib.closing(ScrubProgress()) as progress:
            work = by_key([(tier, key) for tier in self.tiers])
            for found in Scrub(self.store, work, progress=progress, repair=True).run(1):
                for seen in found:
                    if seen.outcome in {"corrupt", "repaired"}:
                        self.remove(seen.tier, key)
                        facts = {"tier": seen.tier, "detail": seen.detail[:300]}
                        self.journal.say("corrupt", key=key, outcome=seen.outcome, **facts)
        return "ok"

    def damage(self, key: str) -> str:
        """A bad sector of the shared directory. Keys with leases are spared: their bound is
        stricter than what a damaged first tier allows.
        """
        if self.plan.leased(key):
            return "spared"
        self.journal.say("damage", tier="posix", key=key)
        self.remove("posix", key)
        try:
            with open(f"{self.plan.folder}/posix/{key}/graph_{key}.neff", "r+b") as stream:
                if self.rng.random() < 0.5:
                    stream.truncate(100)
                else:
                    stream.seek(1024)
                    stream.write(b"\xff" * 8)
        except FileNotFoundError:
            return "nothing"
        return "ok"


@attrs.frozen
class _Compile:
    plan: Plan
    key: str
    journal: Journal
    luck: float

    def __call__(self, workdir: Path) -> None:
        self.journal.say("compile", key=self.key)
        time.sleep(0.02 + 0.3 * self.luck**3)
        if self.luck < 0.03:
            self.journal.say("failed", key=self.key)
            raise RuntimeError("the compiler has a bad day")
        for name, data in files_of(self.plan.seed, self.key).items():
            (workdir / name).write_bytes(data)


def main(plan: Plan, worker: int, life: int) -> None:
    """The whole life of a process."""
    outside = f"{plan.folder}/outside"
    os.environ.update(HOME=outside, TMPDIR=outside)
    os.chdir(outside)
    # Where it stands when it does not come to an end, for the report.
    stacks = open(f"{plan.folder}/stacks/{worker}.{life}", "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sys.stderr = stacks
    Worker(plan, worker, life).run()

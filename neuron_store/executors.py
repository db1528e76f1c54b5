"""Hands precompile jobs to a cluster that exists already: Ray or Dask.

Jobs go out through the scheduler; artifacts never come back that way. Each worker publishes what it
made into the shared tiers, where everybody finds it, and returns a few words.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store._clusters import Patience, check_ray
from neuron_store.batch import JobOutcome, Precompiled, Progress, get_or_compile
from neuron_store.errors import CompileError, ConfigError, MissingExtra, NeuronStoreError
from neuron_store.opening import open_store
from neuron_store.registry import check_tier_url
from neuron_store.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from neuron_store.job import CompileJob
    from neuron_store.tier_url import TierURL

__all__ = ["EXECUTORS", "precompile_on"]

EXECUTORS = ("dask", "ray")
"""Names that `precompile_on` takes; each is an extra."""

_PAUSE = 0.1


def precompile_on(
    executor: str,
    jobs: Iterable[CompileJob],
    *,
    tiers: Sequence[str | TierURL] | None = None,
    address: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Precompiled:
    """Have every job's artifact in the shared tiers, compiled on a cluster where none has it.

    A worker asks every tier before it compiles, with the settings of its own environment for all
    but `tiers`. How many run at once is the cluster's affair: a job asks for one of its cores.

    Args:
        executor: `ray` or `dask`.
        jobs: they must pickle, and their graphs be readable there: `read_jobs(..., inline=True)`.
        tiers: URLs of the shared tiers; None: those in the settings.
        address: the cluster's; None: the one this process is connected to, else what `RAY_ADDRESS`
            or `DASK_SCHEDULER_ADDRESS` say.
        progress: called in this thread after each job.

    Returns:
        The summary; no outcome has a path, since nothing was brought to this node.

    Raises:
        ConfigError: an unknown executor, no shared tier that can be written, no cluster at the
            address, or none of its workers there for `NEURON_LIBTORCH_COMPILATION_TIMEOUT`.
        MissingExtra: the executor's package is not installed.
    """
    runners = {"ray": _on_ray, "dask": _on_dask}
    if executor not in runners:
        raise ConfigError(f"no executor {executor!r}; known: {', '.join(EXECUTORS)}")
    settings = load_settings()
    shared = tuple(check_tier_url(t) for t in (settings.tiers if tiers is None else tiers))
    if not shared:
        raise ConfigError(
            f"executor {executor} needs a shared tier, where the results meet; set "
            "NEURON_STORE_TIERS to one that every worker reaches"
        )
    if all(url.read_only for url in shared):
        told = ", ".join(url.location for url in shared)
        raise ConfigError(
            f"executor {executor}: every shared tier is read-only ({told}), and the results meet "
            "in one; give a tier that can be written"
        )
    distinct = list({job.key: job for job in jobs}.values())
    began = time.monotonic()
    outcomes: dict[str, JobOutcome] = {}
    # Closed whatever happens, so that an interrupt here cancels what still runs there.
    with contextlib.closing(
        runners[executor](distinct, shared, address, settings.policy.timeout)
    ) as finished:
        for outcome in finished:
            outcomes[outcome.key] = outcome
            if progress is not None:
                progress(_now(outcomes, len(distinct), time.monotonic() - began, outcome))
    return Precompiled(
        tuple(outcomes[job.key] for job in distinct), time.monotonic() - began, len(distinct)
    )


def _now(outcomes: dict[str, JobOutcome], total: int, seconds: float, last: JobOutcome) -> Progress:
    counts = collections.Counter(o.outcome for o in outcomes.values())
    remaining = total - len(outcomes)
    return Progress(
        done=len(outcomes),
        total=total,
        running=remaining,
        failed=counts["failed"],
        eta=seconds / len(outcomes) * remaining,
        last=last,
    )


def _compile_there(job: CompileJob, tiers: tuple[TierURL, ...]) -> JobOutcome:
    """Runs on a worker: the artifact in every shared tier, and how that went."""
    try:
        with open_store(tiers) as store:
            outcome = get_or_compile(job, store)
            if outcome.error is None:
                store.promote(job.key)
    except NeuronStoreError as error:
        return JobOutcome(job.key, "failed", 0.0, error=error)
    return attrs.evolve(outcome, path=None)


def _lost(job: CompileJob, error: object) -> JobOutcome:
    reason = f"its worker was lost or failed: {type(error).__name__}: {error}"
    return JobOutcome(job.key, "failed", 0.0, error=CompileError(job.key, reason))


def _package(name: str, executor: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(f"executor {executor}", executor, error.name or name) from error


def _on_ray(
    jobs: Sequence[CompileJob], tiers: tuple[TierURL, ...], address: str | None, limit: float
) -> Generator[JobOutcome, None, None]:
    ray = _package("ray", "ray")
    ours = not ray.is_initialized()
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if ours:
        check_ray(where)
        try:
            ray.init(address=where, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at {where} ({error}); start one, or give its address"
            ) from error
    # A job asks for one of the cluster's CPUs, and a head alone may offer none.
    patience = Patience(
        f"Ray cluster {where}", lambda: ray.cluster_resources().get("CPU", 0), limit
    )
    waiting: dict[Any, CompileJob] = {}
    try:
        task = ray.remote(num_cpus=1, max_retries=1)(_compile_there)
        waiting = {task.remote(job, tiers): job for job in jobs}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=patience.first_look)
            if not ready:
                patience.wait()
                continue
            job = waiting.pop(ready[0])
            try:
                yield ray.get(ready[0])
            except ray.exceptions.RayError as error:
                yield _lost(job, error)
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
        if ours:
            ray.shutdown()


def _on_dask(
    jobs: Sequence[CompileJob], tiers: tuple[TierURL, ...], address: str | None, limit: float
) -> Generator[JobOutcome, None, None]:
    distributed = _package("distributed", "dask")
    client, ours = _dask_client(distributed, address)
    waiting: dict[Any, CompileJob] = {}
    try:
        # Not "pure": a key that Dask remembers from an earlier run says nothing about the tiers.
        waiting = {client.submit(_compile_there, job, tiers, pure=False): job for job in jobs}
        patience = Patience(
            f"Dask scheduler {client.scheduler.address}", lambda: len(client.nthreads()), limit
        )
        finished = distributed.as_completed(list(waiting), loop=client.loop)
        while not finished.is_empty():
            if not finished.has_ready():
                patience.wait()
                time.sleep(_PAUSE)
                continue
            future = next(finished)
            job = waiting.pop(future)
            error = future.exception()
            yield _lost(job, error) if error is not None else future.result()
    finally:
        for future in waiting:
            future.cancel()
        if ours:
            client.close()


def _dask_client(distributed: Any, address: str | None) -> tuple[Any, bool]:
    if address is None:
        try:
            return distributed.default_client(), False
        except ValueError:
            address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    if not address:
        raise ConfigError(
            "no Dask cluster: this process has no client; give the scheduler's address, or set "
            "DASK_SCHEDULER_ADDRESS"
        )
    try:
        return distributed.Client(address, timeout=30, set_as_default=False), True
    except (OSError, ValueError) as error:
        raise ConfigError(f"no Dask scheduler at {address}: {error}") from error

"""Each cluster is a local one of its own process, so that its threads and warnings stay there."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys

import pytest

from neuron_store import _clusters
from neuron_store._clusters import Patience, check_ray
from neuron_store.errors import ConfigError, MissingExtra
from neuron_store.executors import precompile_on
from neuron_store.neuron_layout import foreign_artifact
from neuron_store.opening import open_store

WORK = """
import json, os, sys
from functools import partial
from pathlib import Path

from neuron_store import _clusters
from neuron_store._clusters import Patience, check_ray
from neuron_store.errors import CompileError
from neuron_store.executors import precompile_on
from neuron_store.job import CompileJob


def fill(text, workdir):
    (workdir / "x.bin").write_text(text)


def fail(workdir):
    raise CompileError("bad", "no", permanent=True, log_tail="last words")


def crash(workdir):
    os.kill(os.getpid(), 9)


def run(executor, shared, **more):
    jobs = [CompileJob(f"k{n}", partial(fill, str(n))) for n in range(3)]
    jobs += [CompileJob("bad", fail), jobs[0]]
    jobs += more.pop("also", [])
    told = []
    progress = lambda p: told.append((p.done, p.total))
    done = precompile_on(executor, jobs, tiers=[shared], progress=progress, **more)
    again = precompile_on(executor, jobs[:3], tiers=[shared], **more)
    print("RESULT", json.dumps({
        "outcomes": [o.outcome for o in done.outcomes],
        "paths": [o.path for o in done.outcomes],
        "error": done.outcomes[3].error.log_tail,
        "told": told[-1],
        "again": [o.outcome for o in again.outcomes],
    }))


def alone(executor, shared, **more):
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("neuron_store").addHandler(handler)
    os.environ["NEURON_LIBTORCH_COMPILATION_TIMEOUT"] = "8"
    try:
        precompile_on(executor, [CompileJob("k", partial(fill, ""))], tiers=[shared], **more)
    except Exception as error:
        said += [type(error).__name__, str(error)]
    print("RESULT", json.dumps(said))
"""
DASK = """
from distributed import Client, LocalCluster
from work import run

if __name__ == "__main__":
    import sys

    options = dict(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
    with LocalCluster(**options) as cluster:
        if sys.argv[2] == "address":
            run("dask", sys.argv[1], address=cluster.scheduler_address)
        else:
            with Client(cluster):
                run("dask", sys.argv[1])
"""
# Ray's sockets need a short path, and its store of objects a size that fits into any /dev/shm.
RAY = """
import ray
from work import CompileJob, crash, run

if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=place,
                 object_store_memory=100 << 20)
        run("ray", sys.argv[1], also=[CompileJob("crash", crash)])
        ray.shutdown()
"""


def run_cluster(tmp_path, script, *arguments):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "main.py").write_text(script)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_CACHE_ROOT": str(tmp_path / "node"),
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "240",
        "NEURON_STORE_COMPILE_ATTEMPTS": "1",
    }
    done = subprocess.run(
        [sys.executable, "main.py", tmp_path / "shared", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


# A cluster in which nobody works. What is said and raised is printed.
ALONE_DASK = """
from distributed import LocalCluster
from work import alone

if __name__ == "__main__":
    import sys

    with LocalCluster(n_workers=0, dashboard_address=None, host="127.0.0.1") as cluster:
        alone("dask", sys.argv[1], address=cluster.scheduler_address)
"""
ALONE_RAY = """
import ray
from neuron_store._clusters import check_ray
from work import alone

if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False, _temp_dir=place,
                 object_store_memory=100 << 20)
        check_ray(ray.get_runtime_context().gcs_address)
        alone("ray", sys.argv[1])
        ray.shutdown()
"""


def check(result, tmp_path, extra=()):
    assert result["outcomes"] == ["compiled", "compiled", "compiled", "failed", *extra]
    assert set(result["paths"]) == {None}
    assert result["error"] == "last words"
    assert result["told"] == [4 + len(extra)] * 2
    assert result["again"] == ["hit"] * 3
    # They met in the shared tier, and a node that compiled nothing finds them there.
    with open_store([tmp_path / "shared"], local=tmp_path / "other") as store:
        assert sorted(store.shared[0].keys()) == ["k0", "k1", "k2"]
        assert (store.get("k2") / "x.bin").read_text() == "2"
        assert foreign_artifact(store.get("k2"), "k2") is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="extra `dask`")
@pytest.mark.parametrize("how", ["client", "address"])
def test_jobs_run_on_a_dask_cluster_and_results_meet_in_the_shared_tier(tmp_path, how):
    check(run_cluster(tmp_path, DASK, how), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="extra `ray`")
def test_jobs_run_on_a_ray_cluster_and_a_lost_worker_is_a_failed_job(tmp_path):
    check(run_cluster(tmp_path, RAY), tmp_path, extra=["failed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package", "where"),
    [
        (ALONE_DASK, "distributed", "Dask scheduler tcp://127.0.0.1:"),
        (ALONE_RAY, "ray", "Ray cluster auto"),
    ],
)
def test_a_cluster_in_which_nobody_works_is_named_and_given_up(tmp_path, script, package, where):
    pytest.importorskip(package)
    warning, kind, error = run_cluster(tmp_path, script)
    assert warning.startswith(f"no workers yet at {where}")
    assert kind == "ConfigError"
    assert error.startswith(f"no workers at {where}")
    assert "within 8 s; start workers" in error


def test_a_cluster_that_gets_its_worker_late_is_waited_for(caplog):
    workers = iter([0, 0, 1, 1])
    patience = Patience("here", lambda: next(workers), limit=3600)
    patience.first_look = 0.0
    with caplog.at_level(logging.WARNING, logger="neuron_store"):
        for _ in range(4):
            patience.wait()
    assert [r.getMessage() for r in caplog.records] == [
        "no workers yet at here; waiting for one, at most 3600 s"
    ]


def test_a_cluster_that_does_not_say_has_no_workers():
    def lost():
        raise OSError("scheduler gone")

    patience = Patience("here", lost, limit=0.0)
    patience.first_look = 0.0
    with pytest.raises(ConfigError, match="no workers at here within 0 s"):
        patience.wait()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1"])
def test_a_dead_ray_address_is_refused_before_ray_tries_it(address, monkeypatch):
    monkeypatch.setattr(_clusters, "_try_ray", lambda address: pytest.fail("tried"))
    with pytest.raises(ConfigError, match="no Ray cluster at ") as caught:
        check_ray(address)
    assert address in str(caught.value)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "local"])
def test_what_is_no_address_of_a_ray_cluster_is_refused(address, monkeypatch):
    monkeypatch.setattr(_clusters, "_try_ray", lambda address: pytest.fail("tried"))
    with pytest.raises(ConfigError, match=f"Ray address '{address}'"):
        check_ray(address)


@pytest.mark.slow
def test_a_port_at_which_no_ray_answers_is_given_up(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(_clusters, "_CONNECT_TIMEOUT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"{address} \(no answer within 1 s\)"):
            check_ray(address)


@pytest.mark.slow
def test_a_reason_that_ray_gives_is_repeated(monkeypatch):
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"odd://x \(.*\w"):
        check_ray("odd://x")


def test_only_read_only_tiers_are_refused_at_the_start(tmp_path):
    tiers = [f"{tmp_path}/a?read_only=1", f"posix://{tmp_path}/b?read_only=1"]
    with pytest.raises(ConfigError, match="every shared tier is read-only"):
        precompile_on("dask", [], tiers=tiers, address="tcp://127.0.0.1:1")


def test_an_unknown_executor_is_refused():
    with pytest.raises(ConfigError, match="no executor 'slurm'; known: dask, ray"):
        precompile_on("slurm", [])


def test_without_a_shared_tier_there_is_nowhere_to_meet(monkeypatch):
    monkeypatch.delenv("NEURON_STORE_TIERS", raising=False)
    monkeypatch.delenv("NEURON_LIBTORCH_REMOTE_CACHE", raising=False)
    with pytest.raises(ConfigError, match="NEURON_STORE_TIERS"):
        precompile_on("dask", [])


@pytest.mark.parametrize(("executor", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, executor, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"neuron-store\[{executor}\]"):
        precompile_on(executor, [], tiers=[str(tmp_path)])

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from neuron_store import batch as module
from neuron_store.artifact import Artifact
from neuron_store.batch import available_memory, precompile, read_jobs, worker_limit
from neuron_store.errors import CompileError, ConfigError
from neuron_store.job import CompileJob
from neuron_store.neuron_layout import list_files
from neuron_store.opening import open_store
from neuron_store.policy import CompilePolicy

STUB = Path(__file__).parent / "stubs" / "neuronx-cc"
POLICY = CompilePolicy()
GRAPH = "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }\n"


class Gauge:
    """Counts how many compiles run at once."""

    def __init__(self):
        self.lock = threading.Lock()
        self.now = self.most = self.total = 0

    def __enter__(self):
        with self.lock:
            self.now += 1
            self.total += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_):
        with self.lock:
            self.now -= 1


def fill(gauge, meet, workdir):
    with gauge:
        if meet is not None:
            meet.wait(30)
        (workdir / "x.bin").write_bytes(b"made")


def fail(error, workdir):
    raise error


def make(key, gauge, meet=None) -> CompileJob:
    return CompileJob(key, functools.partial(fill, gauge, meet))


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    """What other tests leave free at this moment must not decide how many compile at once."""
    monkeypatch.setattr(module, "available_memory", lambda: None)


@pytest.fixture
def store(tmp_path):
    with open_store([tmp_path / "shared"], local=tmp_path / "local") as opened:
        yield opened


def test_distinct_keys_compile_at_the_same_time(store):
    gauge, meet = Gauge(), threading.Barrier(3)  # nobody passes alone
    done = precompile(
        [make(f"k{n}", gauge, meet) for n in range(3)], workers=3, store=store, policy=POLICY
    )
    assert done.counts == {"compiled": 3}
    assert [o.key for o in done.outcomes] == ["k0", "k1", "k2"]
    assert all((o.path / "x.bin").read_bytes() == b"made" for o in done.outcomes)
    assert done.workers == gauge.most == 3
    assert not done.failed


def test_no_more_run_at_once_than_workers(store):
    gauge = Gauge()
    done = precompile(
        [make(f"k{n}", gauge) for n in range(8)], workers=2, store=store, policy=POLICY
    )
    assert done.counts == {"compiled": 8}
    assert gauge.most <= done.workers <= 2


def test_jobs_of_one_key_are_one_job(store):
    gauge = Gauge()
    done = precompile([make("k", gauge)] * 5, workers=5, store=store, policy=POLICY)
    assert len(done.outcomes) == gauge.total == 1


def test_every_tier_is_asked_before_anything_is_compiled(store, tmp_path):
    gauge = Gauge()
    precompile([make("near", gauge)], workers=1, store=store, policy=POLICY)
    source = tmp_path / "source"
    source.mkdir()
    (source / "x.bin").write_bytes(b"made")
    store.shared[0].publish(Artifact("far", tuple(list_files(source, "far"))), source)
    jobs = [make(key, gauge) for key in ("near", "far", "new")]
    done = precompile(jobs, workers=1, store=store, policy=POLICY)
    assert [o.outcome for o in done.outcomes] == ["hit", "fetched", "compiled"]
    assert gauge.total == 2


def test_one_failure_stops_no_other_job(store):
    gauge = Gauge()
    jobs = [
        CompileJob("bad", functools.partial(fail, CompileError("bad", "no", permanent=True))),
        make("good", gauge),
        CompileJob("bug", functools.partial(fail, ZeroDivisionError("by zero"))),
        make("better", gauge),
    ]
    done = precompile(jobs, workers=1, store=store, policy=POLICY)
    assert [o.outcome for o in done.outcomes] == ["failed", "compiled", "failed", "compiled"]
    assert [o.key for o in done.failed] == ["bad", "bug"]
    assert isinstance(done.failed[0].error, CompileError)
    assert "ZeroDivisionError: by zero" in str(done.failed[1].error)


def test_progress_is_told_after_each_job(store):
    told = []
    gauge = Gauge()
    jobs = [
        make("a", gauge),
        CompileJob("b", functools.partial(fail, CompileError("b", "no"))),
        make("c", gauge),
    ]
    precompile(jobs, workers=1, store=store, policy=POLICY, progress=told.append)
    assert [(p.done, p.total) for p in told] == [(1, 3), (2, 3), (3, 3)]
    assert [p.failed for p in told] == [0, 1, 1]
    assert [p.last.key for p in told] == ["a", "b", "c"]
    assert told[0].eta > 0
    assert told[-1].eta == 0


def test_no_jobs_are_done_at_once(store):
    assert precompile([], store=store, policy=POLICY).outcomes == ()


@pytest.mark.parametrize("workers", [0, -1, "2", 1.5, True])
def test_what_is_no_count_of_workers_is_refused(store, workers):
    with pytest.raises(ConfigError, match=f"workers={workers!r} is not a count"):
        precompile([], workers=workers, store=store, policy=POLICY)


def test_what_is_no_job_is_refused_before_any_runs(store):
    with pytest.raises(ConfigError, match="a job of type int; give what a compiler's"):
        precompile([make("k", Gauge()), 1], store=store, policy=POLICY)
    assert store.find("k") is None


def test_memory_bounds_how_many_run_at_once(store, monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 5 << 30)
    assert worker_limit(8, 2 << 30) == 2
    assert worker_limit(8, 99 << 30) == 1
    monkeypatch.setattr(module, "available_memory", lambda: None)
    assert worker_limit(8, 99 << 30) == 8
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 20)
    gauge = Gauge()
    jobs = [make(f"k{n}", gauge) for n in range(4)]
    done = precompile(jobs, workers=4, store=store, policy=POLICY, memory_per_compile=1 << 30)
    assert gauge.most == done.workers == 1


def test_memory_that_others_took_meanwhile_is_waited_for(store, monkeypatch):
    left = iter([9 << 30, 1 << 20, 1 << 20])
    monkeypatch.setattr(module, "available_memory", lambda: next(left, 9 << 30))
    gauge = Gauge()
    jobs = [make(f"k{n}", gauge) for n in range(3)]
    done = precompile(jobs, workers=3, store=store, policy=POLICY, memory_per_compile=1 << 30)
    assert done.counts == {"compiled": 3}


def test_the_setting_bounds_the_workers(store, monkeypatch):
    monkeypatch.setenv("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "1")
    gauge = Gauge()
    done = precompile([make(f"k{n}", gauge) for n in range(3)], store=store, policy=POLICY)
    assert gauge.most == done.workers == 1


def test_the_memory_that_is_left_is_measured():
    assert available_memory() > 1 << 20


INTERRUPTED = """
import sys, threading, time
from pathlib import Path
from neuron_store.compilers.neuronx_cc import NeuronxCompiler
from neuron_store.opening import open_store
from neuron_store.batch import precompile
stub, graph, root = sys.argv[1:]
compiler = NeuronxCompiler(stub)
jobs = []
for n in range(2):
    flags = ["--target=trn2", f"--optlevel={n}", "--stub-sleep=300", f"--stub-child={root}/{n}"]
    jobs.append(compiler.job(Path(graph), flags=flags))
with open_store([], local=Path(root, "local")) as store:
    try:
        precompile(jobs, workers=2, store=store, memory_per_compile=1)
    except KeyboardInterrupt:
        staged = sorted(p.name for p in Path(root, "local/.staging").iterdir())
        print("interrupted", list(store.keys()), staged)
"""


def test_an_interrupt_ends_every_compiler_and_leaves_nothing(tmp_path):
    from neuron_store.compilers._example_graphs import example_graph

    psutil = pytest.importorskip("psutil")
    command = [sys.executable, "-c", INTERRUPTED, STUB, example_graph("decode", ".hlo"), tmp_path]
    notes = [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(1500):
                if all(n.is_file() and len(n.read_text().split()) == 2 for n in notes):
                    break
                time.sleep(0.02)
            pids = [int(pid) for note in notes for pid in note.read_text().split()]
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said == "interrupted [] []\n"
    for pid in pids:
        for _ in range(500):
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.02)
        else:
            pytest.fail(f"{pid} outlived the interrupt")


# -- jobs files ------------------------------------------------------------------------


def test_a_jobs_file_gives_one_job_a_line(tmp_path):
    pytest.importorskip("iree.compiler")
    (tmp_path / "g.mlir").write_text(GRAPH)
    lines = [
        {"compiler": "iree", "graph": "g.mlir"},
        {"compiler": "iree", "graph": str(tmp_path / "g.mlir"), "flags": ["--iree-opt-level=O1"]},
        {
            "compiler": "iree",
            "graph": "g.mlir",
            "flags": "--iree-opt-level=O1",
            "extra": {"k": "v"},
        },
    ]
    file = tmp_path / "jobs.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    jobs = read_jobs(file)
    assert len({job.key for job in jobs}) == 3
    assert jobs[2].components["extra:k"] == "v"
    assert [job.key for job in read_jobs(file, inline=True)] == [job.key for job in jobs]
    (tmp_path / "g.mlir").unlink()
    with pytest.raises(ConfigError, match=r"jobs\.jsonl, line 1: graph .*g\.mlir is not there"):
        read_jobs(file)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"compiler": "iree", "graph": "g.mlir", "graph": "e.mlir"}', "'graph' is given twice"),
        ('{"compiler": "iree", "graph": "g.mlir", "extra": {"a": NaN}}', "NaN is no JSON"),
        ('{"graph": "g.mlir"}', "compiler is not"),
        ('{"compiler": "iree"}', "graph is not"),
        ('{"compiler": "iree", "graph": 3}', "graph is not"),
        ('{"compiler": "nope", "graph": "g.mlir"}', "no compiler 'nope'; known: iree"),
        ('{"compiler": "iree", "graph": "g.mlir", "flag": []}', "unknown field 'flag'"),
        ('{"compiler": "iree", "graph": "g.mlir", "flags": 3}', "flags is neither"),
        ('{"compiler": "iree", "graph": "g.mlir", "flags": [3]}', "flags are strings"),
        ('{"compiler": "iree", "graph": "g.mlir", "extra": []}', "extra is not"),
        ('{"compiler": "iree", "graph": "e.mlir"}', "empty"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, told):
    (tmp_path / "g.mlir").write_text(GRAPH)
    (tmp_path / "e.mlir").write_text("")
    file = tmp_path / "jobs.jsonl"
    good = '{"compiler": "iree", "graph": "g.mlir"}'
    file.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ConfigError, match=told) as caught:
        read_jobs(file)
    assert "jobs.jsonl, line 3" in str(caught.value)


def test_a_jobs_file_without_jobs_or_not_there_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no jobs"):
        read_jobs(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_jobs(tmp_path / "gone")

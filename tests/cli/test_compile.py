from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_store.compilers._example_graphs import example_graph
from tests.cli.conftest import KEY
from tests.cli.test_app import on_terminal

GRAPH = """\
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""


DASK = """
import subprocess, sys
from distributed import LocalCluster

if __name__ == "__main__":
    options = dict(n_workers=1, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
    with LocalCluster(**options) as cluster:
        command = [sys.executable, "-m", "neuron_store.cli", "--tier", sys.argv[1], "compile"]
        command += ["--jobs", sys.argv[2], "--json"]
        command += ["--executor", "dask", "--address", cluster.scheduler_address]
        status = subprocess.run(command).returncode
    sys.exit(status)
"""


@pytest.fixture
def graph(tmp_path):
    file = tmp_path / "graph.mlir"
    file.write_text(GRAPH)
    return file


class TestIree:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("iree.compiler")

    def test_compiles_once_then_hits_then_fetches(self, cli, places, graph):
        (first,) = cli.json("compile", graph)["artifacts"]
        assert first["outcome"] == "compiled"
        assert first["components"]["compiler"] == "iree"
        assert Path(first["path"]) == places.local / first["key"]
        assert cli.json("compile", graph)["artifacts"][0]["outcome"] == "hit"
        cli("promote", first["key"])
        shutil.rmtree(places.local)
        (again,) = cli.json("compile", graph)["artifacts"]
        assert (again["key"], again["outcome"]) == (first["key"], "fetched")

    def test_piped_it_is_one_line(self, command, places, graph):
        result = command("--local", places.local, "compile", graph)
        assert result.returncode == 0
        key, outcome, seconds, path = result.stdout.rstrip("\n").split("\t")
        assert outcome == "compiled"
        assert float(seconds) > 0
        assert os.path.isfile(f"{path}/graph_{key}.vmfb")

    def test_a_flag_makes_another_artifact(self, cli, graph):
        (plain,) = cli.json("compile", graph)["artifacts"]
        document = cli.json("compile", graph, "--flag", "--iree-opt-level=O3")
        assert document["artifacts"][0]["key"] != plain["key"]

    def test_a_failed_compile_shows_the_compilers_last_lines(self, command, places, graph):
        graph.write_text("func.func @main( {")
        result = command("--local", places.local, "compile", graph)
        assert result.returncode == 1
        assert "error: compile of " in result.stderr
        assert "last lines of the compiler" in result.stderr
        assert result.stdout.split("\t")[1] == "failed"

    @pytest.mark.parametrize("jobs", [False, True])
    def test_a_root_that_cannot_be_made_is_a_setting_to_put_right(
        self, command, graph, tmp_path, jobs
    ):
        (tmp_path / "jobs").write_text(json.dumps({"compiler": "iree", "graph": graph.name}))
        what = ["--jobs", tmp_path / "jobs"] if jobs else [graph]
        result = command("compile", *what, env={"VLLM_CACHE_ROOT": "/proc/x"})
        assert result.returncode == 2
        assert "error: VLLM_CACHE_ROOT='/proc/x' (environment): /proc/x/neuron" in result.stderr
        result = command("--local", "/proc/x", "compile", *what)
        assert result.returncode == 2
        assert "error: the local tier's root /proc/x cannot be written: No such" in result.stderr

    def test_compiling_forbidden_is_an_honest_no(self, command, places, graph):
        env = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
        options = ["--local", places.local, "--tier", places.shared]
        result = command(*options, "compile", graph, env=env)
        assert result.returncode == 1
        assert f"{places.shared}: miss" in result.stderr

    def test_many_jobs_where_one_that_fails_stops_no_other(self, command, places, graph, tmp_path):
        (tmp_path / "broken.mlir").write_text("func.func @main( {")
        lines = [
            '{"compiler": "iree", "graph": "broken.mlir"}',
            '{"compiler": "iree", "graph": "graph.mlir"}',
            '{"compiler": "iree", "graph": "graph.mlir", "flags": "--iree-opt-level=O3"}',
        ]
        jobs = tmp_path / "jobs.jsonl"
        jobs.write_text("\n".join(lines))
        options = ["--local", places.local, "compile", "--jobs", jobs]
        result = command(*options, "--workers", "2")
        assert result.returncode == 1
        outcomes = [line.split("\t")[1] for line in result.stdout.splitlines()]
        assert outcomes == ["failed", "compiled", "compiled"]
        assert result.stderr.splitlines()[-1].startswith("2 compiled, 1 failed; in ")
        jobs.write_text("\n".join(lines[1:]))
        result = command(*options, "--json")
        document = json.loads(result.stdout)
        assert [each["outcome"] for each in document["artifacts"]] == ["hit", "hit"]
        assert document["ok"] is True

    @pytest.mark.slow
    def test_jobs_go_to_a_dask_cluster_and_meet_in_the_shared_tier(self, graph, places, tmp_path):
        pytest.importorskip("distributed")
        (tmp_path / "broken.mlir").write_text("func.func @main( {")
        graphs = ["broken.mlir", graph.name]
        jobs = tmp_path / "jobs.jsonl"
        jobs.write_text("\n".join(json.dumps({"compiler": "iree", "graph": g}) for g in graphs))
        # A node of its own in the workers' settings, and a cluster of its own process.
        (tmp_path / "main.py").write_text(DASK)
        done = subprocess.run(
            [sys.executable, "main.py", places.shared, jobs],
            cwd=tmp_path,
            env={**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "worker")},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        document = json.loads(done.stdout)
        assert [a["outcome"] for a in document["artifacts"]] == ["failed", "compiled"]
        assert (document["ok"], document["executor"], document["workers"]) == (False, "dask", None)
        assert "1 compiled, 1 failed; in " in done.stderr
        assert (places.shared / document["artifacts"][1]["key"]).is_dir()


class TestNeuronxCc:
    @pytest.fixture
    def compile_(self, command, places, monkeypatch):
        stubs = Path(__file__).parents[1] / "stubs"
        monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")

        def run(*flags: str):
            options = [f"--flag={flag}" for flag in ("--target=trn2", *flags)]
            graph = example_graph("prefill", ".hlo")
            compiler = ["compile", graph, "--compiler", "neuronx-cc"]
            return command("--local", places.local, *compiler, *options)

        return run

    def test_leaves_what_the_neuron_stack_expects(self, compile_):
        result = compile_()
        assert result.returncode == 0, result.stderr
        key, outcome, _, path = result.stdout.rstrip("\n").split("\t")
        assert outcome == "compiled"
        names = set(os.listdir(path))
        assert {"graph.hlo", f"graph_{key}.neff", ".compilation_complete"} <= names

    @pytest.mark.parametrize("kind", ["one-byte", "truncated", "foreign", "none"])
    def test_a_broken_executable_is_refused_and_not_kept(self, compile_, places, kind):
        result = compile_(f"--stub-neff={kind}")
        assert result.returncode == 1
        assert "error: compile of " in result.stderr
        assert not list(places.local.rglob("*.neff"))


@pytest.mark.parametrize("compiler", ["iree", "neuronx-cc"])
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("--auto-cast=none --optlevel=1", "more than one word"),
        ("-O1 --auto-cast=none", "more than one word"),
        ("--optlevel 1", "more than one word"),
        ("--auto-cast='none", "does not close"),
    ],
)
def test_one_flag_option_holds_one_word(cli, graph, compiler, flag, said):
    stderr = cli("compile", graph, "--compiler", compiler, f"--flag={flag}", status=2).stderr
    assert "Usage" in stderr
    assert said in " ".join(stderr.split())


def test_a_flag_whose_value_is_flags_is_one_word(cli, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(__file__).parents[1] / 'stubs'}:{os.environ['PATH']}")
    hlo = example_graph("prefill", ".hlo")
    options = ["--flag=--target=trn2", "--flag=--tensorizer-options=--a=1 --b"]
    (made,) = cli.json("compile", hlo, "--compiler", "neuronx-cc", *options)["artifacts"]
    assert "'--tensorizer-options=--a=1 --b'" in made["components"]["compiler_flags"]


@pytest.mark.parametrize("flags", [["--k=a\0b"], "--k=a\0b"])
def test_a_nul_in_a_flag_is_refused_with_its_line(cli, graph, tmp_path, flags):
    pytest.importorskip("iree.compiler")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(json.dumps({"compiler": "iree", "graph": graph.name, "flags": flags}))
    result = cli("compile", "--jobs", jobs, status=2)
    assert "line 1: compiler flag" in result.stderr
    assert "NUL" in result.stderr


def test_a_jobs_file_may_start_with_a_byte_order_mark(cli, graph, tmp_path):
    pytest.importorskip("iree.compiler")
    jobs = tmp_path / "jobs.jsonl"
    line = json.dumps({"compiler": "iree", "graph": graph.name})
    jobs.write_text(line, encoding="utf-8-sig")
    assert cli.json("compile", "--jobs", jobs)["artifacts"][0]["outcome"] == "compiled"


def test_unknown_compiler(command, graph):
    result = command("compile", graph, "--compiler", "gcc")
    assert result.returncode == 2
    assert "error: no compiler 'gcc'; known: iree, neuronx-cc" in result.stderr


def test_graph_that_is_not_there(command, tmp_path):
    result = command("compile", tmp_path / KEY)
    assert result.returncode == 2
    assert "does not exist" in result.stderr


@pytest.mark.parametrize("extra", [[], ["--compiler", "iree"], ["--flag=-O1"]])
def test_a_graph_or_a_jobs_file(cli, graph, tmp_path, extra):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("{}")
    arguments = ["--jobs", jobs, *extra] if extra else [graph, "--jobs", jobs]
    assert "Usage" in cli("compile", *arguments, status=2).stderr


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"compiler": "iree", "graph": "nowhere.mlir"}', "is not there"),
        ('{"compiler": "gcc", "graph": "graph.mlir"}', "no compiler 'gcc'"),
        ('{"compiler": "iree", "graph": "graph.mlir", "flag": 1}', "unknown field 'flag'"),
    ],
)
@pytest.mark.usefixtures("graph")
def test_a_jobs_file_that_cannot_be_used(cli, tmp_path, line, piece):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(line)
    result = cli("compile", "--jobs", jobs, status=2)
    assert f"{jobs}, line 1: " in result.stderr
    assert piece in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--executor", "dask"],
        ["--jobs", "{}", "--address", "tcp://127.0.0.1:1"],
        ["--jobs", "{}", "--executor", "ray", "--workers", "2"],
    ],
)
def test_an_executor_is_for_jobs_and_counts_its_workers_itself(cli, graph, tmp_path, arguments):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("{}")
    where = [] if "--jobs" in arguments else [graph]
    given = [jobs if argument == "{}" else argument for argument in arguments]
    assert "Usage" in cli("compile", *where, *given, status=2).stderr


def test_an_unknown_executor_is_a_usage_error(cli, graph, tmp_path):
    pytest.importorskip("iree.compiler")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(json.dumps({"compiler": "iree", "graph": graph.name}))
    result = cli("compile", "--jobs", jobs, "--executor", "slurm", status=2)
    assert "no executor 'slurm'; known: dask, ray" in result.stderr


def test_on_a_terminal_the_bar_counts_down_what_is_left():
    program = (
        "import time; from neuron_store.cli.output import Output\n"
        "with Output().progress('compiling', 2) as bar:\n"
        "    bar.at(1, '1 running', 125.0); time.sleep(0.5)"
    )
    status, shown = on_terminal(program=("-c", program))
    assert status == 0
    assert re.search("about 0:02:0[45] left", shown)
    assert "compiling 1 running" in shown

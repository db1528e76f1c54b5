from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from neuron_store.compilers._example_graphs import example_graph
from tests.cli.conftest import KEY

GRAPH = """\
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}
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
        first = cli.json("compile", graph)
        assert first["outcome"] == "compiled"
        assert first["components"]["compiler"] == "iree"
        assert Path(first["path"]) == places.local / first["key"]
        assert cli.json("compile", graph)["outcome"] == "hit"
        cli("promote", first["key"])
        shutil.rmtree(places.local)
        again = cli.json("compile", graph)
        assert (again["key"], again["outcome"]) == (first["key"], "fetched")

    def test_piped_it_is_one_line(self, command, places, graph):
        result = command("--local", places.local, "compile", graph)
        assert result.returncode == 0
        key, outcome, seconds, path = result.stdout.rstrip("\n").split("\t")
        assert outcome == "compiled"
        assert float(seconds) > 0
        assert os.path.isfile(f"{path}/graph_{key}.vmfb")

    def test_a_flag_makes_another_artifact(self, cli, graph):
        plain = cli.json("compile", graph)["key"]
        assert cli.json("compile", graph, "--flag", "--iree-opt-level=O3")["key"] != plain

    def test_a_failed_compile_shows_the_compilers_last_lines(self, command, places, graph):
        graph.write_text("func.func @main( {")
        result = command("--local", places.local, "compile", graph)
        assert result.returncode == 1
        assert "error: compile of " in result.stderr
        assert "last lines of the compiler" in result.stderr
        assert result.stdout == ""

    def test_compiling_forbidden_is_an_honest_no(self, command, places, graph):
        env = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
        options = ["--local", places.local, "--tier", places.shared]
        result = command(*options, "compile", graph, env=env)
        assert result.returncode == 1
        assert f"{places.shared}: miss" in result.stderr


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


def test_unknown_compiler(command, graph):
    result = command("compile", graph, "--compiler", "gcc")
    assert result.returncode == 2
    assert "error: no compiler 'gcc'; known: iree, neuronx-cc" in result.stderr


def test_graph_that_is_not_there(command, tmp_path):
    result = command("compile", tmp_path / KEY)
    assert result.returncode == 2
    assert "does not exist" in result.stderr

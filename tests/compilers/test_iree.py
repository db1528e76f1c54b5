from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_store.compilers import Compiler
from neuron_store.compilers._cpu import host_cpu
from neuron_store.compilers._example_graphs import EXAMPLES, example_arrays, example_graph
from neuron_store.compilers._mlir import strip_locations
from neuron_store.compilers.iree import IreeCompiler
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactMismatch,
    CompileError,
    ConfigError,
    HostUnfit,
    MissingExtra,
    Unsupported,
)

np = pytest.importorskip("numpy")
pytest.importorskip("iree.compiler")

GRAPH = b"""\
func.func @main(%a: tensor<2x3xf32>, %b: tensor<3x2xf32>) -> (tensor<2x2xf32>, tensor<2x3xf32>) {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<2x3xf32>, tensor<3x2xf32>) -> tensor<2x2xf32>
  %1 = stablehlo.add %a, %a : tensor<2x3xf32>
  return %0, %1 : tensor<2x2xf32>, tensor<2x3xf32>
}
"""
WITH_LOCATIONS = b"""\
#loc1 = loc("/home/one/model.py":3:7)
#loc2 = loc(callsite("f(x)"(#loc1) at "/home/one/a \\"(b\\".py":1:1))
// loc("in a comment" is text
func.func @main(%a: tensor<4xf32> loc("a"("/home/one/model.py":1:2))) -> tensor<4xf32>
    attributes {note = "loc(\\"kept\\")"} {
  %0 = stablehlo.add %a, %a : tensor<4xf32> loc(#loc2)
  return %0 : tensor<4xf32> loc(#loc1)
} loc(#loc1)
"""


def compiled(job, root: Path) -> Path:
    path = root / job.key
    path.mkdir()
    job.compile(path)
    return path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return compiled(IreeCompiler().job(GRAPH), tmp_path_factory.mktemp("iree"))


@pytest.fixture
def copy(artifact, tmp_path):
    return Path(shutil.copytree(artifact, tmp_path / artifact.name))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_graph_compiled_here_agrees_with_its_reference(name, tmp_path):
    compiler = IreeCompiler()
    path = compiled(compiler.job(example_graph(name)), tmp_path)
    inputs, expected = example_arrays(name)
    results = compiler.load(path).run("main", *inputs)
    assert len(results) == len(expected) == 3
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == want.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_graph_holds_no_path_of_the_machine_that_made_it(name):
    for suffix in (".mlir", ".hlo"):
        data = example_graph(name, suffix).read_bytes()
        assert b".py" not in data
        assert b"/tmp" not in data
        assert b"/home" not in data


def test_an_unknown_example_graph_is_refused():
    with pytest.raises(ConfigError, match="prefill, decode"):
        example_graph("../prefill")


def test_the_adapter_is_what_a_compiler_has_to_be():
    assert isinstance(IreeCompiler(), Compiler)


def test_an_artifact_is_the_program_its_graph_and_what_it_needs(artifact):
    names = {p.name for p in artifact.iterdir()}
    assert names == {"graph.mlir", f"graph_{artifact.name}.vmfb", "target.json"}
    assert (artifact / "graph.mlir").read_bytes() == GRAPH
    needs = json.loads((artifact / "target.json").read_text())
    assert needs["arch"] == os.uname().machine
    assert needs["cpu"] not in {"host", ""}
    assert needs["features"]


def test_a_loaded_program_computes_what_the_graph_says(artifact):
    program = IreeCompiler().load(artifact)
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = np.arange(6, dtype=np.float32)[::-1].reshape(3, 2)
    assert program.functions == ("main",)
    product, doubled = program.run("main", a, b.T.copy().T)
    np.testing.assert_array_equal(product, a @ b)
    np.testing.assert_array_equal(doubled, a + a)


def test_results_stay_when_the_program_is_gone(artifact):
    (product, _) = (
        IreeCompiler().load(artifact).run("main", np.ones((2, 3), "f4"), np.ones((3, 2), "f4"))
    )
    assert product.tolist() == [[3, 3], [3, 3]]
    product[0, 0] = 1  # an array of the caller's own


def test_wrong_arrays_and_unknown_functions_are_told(artifact):
    program = IreeCompiler().load(artifact)
    with pytest.raises(ConfigError, match="no function 'other'; it has main"):
        program.run("other")
    with pytest.raises(ValueError, match="shape"):
        program.run("main", np.ones((3, 3), "f4"), np.ones((3, 2), "f4"))


def test_two_compiles_of_one_job_give_the_same_bytes_wherever_they_run(artifact, tmp_path):
    again = compiled(IreeCompiler().job(GRAPH), tmp_path)
    assert again.name == artifact.name
    for file in artifact.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_a_job_pickles_for_spawn(tmp_path):
    job = IreeCompiler().job(GRAPH)
    path = tmp_path / job.key
    path.mkdir()
    child = multiprocessing.get_context("spawn").Process(target=job.compile, args=(path,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert (path / job.executable).is_file()


def test_in_a_forked_child_the_program_is_loaded_again(artifact):
    ones = np.ones((2, 3), "f4"), np.ones((3, 2), "f4")
    before = IreeCompiler().load(artifact)
    before.run("main", *ones)
    gc.collect()
    gc.disable()  # so that the child inherits a program that only the collector can free
    dropped = IreeCompiler().load(artifact)
    dropped.run("main", *ones)
    del dropped

    def child():
        gc.collect()
        try:
            before.run("main", *ones)
        except Unsupported:
            os._exit(int(IreeCompiler().load(artifact).run("main", *ones)[0][0, 0]))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    gc.enable()
    process.join(60)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 3


def test_making_a_job_imports_neither_iree_nor_numpy():
    code = (
        "import sys; from neuron_store.compilers.iree import IreeCompiler;"
        f"IreeCompiler().job({GRAPH!r});"
        "print([m for m in ('iree.compiler', 'iree.runtime', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- keys ----------


def key(graph=GRAPH, flags=(), extra=None) -> str:
    return IreeCompiler().job(graph, flags=flags, extra=extra).key


def test_the_key_follows_from_what_decides_the_program(monkeypatch):
    """Pitfall 45: target and compiler version are in the key."""
    keys = {
        key(),
        key(GRAPH.replace(b"add", b"subtract")),
        key(flags="--iree-opt-level=O3"),
        key(flags="--iree-llvmcpu-target-cpu=x86-64"),
        key(flags="--iree-llvmcpu-target-cpu=x86-64 --iree-llvmcpu-target-cpu-features=+avx"),
        key(extra={"kernels": "1"}),
        key(extra={"kernels": "2"}),
    }
    monkeypatch.setattr(IreeCompiler, "version", lambda self: "0.0.1")
    assert len(keys | {key()}) == 8


def test_a_file_and_its_bytes_have_one_key(tmp_path):
    (tmp_path / "g.mlir").write_bytes(GRAPH)
    assert key(tmp_path / "g.mlir") == key(GRAPH)


def test_places_in_source_files_are_not_in_the_key():
    elsewhere = WITH_LOCATIONS.replace(b"/home/one/", b"/data/two/three/").replace(b":3:7", b":9:9")
    assert key(WITH_LOCATIONS) == key(elsewhere)
    stripped = strip_locations(WITH_LOCATIONS)
    assert b"/home" not in stripped
    assert b"#loc" not in stripped
    assert b'note = "loc(\\"kept\\")"' in stripped
    assert b"loc(unknown)" in stripped


def test_a_graph_with_locations_compiles_without_them(tmp_path):
    path = compiled(IreeCompiler().job(WITH_LOCATIONS), tmp_path)
    assert b"/home" not in (path / f"graph_{path.name}.vmfb").read_bytes()
    (doubled,) = IreeCompiler().load(path).run("main", np.ones(4, np.float32))
    assert doubled.tolist() == [2, 2, 2, 2]


def test_text_whose_location_never_closes_and_byte_code_are_left_as_they_are():
    assert strip_locations(b'x loc("a" (') == b'x loc("a" ('
    assert strip_locations(b"ML\xefR loc(a)") == b"ML\xefR loc(a)"


def test_the_host_is_named_before_it_enters_the_key():
    target = IreeCompiler().job(GRAPH).components["target"]
    assert target == f"{host_cpu().arch}/{host_cpu().level}"
    assert "host" not in target
    assert key(flags="--iree-llvmcpu-target-cpu=host") == key()
    features = IreeCompiler().job(GRAPH, flags="--iree-llvmcpu-target-cpu-features=host")
    assert "host" not in features.components["target"]


def test_spellings_of_one_flag_have_one_key():
    same = {
        key(flags=f)
        for f in (
            "--iree-opt-level=O2",
            "-iree-opt-level=O2",
            "--iree-opt-level O2",
            "-o x.vmfb --iree-opt-level=O2",
        )
    }
    assert len(same) == 1


def test_the_order_of_repeated_list_options_is_kept():
    assert key(flags="--iree-plugin=a --iree-plugin=b") != key(
        flags="--iree-plugin=b --iree-plugin=a"
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--iree-hal-target-device=cuda", "llvm-cpu only"),
        ("--iree-hal-target-backends=vulkan-spirv", "llvm-cpu only"),
        ("--iree-llvmcpu-target-cpu-features=avx", "a \\+ or -"),
        ("--iree-llvmcpu-target-triple=riscv64-linux", "another processor"),
        ("--x='", "quotes"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(flags, named):
    with pytest.raises(ConfigError, match=named):
        IreeCompiler().job(GRAPH, flags=flags)


def test_a_graph_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.mlir cannot be read"):
        IreeCompiler().job(tmp_path / "gone.mlir")
    with pytest.raises(ConfigError, match="empty"):
        IreeCompiler().job(b"")


# -- compiles that fail ----------


def failure(job, tmp_path) -> CompileError:
    with pytest.raises(CompileError) as caught:
        compiled(job, tmp_path)
    assert caught.value.key == job.key
    assert caught.value.compiler == "iree"
    return caught.value


def test_bad_input_is_a_permanent_failure_with_the_compilers_words(tmp_path):
    error = failure(IreeCompiler().job(b"garbage"), tmp_path)
    assert error.permanent
    assert "custom op 'garbage' is unknown" in error.log_tail
    assert str(tmp_path) not in error.log_tail


def test_an_unknown_flag_is_a_permanent_failure(tmp_path):
    error = failure(IreeCompiler().job(GRAPH, flags="--no-such-flag"), tmp_path)
    assert error.permanent
    assert "--no-such-flag" in error.log_tail


def test_a_graph_that_changed_after_its_key_was_computed_is_not_compiled(tmp_path):
    file = tmp_path / "g.mlir"
    file.write_bytes(GRAPH)
    job = IreeCompiler().job(file)
    file.write_bytes(GRAPH.replace(b"add", b"subtract"))
    assert "changed since" in failure(job, tmp_path).reason


def test_a_compiler_that_was_replaced_meanwhile_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(IreeCompiler, "version", lambda self: "0.0.1")
    assert "0.0.1" in failure(IreeCompiler().job(GRAPH), tmp_path).reason


@pytest.mark.parametrize(
    ("script", "told", "permanent"),
    [
        ("kill -9 $$", "killed (signal 9)", False),
        ("kill -6 $$", "aborted (signal 6)", False),
        ("kill -11 $$", "crashed (signal 11)", False),
        ("echo No space left on device; exit 1", "status 1; disk full: no space left in /", True),
        ("exit 3", "status 3", True),
    ],
)
def test_the_ways_to_die_are_told_apart(tmp_path, monkeypatch, script, told, permanent):
    program = tmp_path / "iree-compile"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    job = IreeCompiler().job(GRAPH)
    monkeypatch.setattr(type(job.compile), "_program", lambda self: str(program))
    error = failure(job, tmp_path)
    assert told in error.reason
    assert error.permanent is permanent


def test_the_compiler_sees_no_flags_of_the_environment(tmp_path, monkeypatch):
    program = tmp_path / "iree-compile"
    program.write_text("#!/bin/sh\nenv\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("IREE_LOAD_PLUGINS", "/x.so")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    job = IreeCompiler().job(GRAPH)
    monkeypatch.setattr(type(job.compile), "_program", lambda self: str(program))
    seen = {line.split("=")[0] for line in failure(job, tmp_path).log_tail.splitlines()}
    assert "PATH" in seen
    assert not {n for n in seen if n.startswith(("IREE", "AWS", "LLVM"))}


# -- loads that are refused ----------


def rewrite(path: Path, **changes) -> None:
    needs = json.loads((path / "target.json").read_text())
    (path / "target.json").write_text(json.dumps({**needs, **changes}))


def test_an_artifact_of_another_version_is_refused(copy):
    """Pitfall 45: checked again at load."""
    rewrite(copy, compiler_version="3.2.0")
    with pytest.raises(ArtifactMismatch) as caught:
        IreeCompiler().load(copy)
    assert caught.value.differences["compiler_version"][0] == "3.2.0"


def test_an_artifact_that_uses_what_this_processor_lacks_is_refused(copy):
    """Pitfall 45: checked again at load."""
    rewrite(copy, features=["sse2", "avx512fp16", "avx10.2"])
    with pytest.raises(HostUnfit, match=r"features avx10\.2"):
        IreeCompiler().load(copy)


def test_an_artifact_for_another_architecture_is_refused(copy):
    rewrite(copy, arch="riscv64")
    with pytest.raises(HostUnfit, match="riscv64"):
        IreeCompiler().load(copy)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"arch": 1}', '{"arch":"a","compiler_version":"b","features":3}']
)
def test_an_artifact_that_does_not_say_what_it_needs_is_refused(copy, text):
    (copy / "target.json").write_text(text)
    with pytest.raises(ArtifactCorrupt, match=r"target\.json"):
        IreeCompiler().load(copy)


def test_a_damaged_program_is_refused(copy):
    file = copy / f"graph_{copy.name}.vmfb"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ArtifactCorrupt, match="cannot load"):
        IreeCompiler().load(copy)


def test_a_directory_without_a_program_is_refused(tmp_path):
    with pytest.raises(ArtifactCorrupt, match="0 files"):
        IreeCompiler().load(tmp_path)


def test_a_program_for_a_lesser_processor_runs_here(tmp_path):
    if host_cpu().arch != "x86_64":
        pytest.skip("names of x86-64 levels")
    path = compiled(
        IreeCompiler().job(GRAPH, flags="--iree-llvmcpu-target-cpu=x86-64-v2"), tmp_path
    )
    assert "avx" not in json.loads((path / "target.json").read_text())["features"]
    assert (
        len(IreeCompiler().load(path).run("main", np.ones((2, 3), "f4"), np.ones((3, 2), "f4")))
        == 2
    )


def test_a_program_for_another_processor_can_be_compiled_and_is_refused_here(tmp_path):
    flags = [
        "--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu",
        "--iree-llvmcpu-target-cpu=neoverse-n1",
    ]
    job = IreeCompiler().job(GRAPH, flags=flags)
    assert job.components["target"] == "aarch64-unknown-linux-gnu/neoverse-n1"
    if host_cpu().arch == "aarch64":
        pytest.skip("it is this one")
    path = compiled(job, tmp_path)
    with pytest.raises(HostUnfit, match="aarch64"):
        IreeCompiler().load(path)


def test_without_iree_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("neuron_store.compilers.iree._installed", lambda package: None)
    with pytest.raises(MissingExtra, match=r"neuron-store\[iree\]"):
        IreeCompiler().job(GRAPH)


def test_a_host_with_only_the_runtime_computes_the_same_key(monkeypatch):
    expected = key()
    from neuron_store.compilers import iree

    installed = iree._installed
    monkeypatch.setattr(
        iree, "_installed", lambda p: None if p == "iree-base-compiler" else installed(p)
    )
    assert key() == expected

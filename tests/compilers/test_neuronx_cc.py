from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from neuron_store.compilers import Compiler, _hlo, _neuron_target
from neuron_store.compilers._example_graphs import example_graph
from neuron_store.compilers._neuron_target import resolve_target
from neuron_store.compilers.neuronx_cc import NeuronxCompiler
from neuron_store.errors import ArtifactCorrupt, CompileError, ConfigError, Unsupported
from neuron_store.neuron_layout import METADATA_NAME, foreign_artifact, neff_length

STUB = str(Path(__file__).parents[1] / "stubs" / "neuronx-cc")
COMPILER = NeuronxCompiler(executable=STUB)


# -- an HLO module, written by hand ----------


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def hlo(
    source="/home/one/model.py",
    outputs=2,
    kernel: str | None = None,
    literal=b"w" * 300,
    alias=(),
) -> bytes:
    shape = field(2, 11) + field(3, b"\x04")
    result = shape if outputs is None else field(2, 13) + field(4, shape) * outputs
    metadata = field(1, "add") + field(2, "jit/add") + field(3, source) + field(4, 17)
    instruction = field(1, "add.1") + field(2, "add") + field(7, metadata) + field(8, literal)
    if kernel is not None:
        instruction += field(43, json.dumps({"klir_binary": {"binary": kernel, "v": 1}, "n": "k"}))
    other = field(1, "region") + field(4, field(2, shape)) + field(5, 3)
    entry = field(1, "main") + field(2, instruction) * 2 + field(4, field(2, result)) + field(5, 9)
    entries = b"".join(
        field(1, (field(1, varint(out)) if out else b"") + field(2, into)) for out, into in alias
    )
    return (
        field(1, "module")
        + field(3, other)
        + field(3, entry)
        + field(6, 9)
        + (field(8, entries) if entries else b"")
        + field(17, field(1, source) + field(2, "f"))
        + field(99, b"unknown \xff")
        + varint(98 << 3 | 1)
        + b"12345678"
        + varint(97 << 3 | 5)
        + b"1234"
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("NEURON_CC_FLAGS", "NEURON_PLATFORM_TARGET_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)


def make(graph=None, flags="", target="--target trn2"):
    return COMPILER.job(graph if graph is not None else hlo(), flags=f"{target} {flags}")


def compiled(job, root: Path) -> Path:
    path = root / job.key
    path.mkdir()
    job.compile(path)
    return path


def info(path: Path) -> dict:
    payload = (path / f"graph_{path.name}.neff").read_bytes()[1024:]
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(payload))) as tar:
        return json.load(tar.extractfile("info.json"))


def log(path: Path) -> str:
    return (path / "log-neuron-cc.txt").read_text()


def failure(flags, tmp_path) -> CompileError:
    job = make(flags=flags)
    with pytest.raises(CompileError) as caught:
        compiled(job, tmp_path)
    error = caught.value
    assert error.key == job.key
    assert error.compiler == "neuronx-cc"
    left = {p.name for p in (tmp_path / job.key).iterdir()}
    assert left <= {"log-neuron-cc.txt"}
    return error


# -- artifacts ----------


def test_the_adapter_is_what_a_compiler_has_to_be():
    assert isinstance(COMPILER, Compiler)
    assert COMPILER.version() == "2.21.33363.0+82129205"


def test_the_artifact_is_what_the_neuron_stack_itself_would_have_written(tmp_path):
    path = compiled(make(hlo(outputs=3, alias=[(0, 1), (2, 4)])), tmp_path)
    artifact = foreign_artifact(path, path.name)
    assert artifact is not None
    assert {f.name for f in artifact.files} == {
        "graph.hlo", f"graph_{path.name}.neff",
        ".artifact_metadata_v0.json", ".compilation_complete",
    }  # fmt: skip
    text = (path / ".artifact_metadata_v0.json").read_text()
    assert json.loads(text) == {
        "version": 0,
        "cache_key": path.name,
        "output_count": 3,
        "unused_input_indices": [],
        "has_rng_seed_parameter": False,
        "io_map": {"0": 1, "2": 4},
    }
    assert text.startswith('{\n  "version": 0')
    mark = (path / ".compilation_complete").read_text().splitlines()
    assert mark[0].startswith("completed:1")
    assert mark[1] == f"neff_size:{(path / f'graph_{path.name}.neff').stat().st_size}"


def test_the_compiler_runs_in_a_directory_of_its_own_with_names_relative_to_it(tmp_path):
    """Pitfall 43."""
    path = compiled(make(flags="--auto-cast=none -O2"), tmp_path)
    assert info(path)["name"] == f"graph_{path.name}.neff"
    assert info(path)["options"] == [
        ["--framework", "XLA"], ["--target", "trn2"], ["--auto-cast", "none"], ["-O", "2"],
    ]  # fmt: skip
    assert "cwd entries ['graph.hlo', 'log-neuron-cc.txt', 'printed.txt']" in log(path)
    whole = b"".join(p.read_bytes() for p in path.iterdir() if p.name != "log-neuron-cc.txt")
    assert str(tmp_path).encode() not in whole


def test_two_compiles_of_one_job_differ_in_the_mark_only(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (compiled(make(), tmp_path / name) for name in "ab")
    for file in one.iterdir():
        if file.name != ".compilation_complete":
            assert (other / file.name).read_bytes() == file.read_bytes()


def test_an_example_graph_is_taken(tmp_path):
    path = compiled(make(example_graph("decode", ".hlo")), tmp_path)
    assert json.loads((path / ".artifact_metadata_v0.json").read_text())["output_count"] == 3


def test_a_job_pickles_for_spawn(tmp_path):
    job = make()
    path = tmp_path / job.key
    path.mkdir()
    child = multiprocessing.get_context("spawn").Process(target=job.compile, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert foreign_artifact(path, path.name) is not None


# -- flags and targets ----------


def test_flags_of_the_environment_come_last_and_are_in_the_key(tmp_path, monkeypatch):
    """Pitfall 42."""
    plain = make(flags="-O1")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=s3://b/c --no_cache -O2 --auto-cast='none'")
    job = make(flags="-O1")
    assert job.key != plain.key
    assert job.components["compiler_flags"] == "--auto-cast=none --framework=XLA --optlevel=2"
    monkeypatch.delenv("NEURON_CC_FLAGS")
    assert make(flags="-O2 --auto-cast none").key == job.key
    path = compiled(job, tmp_path)
    options = info(path)["options"]
    assert options[2:] == [["-O", "1"], ["-O", "2"], ["--auto-cast", "none"]]
    assert "NEURON_CC_FLAGS" not in log(path)


def test_the_callers_output_log_and_graph_are_not_the_compilers(tmp_path):
    job = make(flags="--output /x/y.neff --logfile=/x/log other.hlo --retry_failed_compilation")
    assert job.key == make().key
    assert info(compiled(job, tmp_path))["name"] == job.executable


def test_the_target_comes_from_the_override_then_the_flags_then_the_host(monkeypatch, tmp_path):
    product = tmp_path / "product_name"
    monkeypatch.setattr(_neuron_target, "_PRODUCT", str(product))
    with pytest.raises(ConfigError, match="--target trn2 among the flags"):
        resolve_target("")
    for name, target in [
        ("trn1n.32xlarge", "trn1n"),
        ("trn2u.48xlarge", "trn2"),
        ("inf2.xlarge", "inf2"),
    ]:
        product.write_text(name + "\n")
        assert resolve_target("-O1") == target
    product.write_text("m7i.large\n")
    with pytest.raises(ConfigError, match=r"m7i\.large"):
        resolve_target("")
    assert resolve_target("--target trn1") == resolve_target(["--target=trn1"]) == "trn1"
    assert resolve_target("--target=inf2 --target trn1") == "trn1"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3pre")
    assert resolve_target("--target trn1") == "trn3pre"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "../x")
    with pytest.raises(ConfigError, match="NEURON_PLATFORM_TARGET_OVERRIDE"):
        resolve_target("")


def test_the_target_is_given_once_and_is_in_the_key(monkeypatch, tmp_path):
    assert make(target="--target=trn1").key != make(target="--target=trn2").key
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    job = make(target="--target=trn1 --target inf2")
    assert job.key == make(target="").key
    assert info(compiled(job, tmp_path))["options"] == [
        ["--framework", "XLA"],
        ["--target", "trn2"],
    ]


def test_the_key_follows_from_what_decides_the_executable():
    different = {
        make().key,
        make(hlo(literal=b"w" * 299 + b"x")).key,
        make(hlo(outputs=1)).key,
        make(flags="-O1").key,
        make(target="--target trn1").key,
        COMPILER.job(hlo(), flags="--target trn2", extra={"kernels": "a"}).key,
        NeuronxCompiler(executable=STUB, assume_version="2.20")
        .job(hlo(), flags="--target trn2")
        .key,
    }
    assert len(different) == 7


# -- the graph's paths ----------


def test_two_checkouts_at_different_paths_share_a_key_and_every_byte(tmp_path):
    """Pitfall 11."""
    one, other = make(hlo("/home/one/model.py")), make(hlo("/data/a/much/longer/path/model.py"))
    assert one.key == other.key
    (tmp_path / "b").mkdir()
    first, second = compiled(one, tmp_path), compiled(other, tmp_path / "b")
    assert (first / "graph.hlo").read_bytes() == (second / "graph.hlo").read_bytes()
    assert b"/home" not in (first / "graph.hlo").read_bytes()
    assert b"model.py" in (first / "graph.hlo").read_bytes()


def test_only_paths_change_and_unknown_fields_stay():
    assert b"".join(_hlo.compiler_input(hlo("/a/b/model.py"))) == hlo("model.py")
    assert _hlo.compiler_input(hlo("model.py")) == [hlo("model.py")]


def test_a_kernel_counts_by_its_content_and_keeps_its_path_for_the_compiler(tmp_path):
    """Pitfall 10: a kernel's source is in the key."""
    a, b = tmp_path / "a.klir", tmp_path / "b.klir"
    a.write_bytes(b"kernel")
    b.write_bytes(b"kernel")
    assert make(hlo(kernel=str(a))).key == make(hlo(kernel=str(b))).key
    assert str(a).encode() in b"".join(_hlo.compiler_input(hlo(kernel=str(a))))
    before = make(hlo(kernel=str(a))).key
    a.write_bytes(b"other kernel")
    assert make(hlo(kernel=str(a))).key != before
    gone = make(hlo(kernel="/nowhere/1")).key
    assert gone == make(hlo(kernel="/nowhere/2")).key
    assert gone != before


def test_a_kernel_that_changed_after_the_key_was_computed_is_not_compiled(tmp_path):
    kernel = tmp_path / "k"
    kernel.write_bytes(b"1")
    job = make(hlo(kernel=str(kernel)))
    kernel.write_bytes(b"2")
    with pytest.raises(CompileError, match="changed since"):
        compiled(job, tmp_path)


@pytest.mark.parametrize(
    ("graph", "count"), [(hlo(outputs=0), 0), (hlo(outputs=5), 5), (hlo(outputs=None), 1)]
)
def test_results_are_counted_in_the_entry_computation(graph, count):
    assert _hlo.output_count(graph) == count


@pytest.mark.parametrize(
    "graph",
    [
        b"not hlo at all",
        hlo()[:-2],
        field(1, hlo()),
        b"\x0b",
        b"\x1a\xff\xff\xff\xff\x7f",
        b"\xff" * 20,
    ],
)
def test_a_graph_that_is_no_module_is_refused(graph):
    with pytest.raises(ConfigError, match="HloModuleProto"):
        make(graph)


def test_no_prefix_of_a_module_breaks_the_reader():
    whole = hlo(kernel="/x")
    for end in range(len(whole)):
        try:
            _hlo.key_input(whole[:end])
            _hlo.output_count(whole[:end])
            _hlo.aliased_inputs(whole[:end])
        except ConfigError:
            pass


# -- compiles that fail ----------


@pytest.mark.parametrize(
    ("flags", "told", "status", "permanent"),
    [
        ("--stub-exit=70", "internal compiler error (status 70)", 70, False),
        ("--stub-exit=70 '--stub-say=[F137] neuronx-cc was forcibly killed'", "[F137]", 70, False),
        ("--stub-exit=1", "ended with status 1", 1, False),
        ("--stub-signal=9", "killed (signal 9)", -9, False),
        ("--stub-signal=6", "aborted (signal 6)", -6, False),
        ("--stub-signal=11", "crashed (signal 11)", -11, False),
        ("--no-such-flag=1", "ended with status 2", 2, True),
        ("--stub-neff=one-byte", "(1 bytes) does not start as a NEFF does", 0, False),
        ("--stub-neff=foreign", "does not start as a NEFF does", 0, False),
        ("--stub-neff=truncated", "its header says", 0, False),
        ("--stub-neff=none", "wrote no graph_", 0, False),
    ],
)
def test_the_ways_to_fail_are_told_apart(tmp_path, flags, told, status, permanent):
    error = failure(flags, tmp_path)
    assert told in error.reason
    assert error.status == status
    assert error.permanent is permanent


def test_the_error_has_the_last_lines_of_the_log(tmp_path):
    lines = "\n".join(f"line {n}" for n in range(100))
    error = failure(f"'--stub-say={lines}' --stub-exit=70", tmp_path)
    shown = error.log_tail.splitlines()
    assert shown == [f"line {n}" for n in range(60, 100)]


def test_without_a_log_the_error_has_what_was_printed(tmp_path):
    assert (
        "unrecognized arguments: --no-such-flag=1" in failure("--no-such-flag=1", tmp_path).log_tail
    )


def test_a_compiler_that_is_not_there_is_told_before_and_during_a_compile(tmp_path):
    nowhere = NeuronxCompiler(executable="/nowhere/neuronx-cc")
    with pytest.raises(ConfigError, match="not on PATH"):
        nowhere.job(hlo(), flags="--target trn2")
    job = NeuronxCompiler("/nowhere/neuronx-cc", "2.21").job(hlo(), flags="--target trn2")
    with pytest.raises(CompileError, match="compiler binary does not exist") as caught:
        compiled(job, tmp_path)
    assert caught.value.permanent


def test_a_compiler_that_was_replaced_meanwhile_is_not_used(tmp_path):
    job = NeuronxCompiler(STUB, "2.20").job(hlo(), flags="--target trn2")
    with pytest.raises(CompileError, match=r"key is for version 2\.20"):
        compiled(job, tmp_path)


def test_the_version_is_asked_once_for_each_program_file(tmp_path):
    program = tmp_path / "cc"
    count = tmp_path / "count"
    program.write_text(
        f"#!/bin/sh\necho x >> {count}\necho NeuronX Compiler version 1.$(wc -l < {count})\n"
    )
    program.chmod(0o755)
    compiler = NeuronxCompiler(str(program))
    assert compiler.version() == compiler.version() == "1.1"
    os.utime(program, ns=(1, 1))
    assert compiler.version() == "1.2"


def test_a_compiler_that_does_not_say_its_version_is_refused(tmp_path):
    program = tmp_path / "cc"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="'hello'"):
        NeuronxCompiler(str(program)).version()


# -- nothing outlives us ----------


def started(note: Path) -> list[int]:
    for _ in range(1000):
        if note.is_file() and len(note.read_text().split()) == 2:
            return [int(pid) for pid in note.read_text().split()]
        time.sleep(0.02)
    raise AssertionError("the compiler did not start")


def gone(pid: int) -> bool:
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


CHILD = """
import sys
from pathlib import Path
from neuron_store.compilers.neuronx_cc import NeuronxCompiler
graph, stub, note, work = sys.argv[1:]
flags = ["--target=trn2", "--stub-sleep=300", f"--stub-child={note}"]
job = NeuronxCompiler(stub).job(Path(graph), flags=flags)
try:
    job.compile(Path(work))
except KeyboardInterrupt:
    print("interrupted", sorted(p.name for p in Path(work).iterdir()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_our_death_ends_the_compiler_and_its_children(tmp_path, number):
    graph, note, work = tmp_path / "g.hlo", tmp_path / "note", tmp_path / "work"
    graph.write_bytes(hlo())
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, graph, STUB, note, work], stdout=subprocess.PIPE, text=True
    )
    pids = started(note)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert all(gone(pid) for pid in pids)
    if number == signal.SIGINT:
        assert said == "interrupted ['log-neuron-cc.txt']\n"


def test_children_that_a_compiler_leaves_behind_go_with_it(tmp_path):
    note = tmp_path / "note"
    compiled(make(flags=f"--stub-child={note}"), tmp_path)
    assert all(gone(pid) for pid in started(note))


def test_compiles_in_threads_do_not_end_each_other(tmp_path):
    jobs = [make(flags=f"--stub-sleep=0.{n} --optlevel={n}") for n in range(1, 5)]
    for job in jobs:
        (tmp_path / job.key).mkdir()
    threads = [threading.Thread(target=j.compile, args=(tmp_path / j.key,)) for j in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(foreign_artifact(tmp_path / j.key, j.key) is not None for j in jobs)


@pytest.mark.parametrize("flags", [["--optlevel", "1\0"], ["--target=trn2", "-O"], None])
def test_flags_that_the_compiler_cannot_be_given_make_no_job(flags):
    with pytest.raises(ConfigError, match="compiler flag"):
        COMPILER.job(hlo(), flags=flags)


@pytest.mark.parametrize("said", ["[Errno 28] No space left on device", "nothing"])
def test_a_full_disk_is_named_and_not_tried_again(tmp_path, monkeypatch, said):
    if said == "nothing":  # as when the log had no room either
        full = os.statvfs_result((4096, 4096, 1000, 0, 0, 1000, 10, 10, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CompileError, match="disk full: no space left in") as caught:
        compiled(make(flags=f"--stub-say='{said}' --stub-exit=1"), tmp_path)
    assert str(tmp_path) in caught.value.reason
    assert caught.value.permanent


def test_an_option_without_its_value_does_not_take_one_from_the_variable(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "1 --auto-cast=none")
    with pytest.raises(ConfigError, match="-O has no value"):
        make(flags="-O")


# -- loading ----------


def test_a_whole_artifact_is_left_to_the_neuron_runtime(tmp_path):
    path = compiled(make(), tmp_path)
    with pytest.raises(Unsupported, match="the artifact is whole"):
        COMPILER.load(path)


def test_a_damaged_artifact_is_refused_first(tmp_path):
    path = compiled(make(), tmp_path)
    neff = path / f"graph_{path.name}.neff"

    def spoilt(change) -> Path:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        copy = Path(shutil.copytree(path, tmp_path / "x" / path.name))
        change(copy)
        return copy

    def truncate(copy: Path) -> None:
        data = (copy / neff.name).read_bytes()[:-5]
        (copy / neff.name).write_bytes(data)
        (copy / ".compilation_complete").write_text(f"completed:1.0\nneff_size:{len(data)}\n")
        assert neff_length(data) != len(data)

    for change, told in [
        (lambda c: (c / ".compilation_complete").unlink(), "not a complete entry"),
        (lambda c: (c / neff.name).write_bytes(b"\2"), "not a complete entry"),
        (truncate, "its header says"),
        (lambda c: (c / METADATA_NAME).write_text('{"cache_key": "x"}'), "mismatch"),
    ]:
        with pytest.raises(ArtifactCorrupt, match=told):
            COMPILER.load(spoilt(change))

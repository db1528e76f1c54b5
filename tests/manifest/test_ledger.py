import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from neuron_store.manifest import ledger
from neuron_store.manifest.ledger import (
    clear_ledger,
    ledger_directory,
    manifest_root,
    read_ledger,
    record_graph,
)
from tests.manifest.ledger_worker import write_many

FLAGS = "--framework XLA --target trn2 '--internal-backend-options=--a=1 --b'"


@pytest.fixture(autouse=True)
def _fresh_writer():
    """As a process that has not written yet."""
    ledger._writer.reset()
    ledger._writer.complained = False
    yield
    ledger._writer.reset()


def own_file(root: Path, engine: str = "dev0_7") -> Path:
    return root / "ledger" / engine / f"{os.getpid()}.jsonl"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_what_the_page_says(manifests):
    record_graph("fc5c06b7", 3, ["4,", "4, 2048", ""], FLAGS)
    assert lines(own_file(manifests)) == [
        {
            "key": "fc5c06b7",
            "rank": 3,
            "input_shapes": ["4,", "4, 2048", ""],
            "compiler_flags": FLAGS,
        }
    ]


class Tensor:
    def __init__(self, *shape):
        self.shape = shape


class Symbol:
    def __str__(self):
        return "s0"


def test_shapes_are_taken_from_traced_inputs(manifests):
    record_graph(
        "k", 0, [Tensor(4), Tensor(4, 2), Tensor(), (7,), [1, 2], 3, Tensor(Symbol(), 8)], ""
    )
    assert lines(own_file(manifests))[0]["input_shapes"] == [
        "4,",
        "4, 2",
        "",
        "7,",
        "1, 2",
        "",
        "s0, 8",
    ]


def test_a_list_of_flags_is_quoted_and_not_glued(manifests):
    record_graph("k", 0, [], ["--a=1 2", "--b"])
    assert lines(own_file(manifests))[0]["compiler_flags"] == "'--a=1 2' --b"


@pytest.mark.parametrize(
    "texts",
    [['"', "\\", 'a"b'], ["é", "\x1f", "\n"], ["ü" * 40, ""], [], [""], ['", "'], ["a", '"']],
)
def test_any_text_survives_as_json(manifests, texts):
    record_graph('k"', 0, texts, 'f"\\\n')
    written = lines(own_file(manifests))
    assert len(written) == 1
    assert written[0]["input_shapes"] == texts
    assert (written[0]["key"], written[0]["compiler_flags"]) == ('k"', 'f"\\\n')


@pytest.mark.parametrize("value", [None, "", "  "])
def test_switched_off_nothing_is_computed_and_nothing_written(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    if value is None:
        monkeypatch.delenv("VLLM_NEURON_MANIFEST_DIR", raising=False)
    else:
        monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", value)

    def never():
        raise AssertionError("computed")

    record_graph("k", never, never, never)
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home_directory_for_both(tmp_path, monkeypatch):
    """A pod's specification and a unit file are read by no shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", "~/m")
    record_graph("k", 0, [], "")
    root = manifest_root()
    assert root == tmp_path / "home" / "m"
    assert [line.key for line in read_ledger(ledger_directory(root, "nodev"))] == ["k"]
    assert not (tmp_path / "~").exists()


def test_switched_on_what_was_deferred_is_computed(manifests):
    record_graph("k", lambda: 2, lambda: [(4,)], lambda: ["--a"])
    assert lines(own_file(manifests)) == [
        {"key": "k", "rank": 2, "input_shapes": ["4,"], "compiler_flags": "--a"}
    ]


def test_the_first_write_of_a_run_truncates_what_an_earlier_process_left(manifests):
    own_file(manifests).parent.mkdir(parents=True)
    own_file(manifests).write_text('{"key": "stale"}\n')
    record_graph("a", 0, [], "")
    record_graph("b", 0, [], "")
    assert [line["key"] for line in lines(own_file(manifests))] == ["a", "b"]


def test_a_forked_child_truncates_its_own_stale_file_and_leaves_its_parents(manifests):
    record_graph("parent", 0, [], "")
    child = os.fork()
    if child == 0:
        own_file(manifests).write_text('{"key": "stale"}\n' * 3)
        record_graph("child", 1, [], "")
        record_graph("child2", 1, [], "")
        os._exit(0)
    os.waitpid(child, 0)
    record_graph("parent2", 0, [], "")
    assert [line["key"] for line in lines(own_file(manifests))] == ["parent", "parent2"]
    theirs = own_file(manifests).with_name(f"{child}.jsonl")
    assert [line["key"] for line in lines(theirs)] == ["child", "child2"]


def test_a_line_survives_os_exit_in_a_child_that_was_forked_while_a_thread_wrote(manifests):
    stop = threading.Event()

    def hammer():
        while not stop.is_set():
            record_graph("parent", 0, ["4,"], FLAGS)

    thread = threading.Thread(target=hammer)
    thread.start()
    children = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            record_graph("child", 1, [], "")
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
        theirs = own_file(manifests).with_name(f"{child}.jsonl")
        assert [line["key"] for line in lines(theirs)] == ["child"]
    stop.set()
    thread.join()
    assert {line["key"] for line in lines(own_file(manifests))} == {"parent"}


def test_threads_do_not_interleave(manifests):
    shapes = ["4, 2048"] * 400

    def write(number):
        for turn in range(100):
            record_graph(f"{number}-{turn}", number, shapes, FLAGS)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = lines(own_file(manifests))
    assert len({line["key"] for line in written}) == len(written) == 800
    assert all(line["input_shapes"] == shapes for line in written)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_sixty_four_processes_at_once_lose_and_tear_nothing(manifests, method):
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=write_many, args=(n, 200)) for n in range(64)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    written = list(read_ledger(ledger_directory(manifests, "dev0_7")))
    assert len({line.key for line in written}) == len(written) == 64 * 200
    assert all(line.input_shapes == ("4,", "4, 2048") * 10 for line in written)


def test_the_engine_is_resolved_late(manifests, monkeypatch):
    record_graph("before", 0, [], "")
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-15")
    record_graph("after", 0, [], "")
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7")
    record_graph("again", 0, [], "")
    assert [line["key"] for line in lines(own_file(manifests))] == ["before", "again"]
    assert [line["key"] for line in lines(own_file(manifests, "dev8_15"))] == ["after"]


def test_after_the_emitter_removed_the_ledger_lines_go_to_a_new_file(manifests):
    record_graph("a", 0, [], "")
    clear_ledger(manifests, "dev0_7")
    record_graph("b", 0, [], "")
    assert [line["key"] for line in lines(own_file(manifests))] == ["b"]


def test_a_ledger_that_others_removed_is_begun_anew_at_the_next_line(manifests):
    record_graph("a", 0, [], "")
    shutil.rmtree(manifests / "ledger")
    record_graph("b", 0, [], "")
    assert [line["key"] for line in lines(own_file(manifests))] == ["b"]


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b"])
def test_a_descriptor_that_others_closed_and_reused_is_not_written_to(manifests, tmp_path, mode):
    record_graph("a", 0, [], "")
    number = ledger._writer.descriptor
    (tmp_path / "strangers").write_bytes(b"")
    with open(tmp_path / "strangers", mode) as stranger:
        os.dup2(stranger.fileno(), number)
        record_graph("b", 0, [], "")
        os.close(number)
    assert (tmp_path / "strangers").read_bytes() == b""
    assert [line["key"] for line in lines(own_file(manifests))] == ["a", "b"]


def test_a_descriptor_of_the_directory_that_others_reused_costs_no_line(manifests, tmp_path):
    record_graph("a", 0, [], "")
    stranger = tmp_path / "strange"
    stranger.mkdir()
    descriptor = os.open(stranger, os.O_RDONLY | os.O_DIRECTORY)
    number = os.dup2(descriptor, ledger._writer.folder)
    record_graph("b", 0, [], "")
    # And it stays the stranger's.
    assert os.fstat(ledger._writer.folder).st_ino == own_file(manifests).parent.stat().st_ino
    assert [line["key"] for line in lines(own_file(manifests))] == ["a", "b"]
    os.close(descriptor)
    os.close(number)
    assert list(stranger.iterdir()) == []


def test_a_stranger_with_the_same_flags_is_told_by_its_file(manifests, monkeypatch, tmp_path):
    monkeypatch.setattr(ledger, "_RECHECK", -1.0)
    record_graph("a", 0, [], "")
    stranger = os.open(tmp_path / "strangers", ledger._FLAGS | os.O_CREAT)
    os.dup2(stranger, ledger._writer.descriptor)
    record_graph("b", 0, [], "")
    assert os.fstat(stranger).st_size == 0
    os.close(stranger)


def test_a_directory_that_cannot_be_made_is_said_once_and_never_raised(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            record_graph("k", 0, [], "")
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


def test_arguments_that_raise_are_swallowed(manifests, caplog):
    def broken():
        raise RuntimeError("no group")

    def leaves():
        raise SystemExit(3)

    record_graph("k", broken, [], "")
    record_graph("k", leaves, [], "")
    record_graph("k", 0, leaves, "")
    record_graph("k", "no rank", [], "")
    record_graph(None, 0, [], "")
    record_graph("k", 0, None, "")
    assert len(caplog.records) == 1
    record_graph("good", 0, [], "")
    assert [line["key"] for line in lines(own_file(manifests))] == ["good"]


def test_a_signals_handler_that_records_meanwhile_ends(manifests, monkeypatch, caplog):
    """The lock was held for ever by the thread that waited for it."""
    make_own = ledger.make_own

    def interrupted(folder):
        monkeypatch.setattr(ledger, "make_own", make_own)
        record_graph("handler", 0, [], "")
        make_own(folder)

    monkeypatch.setattr(ledger, "make_own", interrupted)
    record_graph("outer", 0, [], "")
    record_graph("later", 0, [], "")
    assert [line["key"] for line in lines(own_file(manifests))] == ["outer", "later"]
    assert "a signal's handler recorded while its thread did" in caplog.text


def test_a_symbolic_link_in_the_place_of_the_file_is_not_followed(manifests, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    own_file(manifests).parent.mkdir(parents=True)
    own_file(manifests).symlink_to(victim)
    record_graph("k", 0, [], "")
    assert victim.read_text() == "precious"


def test_a_line_after_one_that_a_full_disk_cut_off_stands_by_itself(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small tmpfs")
    program = """
import os, sys
from neuron_store.manifest.ledger import record_graph
root = os.environ["VLLM_NEURON_MANIFEST_DIR"]
filler = open(root + "/filler", "wb", buffering=0)
record_graph("first", 0, [], "")
try:
    while filler.write(b"x" * 1024): pass
except OSError: pass
for n in range(200): record_graph(f"lost{n}", 0, ["4,"] * 200, "")
filler.truncate(0)
record_graph("last", 0, [], "")
"""
    try:
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            env={**os.environ, "VLLM_NEURON_MANIFEST_DIR": str(disk), "NEURON_VISIBLE_DEVICES": ""},
            capture_output=True,
        )
        found = [line.key for line in read_ledger(disk / "ledger" / "nodev")]
        assert found[0] == "first"
        assert found[-1] == "last"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_reading_skips_torn_and_foreign_lines_and_says_so(tmp_path, caplog):
    good = {"key": "k", "rank": 1, "input_shapes": ["4,"], "compiler_flags": "--a"}
    bad = [
        b"[]",
        b'{"key": 1, "rank": 0, "input_shapes": [], "compiler_flags": ""}',
        b'{"key": "k", "rank": true, "input_shapes": [], "compiler_flags": ""}',
        b'{"key": "k", "rank": 0, "input_shapes": [4], "compiler_flags": ""}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"",
    ]
    text = json.dumps(good).encode()
    (tmp_path / "1.jsonl").write_bytes(b"\n".join([*bad, text]) + b"\n" + text[:-5])
    (tmp_path / "2.jsonl").write_bytes(text + b"\n")
    (tmp_path / "3.txt").write_bytes(text)
    (tmp_path / "4.jsonl").mkdir()
    found = list(read_ledger(tmp_path))
    assert [(line.key, line.rank) for line in found] == [("k", 1), ("k", 1)]
    assert "7 torn or foreign lines" in caplog.text
    assert list(read_ledger(tmp_path / "absent")) == []


def put_there(path, kind, outside):
    """Something that is no file of ours; a pipe gets a reader, so that it can be written."""
    if kind == "pipe":
        os.mkfifo(path)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    path.symlink_to({"link": outside, "endless": "/dev/zero"}[kind])
    return None


@pytest.mark.parametrize("kind", ["pipe", "link", "endless"])
def test_what_is_no_file_is_skipped_is_no_reason_to_keep_the_ledger_and_is_not_written(
    manifests, tmp_path, kind, caplog
):
    record_graph("before", 0, [], "")
    folder, outside = manifests / "ledger" / "dev0_7", tmp_path / "outside"
    good = {"key": "planted", "rank": 1, "input_shapes": [], "compiler_flags": ""}
    outside.write_text(json.dumps(good) + "\n")
    text = outside.read_text()
    reader = put_there(folder / "3.jsonl", kind, outside)
    unread = []
    assert [line.key for line in read_ledger(folder, unread)] == ["before"]
    assert unread == []
    assert "3.jsonl skipped" in caplog.text
    if reader is not None:
        os.close(reader)
    clear_ledger(manifests, "dev0_7")
    folder.mkdir()
    ledger._writer.reset()
    reader = put_there(folder / f"{os.getpid()}.jsonl", kind, outside)
    record_graph("lost", 0, [], "")
    assert "the compile ledger cannot be written" in caplog.text
    assert outside.read_text() == text
    if reader is not None:
        assert os.read(reader, 100) == b""
        os.close(reader)


def test_a_link_in_place_of_an_engines_ledger_is_neither_written_nor_read(
    manifests, tmp_path, caplog
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (manifests / "ledger").mkdir(parents=True)
    (manifests / "ledger" / "dev0_7").symlink_to(outside)
    record_graph("a", 0, [], "")
    assert list(outside.iterdir()) == []
    assert "a symbolic link in place of our own directory" in caplog.text
    with pytest.raises(OSError, match="symbolic link"):
        list(read_ledger(manifests / "ledger" / "dev0_7"))


def test_clearing_removes_one_engines_directory_and_no_others(manifests, monkeypatch):
    record_graph("a", 0, [], "")
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-15")
    record_graph("b", 0, [], "")
    clear_ledger(manifests, "dev0_7")
    clear_ledger(manifests, "dev0_7")
    assert [entry.name for entry in (manifests / "ledger").iterdir()] == ["dev8_15"]

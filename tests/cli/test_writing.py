"""Files that a command writes because somebody named them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading

import pytest

from neuron_store.cli.writing import write_named
from neuron_store.errors import ConfigError
from neuron_store.manifest.schema import Graph, Manifest, load_manifest
from tests.cli.test_manifest import listing, write
from tests.manifest.entries import key_of


def test_a_file_is_replaced_and_nothing_else_left(tmp_path):
    (tmp_path / "f").write_text("old")
    write_named(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_text() == "new"
    assert set(os.listdir(tmp_path)) == {"f", "home"}


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to("f")
    for data in (b"one", b"two"):
        write_named(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "f").read_bytes() == data


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_named(pipe, b"x" * 200_000)
    reader.join()
    assert got == [b"x" * 200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a device")
def test_a_device_is_written_to_and_stays_one(tmp_path):
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    try:
        write_named(device, b"data")
    except ConfigError:
        pytest.skip("the file system takes no devices")
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_directory_and_a_place_that_is_not_there_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "f"):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_named(path, b"data")
    assert os.listdir(tmp_path) == ["home"]


def test_the_standard_output_may_be_named(command, tmp_path):
    path = listing(tmp_path / "m" / "manifest.json", 1)
    told = command("manifest", "merge", path.parent, "-o", "/dev/stdout")
    assert told.returncode == 0
    assert [g.graph_hash for g in load_manifest(told.stdout).graphs] == [key_of(1)]
    assert os.path.realpath("/dev/stdout") != "/dev/stdout"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_the_command_also_without_a_buffer(tmp_path, unbuffered, command):
    path = listing(tmp_path / "m.json", *range(5000))
    reading, writing = os.pipe()

    def leave():
        os.read(reading, 10)
        os.close(reading)

    reader = threading.Thread(target=leave)
    reader.start()
    with os.fdopen(writing, "wb") as pipe:
        ended = run_into(pipe, path, unbuffered)
    reader.join()
    assert ended.returncode == 141
    whole = command("manifest", "show", path, env={"PYTHONUNBUFFERED": unbuffered})
    assert len(whole.stdout.splitlines()) == 5000


def run_into(pipe, path, unbuffered):
    return subprocess.run(
        [sys.executable, "-m", "neuron_store.cli", "manifest", "show", str(path)],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=pipe,
        stderr=subprocess.PIPE,
        check=False,
    )


def test_a_report_takes_half_a_character_anywhere(cli, tmp_path):
    path = tmp_path / "m.json"
    write(path, Manifest(graphs=(Graph("k", created_timestamp="HALF", hlo_path="x"),)))
    path.write_text(path.read_text().replace("HALF", "\\ud800"))
    cli("manifest", "report", path, "-o", tmp_path / "r.html")
    assert "<!doctype html>" in (tmp_path / "r.html").read_text()
    assert cli("manifest", "report", path, "-o", "-").stdout.startswith("<!doctype html>")

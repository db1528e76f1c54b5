"""Inputs that are no ordinary files, and outputs that take nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from neuron_store.compilers import _graph
from neuron_store.errors import ConfigError
from tests.cli.conftest import KEY


@pytest.mark.parametrize("compiler", ["iree", "neuronx-cc"])
@pytest.mark.parametrize("graph", ["/dev/zero", "pipe"])
def test_a_graph_that_never_ends_is_refused(command, tmp_path, compiler, graph):
    os.mkfifo(tmp_path / "pipe")
    env = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}
    options = ["--local", tmp_path / "local"]
    command_line = [*options, "compile", tmp_path / graph, "--compiler", compiler]
    result = command(*command_line, env=env)
    assert result.returncode == 2
    if compiler == "iree":
        assert "not a regular file" in result.stderr


def test_a_jobs_file_that_never_ends_is_refused(command, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for jobs in ("/dev/zero", tmp_path / "pipe"):
        result = command("--local", tmp_path / "local", "compile", "--jobs", jobs)
        assert result.returncode == 2
        assert "not a regular file" in result.stderr


def test_a_jobs_file_that_names_a_device_is_refused_with_its_line(command, tmp_path):
    jobs = tmp_path / "jobs"
    jobs.write_text(json.dumps({"compiler": "iree", "graph": "/dev/zero"}))
    result = command("--local", tmp_path / "local", "compile", "--jobs", jobs)
    assert result.returncode == 2
    assert "line 1: graph /dev/zero cannot be read: not a regular file" in result.stderr


def test_a_graph_above_the_bound_is_refused_and_one_behind_a_link_is_read(tmp_path):
    (tmp_path / "graph").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("graph")
    assert _graph.read_graph(tmp_path / "link") == b"12345"
    with pytest.raises(ConfigError, match="5 bytes; at most 4"):
        _graph.read_input(tmp_path / "graph", "graph", 4)


def shell(tail: str, *arguments: object):
    program = f'exec "$0" -m neuron_store.cli "$@" {tail}'
    return subprocess.run(
        ["/bin/sh", "-c", program, sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["--help"]])
def test_a_full_stdout_is_an_error_of_one_line(put, places, arguments):
    put(places.local)
    result = shell(">/dev/full", "--local", places.local, *arguments)
    assert result.returncode == 1
    assert result.stderr == "error: stdout cannot be written: No space left on device\n"


@pytest.mark.parametrize("tail", [">&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", "2>&-"])
def test_the_work_is_done_without_the_standard_streams(put, places, tail):
    put(places.shared)
    options = ["--local", places.local, "--tier", places.shared]
    result = shell(tail, *options, "fetch", KEY)
    assert (result.returncode, result.stderr) == (0, "")
    assert (places.local / KEY).is_dir()
    assert shell(tail, *options, "fetch", "f" * 32).returncode == 1

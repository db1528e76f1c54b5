"""One cause, one outcome and one exit status, whichever way it is met."""

from __future__ import annotations

import json

import pytest

from neuron_store.compilers._example_graphs import example_graph
from neuron_store.compilers._hlo import is_hlo
from tests.cli.conftest import KEY


def test_fetch_of_a_key_whose_only_copy_is_damaged_says_corrupt(cli, put, places):
    put(places.shared)
    (places.shared / KEY / f"graph_{KEY}.vmfb").write_bytes(b"XXXXXXX")
    [answer] = cli.json("fetch", KEY, status=1)["artifacts"]
    assert answer["outcome"] == "corrupt"
    [answer] = cli.json("fetch", "f" * 32, status=1)["artifacts"]
    assert answer["outcome"] == "missing"


@pytest.mark.parametrize("more", [[], ["--to", "ro"]])
def test_promote_to_a_read_only_tier_is_a_matter_of_settings(command, put, places, more):
    put(places.local)
    tier = f"posix://{places.shared}?read_only=1&name=ro"
    result = command("--local", places.local, "--tier", tier, "promote", KEY, *more)
    assert result.returncode == 2
    assert "read-only" in result.stderr


def test_doctor_without_the_extra_is_a_matter_of_settings(command, places, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['botocore'] = None")
    options = ["--local", places.local, "--tier", "s3://bucket/x"]
    result = command(*options, "doctor", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    assert "neuron-store[s3]" in result.stderr
    assert "fit" in result.stdout


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_iree_given_hlo_says_what_it_is_and_what_is_wanted(cli, name):
    pytest.importorskip("iree.compiler")
    told = cli("compile", example_graph(name, ".hlo"), status=2).stderr
    assert "HloModuleProto" in told
    assert "takes StableHLO" in told
    assert not is_hlo(example_graph(name, ".mlir").read_bytes())


def test_compile_with_the_cache_off_says_that_nothing_is_kept(command, places):
    pytest.importorskip("iree.compiler")
    env = {"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"}
    options = ["--local", places.local, "compile", example_graph("decode")]
    result = command(*options, "--json", env=env)
    assert result.returncode == 0
    [answer] = json.loads(result.stdout)["artifacts"]
    assert (answer["outcome"], answer["path"]) == ("compiled", None)
    assert "is not kept" in result.stderr
    assert not places.local.exists()


def test_doctor_does_not_make_a_directory_that_may_be_a_mount_that_is_missing(command, places):
    gone = places.shared.parent / "not-mounted"
    result = command("--local", places.local, "--tier", gone, "doctor")
    assert result.returncode == 1
    assert "mount the share" in result.stdout + result.stderr
    assert not gone.exists()

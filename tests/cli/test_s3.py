"""The commands on an object store, where nothing is a directory."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from neuron_store.manifest.schema import Graph, Manifest, dump_manifest
from neuron_store.testing import make_source
from neuron_store_backends.local import LocalStore
from tests.cli.conftest import KEY, OTHER
from tests.servers.moto import CREDENTIALS


@pytest.fixture
def bucket(server, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server.faults.clear()
    client = server.client()
    client.create_bucket(Bucket="cli")
    yield client
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="cli"):
        for entry in page.get("Contents", ()):
            client.delete_object(Bucket="cli", Key=entry["Key"])
    client.delete_bucket(Bucket="cli")


@pytest.fixture
def s3(bucket, server, command, places):
    def run(*arguments, status=0):
        tier = f"s3://cli/cache?endpoint_url={server.url}&name=far"
        result = command("--local", places.local, "--tier", tier, *arguments, "--json")
        assert result.returncode == status, result.stderr
        return json.loads(result.stdout)

    return run


def test_promote_list_show_verify_and_fetch(s3, put, places):
    put(places.local)
    assert [a["outcome"] for a in s3("promote", "--all")["artifacts"]] == ["created"]
    shutil.rmtree(places.local)
    (listed,) = s3("ls")["artifacts"]
    assert (listed["tier"], listed["key"], listed["size"]) == ("far", KEY, 7)
    assert [t["outcome"] for t in s3("show", KEY)["tiers"]] == ["miss", "hit"]
    assert [a["outcome"] for a in s3("verify", "--tier", "far")["artifacts"]] == ["ok"]
    (fetched,) = s3("fetch", KEY)["artifacts"]
    assert (fetched["outcome"], fetched["tier"]) == ("fetched", "far")
    assert (places.local / KEY / f"graph_{KEY}.vmfb").read_bytes() == b"program"


def test_a_damaged_record_is_listed_and_the_others_too(s3, bucket, put, places):
    put(places.local)
    put(places.local, OTHER)
    s3("promote", "--all")
    bucket.put_object(Bucket="cli", Key=f"cache/index/{KEY}.json", Body=b"{")
    outcomes = {a["key"]: a["outcome"] for a in s3("ls", "--tier", "far", status=1)["artifacts"]}
    assert outcomes == {KEY: "corrupt", OTHER: "hit"}
    outcomes = {
        a["key"]: a["outcome"] for a in s3("verify", "--tier", "far", status=1)["artifacts"]
    }
    assert outcomes == {KEY: "corrupt", OTHER: "ok"}


def telling(command, places, tier):
    """Runs a command that must succeed; what it printed."""

    def run(*arguments):
        result = command("--local", places.local, "--tier", tier, *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_show_and_doctor_tell_what_is_compressed(server, bucket, command, put, places):
    data = b"program " * 5000
    put(places.local, data=data)
    tier = f"s3://cli/cache?endpoint_url={server.url}&name=far&compress=zstd"
    run = telling(command, places, tier)
    run("promote", "--all")
    near, far = json.loads(run("show", KEY, "--json"))["tiers"]
    name = f"graph_{KEY}.vmfb"
    form = far["stored"][name]
    assert form["encoding"] == "zstd"
    lies = bucket.get_object(Bucket="cli", Key=f"cache/payload/{KEY}/{form['sha256']}/{name}")
    assert form["size"] == lies["ContentLength"] == far["stored_size"] < 1000
    assert (near["stored"], near["stored_size"]) == ({}, len(data))
    assert f"{name} stored as zstd: {form['size']} B of 39.1 KiB" in run("show", KEY)
    checks = {c["name"]: c for c in json.loads(run("doctor", "--json"))["tiers"][1]["checks"]}
    assert checks["compress"]["detail"].startswith("zstd")
    assert "compress=zstd" in run("config")
    shutil.rmtree(places.local)
    run("fetch", KEY)
    assert (places.local / KEY / name).read_bytes() == data


def test_show_tells_what_lies_together(server, bucket, command, places, tmp_path):
    files = {f"kernels/{n}.bin": b"%d" % n * (9000 + n) for n in range(6)}
    LocalStore(places.local).publish(*make_source(tmp_path / "source", KEY, files))
    run = telling(command, places, f"s3://cli/cache?endpoint_url={server.url}&name=far")
    run("promote", "--all")
    assert "6 small files together in one object: 52.7 KiB" in run("show", KEY)
    near, far = json.loads(run("show", KEY, "--json"))["tiers"]
    assert (near["stored_size"], far["stored_size"]) == (54_015, 54_015)
    assert {form["encoding"] for form in far["stored"].values()} == {"bundle"}


def test_doctor_finds_it_fit(s3):
    tier = s3("doctor")["tiers"][1]
    assert tier["location"] == "s3://cli/cache"
    assert tier["fit"] is True


def test_an_interrupt_does_not_wait_for_a_transfer(bucket, server, put, places):
    put(places.local)
    held = server.faults.add("hold", method="PUT", path="/cli/cache/index/")
    tier = f"s3://cli/cache?endpoint_url={server.url}"
    options = ["--local", str(places.local), "--tier", tier]
    process = subprocess.Popen(
        [sys.executable, "-m", "neuron_store.cli", *options, "promote", KEY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert held.reached.wait(60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        held.released.set()
        process.kill()
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_prefetch_tells_how_far_it_came(places, put, tmp_path, monkeypatch, number):
    put(places.local)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(dump_manifest(Manifest(graphs=(Graph(KEY), Graph(OTHER)))))
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        tier = f"s3://b/p?endpoint_url=http://127.0.0.1:{silent.getsockname()[1]}"
        options = ["--local", str(places.local), "--tier", tier]
        command = ["prefetch", "--manifest", str(manifest)]
        process = subprocess.Popen(
            [sys.executable, "-m", "neuron_store.cli", *options, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            # It asks for the second graph, and waits for an answer.
            with silent.accept()[0]:
                process.send_signal(number)
                _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert "interrupted: 1 of 2 graphs are here" in told
    assert "Traceback" not in told

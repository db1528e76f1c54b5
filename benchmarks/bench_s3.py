"""The S3 tier against the other ways to move files to and from S3, on one server in one run.

    make bench ARGS='-k s3 -s'

The server is SeaweedFS, a real one, on the same cores: so CPU that an engine saves is speed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.servers.moto import CREDENTIALS
from tests.servers.seaweed import client, seaweed

pytestmark = [pytest.mark.bench, pytest.mark.slow]

SHAPES = {"512 MiB": [512 << 20], "200 x 256 KiB": [256 << 10] * 200}
ROUNDS = 3
_SERVERS_ROOM = 14 << 30  # it frees what was removed much later
PROGRAMS = ("neuron_store", "boto3", "s3fs", "obstore", "rclone", "aws")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    for name, value in CREDENTIALS.items():
        os.environ[name] = value
    # In memory where there is room: else all engines wait for the server's disk, more or less.
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free if memory.is_dir() else 0
    place = memory if room > _SERVERS_ROOM else tmp_path_factory.getbasetemp()
    with (
        tempfile.TemporaryDirectory(dir=place, prefix="neuron_store-bench.") as folder,
        seaweed(Path(folder)) as url,
    ):
        client(url).create_bucket(Bucket="bench")
        yield url


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    """The AWS command, in an environment of its own: it wants one exact botocore."""
    folder = tmp_path_factory.mktemp("aws")
    uv = Path(sys.executable).parent / "uv"
    python = str(folder / "venv" / "bin" / "python")
    for command in (
        [uv, "venv", "-q", "-p", sys.executable, folder / "venv"],
        [uv, "pip", "install", "-q", "-p", python, "awscli"],
    ):
        if subprocess.run([str(c) for c in command], check=False).returncode:
            return None
    return str(folder / "venv" / "bin" / "aws")


def measure(engine, operation, folder, url, name, **env):
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.s3_engines", engine, operation, folder, url, name],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **env},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def make(path, size):
    """A file of random bytes; what the record says of it."""
    # In pieces: the peak of this process is the least that a child of it can show.
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for start in range(0, size, 1 << 20):
            piece = os.urandom(min(1 << 20, size - start))
            digest.update(piece)
            file.write(piece)
    return {"name": path.name, "size": size, "sha256": digest.hexdigest()}


def judge(median, engines, operation):
    """What the bars say against our figures."""
    mine = median["neuron_store", operation]
    others = {engine: median[engine, operation] for engine in engines[1:]}
    for engine, other in others.items():
        share = other["seconds"] / mine["seconds"]
        print(f"  {operation}: {share:.2f} times the speed of {engine}")
        if share < (0.9 if engine == "obstore" else 1.0):
            yield f"{operation}: {share:.2f} times the speed of {engine}"
    cpu = mine["cpu"] / min(other["cpu"] for other in others.values())
    print(f"  {operation}: {cpu:.2f} times the least CPU")
    if cpu > 1.2:
        yield f"{operation}: {cpu:.2f} times the least CPU"
    if mine["peak"] > 150:
        yield f"{operation}: {mine['peak']:.0f} MiB"


@pytest.mark.parametrize("shape", SHAPES)
def test_s3_engines(tmp_path, server, aws, shape):
    """Bar: as fast as the fastest (0.9 of obstore's speed), at 1.2 times the least CPU."""
    source = tmp_path / "source"
    source.mkdir()
    record = [make(source / f"f{number:03}", size) for number, size in enumerate(SHAPES[shape])]
    (tmp_path / "record.json").write_text(json.dumps(record))
    env = {"BENCH_RECORD": str(tmp_path / "record.json"), "BENCH_AWS": aws or ""}
    engines = [e for e in PROGRAMS if e != "aws" or aws]
    found = {(e, o): [] for e in engines for o in ("put", "get")}
    # Rounds inside out, so that what else the machine does meets all of them.
    for turn in range(ROUNDS):
        for engine in engines:
            name = f"{engine}-{turn}-{len(record)}"
            found[engine, "put"].append(measure(engine, "put", source, server, name, **env))
            into = tmp_path / "into"
            into.mkdir()
            found[engine, "get"].append(measure(engine, "get", into, server, name, **env))
            assert len(list(into.iterdir())) == len(record)
            shutil.rmtree(into)
            remove(server, name)
    mib = sum(SHAPES[shape]) / (1 << 20)
    median = {
        case: {k: statistics.median(r[k] for r in rows) for k in rows[0]}
        for case, rows in found.items()
    }
    print(f"\n{shape}: medians of {ROUNDS}")
    for operation in ("put", "get"):
        for engine in engines:
            m = median[engine, operation]
            print(
                f"  {operation} {engine:13} {mib / m['seconds']:6.0f} MiB/s"
                f" {m['cpu'] / mib * 1024:6.2f} s CPU a GiB {m['peak']:6.0f} MiB peak"
            )
    missed = [m for operation in ("put", "get") for m in judge(median, engines, operation)]
    assert not missed


def remove(url, name):
    door = client(url)
    pages = door.get_paginator("list_objects_v2").paginate(Bucket="bench", Prefix=name)
    for key in [o["Key"] for page in pages for o in page.get("Contents", [])]:
        door.delete_object(Bucket="bench", Key=key)


def test_two_hundred_small_artifacts_arrive_through_twenty_milliseconds(tmp_path, slow_s3):
    """Bar: 1.5 s. Straight from the tier, and through a store into its local tier."""
    from neuron_store import TieredStore
    from neuron_store.registry import open_tier
    from neuron_store.testing import make_source
    from neuron_store_backends.local import LocalStore

    shared = open_tier(slow_s3)
    keys = [hashlib.md5(str(n).encode(), usedforsecurity=False).hexdigest() for n in range(200)]
    for key in keys:
        shared.publish(*make_source(tmp_path / "src" / key, key, {"graph.neff": key.encode() * 90}))

    def straight(key):
        into = tmp_path / "into" / key
        into.mkdir(parents=True)
        shared.fetch(key, into)

    spent = {"the tier": timed(straight, keys)}
    with TieredStore([LocalStore(tmp_path / "local"), shared]) as store:
        store.find("warm")
        spent["a store"] = timed(store.get, keys)
    for what, seconds in spent.items():
        print(f"\n200 small artifacts from {what}: {seconds:.2f} s, bar 1.5", end="")
    print()
    assert spent["the tier"] <= 1.5


def timed(call, keys):
    began = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, keys))
    return time.perf_counter() - began


def test_a_dead_endpoint_delays_a_hundred_compiles_by_one_deadline_in_all(tmp_path, monkeypatch):
    """Bar: NEURON_STORE_TIER_DEADLINE, 30 s, beside the same compiles without the tier."""
    from neuron_store import CompileCoordinator, TieredStore
    from neuron_store.policy import CompilePolicy
    from neuron_store_backends.local import LocalStore
    from neuron_store_backends.s3 import S3Store
    from tests.fakes import FakeCompile
    from tests.servers.processes import black_hole

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)

    def compiles(name, *shared):
        with TieredStore([LocalStore(tmp_path / name), *shared]) as store:
            coordinator = CompileCoordinator(store, CompilePolicy())
            began = time.perf_counter()
            for number in range(100):
                coordinator.get_or_compile(FakeCompile(f"k{number}", str(tmp_path / "log")).job())
            return time.perf_counter() - began

    alone = compiles("alone")
    with black_hole() as url:
        beside = compiles("beside", S3Store("bucket/p", endpoint_url=url))
    print(f"\n100 compiles {alone:.1f} s, with a dead S3 endpoint {beside:.1f} s, bar + 30 s")
    assert beside - alone <= 30

"""The core's bars: each figure is a ratio to a reference measured in the same run.

    make bench            # all
    make bench ARGS='-k hit -s'

Medians or best-ofs of several rounds; the machines are noisy, so a bar that fails narrowly while
something else runs says little.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from neuron_store import CompileCoordinator, CompileError, CompileJob
from neuron_store.artifact import RECORD_NAME
from neuron_store.policy import CompilePolicy
from neuron_store.testing import make_source, race_publishers
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from neuron_store_backends.s3 import S3Store
from tests.fakes import FakeCompile, starts

pytestmark = [pytest.mark.bench, pytest.mark.slow]

KEY = "0123456789abcdef0123456789abcdef"


def best(call, rounds=200):
    """Seconds of the quickest of many calls: what the work takes when nothing interferes."""
    spent = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return min(spent), statistics.median(spent)


def test_a_local_hit_against_the_system_calls_it_cannot_do_without(tmp_path):
    """Bar: at most 8 times the stats and the read of the record."""
    store = LocalStore(tmp_path / "root")
    coordinator = CompileCoordinator(store, CompilePolicy())
    compile_ = FakeCompile(KEY, str(tmp_path / "log"))
    job = compile_.job(components={"target": "trn2"})
    path = coordinator.get_or_compile(job)
    names = [f"{path}/{f.name}" for f in store.find(KEY).files]
    record = f"{path}/{RECORD_NAME}"

    def bare():
        for name in names:
            os.stat(name)
        with open(record, "rb") as file:
            file.read()

    ours, ours_median = best(lambda: coordinator.get_or_compile(job), 2000)
    reference, reference_median = best(bare, 2000)
    print(
        f"\nhit {ours * 1e6:.0f} us (median {ours_median * 1e6:.0f}), bare calls "
        f"{reference * 1e6:.0f} us (median {reference_median * 1e6:.0f}): "
        f"ratio {ours / reference:.2f} (median {ours_median / reference_median:.2f})"
    )
    assert ours <= 8 * reference


def test_import_against_bare_python_and_fsspec():
    """Bar: at most 60 ms above bare Python plus `import fsspec`."""

    def seconds(code):
        command = [sys.executable, "-c", code]
        return best(functools.partial(subprocess.run, command, check=True), 15)[0]

    reference, ours = seconds("import fsspec"), seconds("import neuron_store")
    everything = seconds(
        "from neuron_store import CompileCoordinator, CompileJob, open_store; open_store('/tmp/x')"
    )
    print(
        f"\nimport neuron_store {ours * 1e3:.0f} ms, fsspec {reference * 1e3:.0f} ms: "
        f"{(ours - reference) * 1e3:+.0f} ms; with a store opened {everything * 1e3:.0f} ms"
    )
    assert ours <= reference + 0.060


def _rank(root, log, seconds, fail, meeting):
    barrier, results = meeting
    coordinator = CompileCoordinator(LocalStore(root), CompilePolicy())
    job = FakeCompile(KEY, log, seconds=seconds, fail=fail).job()
    barrier.wait()
    cpu, error = time.process_time(), ""
    try:
        coordinator.get_or_compile(job)
    except CompileError as caught:
        error = str(caught)
    results.put((time.monotonic(), time.process_time() - cpu, error, coordinator.counts))


def _ranks(tmp_path, count, seconds, fail=""):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(count), context.Queue()
    args = (str(tmp_path / "root"), str(tmp_path / "log"), seconds, fail, (barrier, results))
    ranks = [context.Process(target=_rank, args=args) for _ in range(count)]
    for rank in ranks:
        rank.start()
    told = [results.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    return told


def test_sixteen_ranks_one_compile_of_two_seconds(tmp_path):
    """Bar: one compile; the last is done within 150 ms of the first; under 1 % of a core each."""
    told = _ranks(tmp_path, 16, 2.0)
    at = sorted(t[0] for t in told)
    waiters = [t[1] for t in told if "compiled" not in t[3]]
    print(
        f"\n{len(starts(tmp_path / 'log'))} compile; spread {(at[-1] - at[0]) * 1e3:.0f} ms; "
        f"waiters' CPU median {statistics.median(waiters) / 2:.2%}, max {max(waiters) / 2:.2%}"
    )
    assert len(starts(tmp_path / "log")) == 1
    assert at[-1] - at[0] <= 0.150
    assert statistics.median(waiters) / 2 < 0.01


def test_errors_reach_all_within_a_second(tmp_path):
    """Bar: two attempts, 16 equal errors, none later than 1 s after the second failure."""
    told = _ranks(tmp_path, 16, 0.5, fail="always")
    at = sorted(t[0] for t in told)
    second_start = float((tmp_path / "log").read_text().splitlines()[1].split()[1])
    late = at[-1] - (second_start + 0.5)
    print(f"\n{len(starts(tmp_path / 'log'))} attempts; last error {late * 1e3:.0f} ms after")
    assert len(starts(tmp_path / "log")) == 2
    assert len({t[2] for t in told}) == 1
    assert told[0][2]
    assert late <= 1.0


@pytest.fixture(scope="module")
def gibibyte(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big") / KEY
    folder.mkdir()
    block = os.urandom(16 << 20)
    with open(folder / "graph.bin", "wb") as file:
        file.writelines(bytes([n]) + block[1:] for n in range(64))
    (folder / "graph.hlo").write_bytes(block[: 1 << 20])
    return folder


def _settle():
    subprocess.run(["sync"], check=True)


def test_promote_of_a_gibibyte_against_cp_and_sync(tmp_path, gibibyte):
    """Bar: at least 0.8 times the speed of `cp -r` + `sync`, digests included."""
    from neuron_store.artifact import Artifact
    from neuron_store.neuron_layout import list_files

    artifact = Artifact(KEY, tuple(list_files(gibibyte, KEY)))
    ours, reference = [], []
    for n in range(5):
        store = PosixStore(tmp_path / f"tier{n}")
        _settle()
        began = time.perf_counter()
        store.publish(artifact, gibibyte)
        ours.append(time.perf_counter() - began)
        shutil.rmtree(store.root)
        _settle()
        began = time.perf_counter()
        subprocess.run(["cp", "-r", str(gibibyte), str(tmp_path / f"copy{n}")], check=True)
        subprocess.run(["sync", "-f", str(tmp_path)], check=True)
        reference.append(time.perf_counter() - began)
        shutil.rmtree(tmp_path / f"copy{n}")
    ratio = statistics.median(reference) / statistics.median(ours)
    print(
        f"\npromote {statistics.median(ours):.2f} s, cp + sync {statistics.median(reference):.2f} s"
        f": {ratio:.2f} x its speed"
    )
    assert ratio >= 0.8


def _peak(action):
    """MiB that a child needed above idle for `action`."""
    here, there = multiprocessing.Pipe()

    def child():
        idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        action()
        there.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) / 1024)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert here.poll(500)
    peak = here.recv()
    process.join()
    return peak


@pytest.mark.parametrize("kind", ["posix", "s3"])
def test_memory_of_promote_and_fetch_of_a_gibibyte(tmp_path, gibibyte, kind, request):
    """Bar: under 200 MiB above idle, whatever the size."""
    from neuron_store.artifact import Artifact
    from neuron_store.neuron_layout import list_files

    artifact = Artifact(KEY, tuple(list_files(gibibyte, KEY)))
    if kind == "posix":
        open_tier = functools.partial(PosixStore, tmp_path / "tier")
    else:
        place = request.getfixturevalue("file_bucket")
        open_tier = functools.partial(S3Store, "bench/prefix", endpoint_url=place)
    into = tmp_path / "into"
    into.mkdir()
    # The client's own modules are no cost of the transfer.
    promote = _peak(lambda: open_tier().publish(artifact, gibibyte))
    fetch = _peak(lambda: open_tier().fetch(KEY, into))
    print(f"\n{kind}: promote {promote:.0f} MiB, fetch {fetch:.0f} MiB above idle")
    assert promote < 200
    assert fetch < 200


@pytest.fixture
def file_bucket(tmp_path, monkeypatch):
    """An S3 server that keeps its objects on the disk, in a process of its own."""
    import socket
    import urllib.request

    from tests.servers.moto import CREDENTIALS

    pytest.importorskip("localbucket", reason="the server localbucket is not installed")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = tmp_path / "buckets"
    (root / "bench").mkdir(parents=True)
    command = [str(Path(sys.executable).with_name("localbucket")), str(root)]
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        import boto3

        client = boto3.client("s3", endpoint_url=url)
        try:
            client.create_bucket(Bucket="bench")
        except client.exceptions.ClientError:
            pass
        yield url
        server.terminate()


@pytest.mark.parametrize("kind", ["local", "posix", "s3"])
def test_thirty_two_promoters_one_hundred_rounds(tmp_path, kind, monkeypatch):
    """Bar: exactly one CREATED in each round, the others PRESENT or CONFLICT."""
    keys = [f"{n:032x}" for n in range(100)]
    if kind == "s3":
        from tests.servers.moto import CREDENTIALS, MotoServer

        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        with MotoServer() as moto:
            moto.client().create_bucket(Bucket="race")
            factory = functools.partial(S3Store, "race/p", endpoint_url=moto.url)
            _race(factory, keys)
    else:
        store = {"local": LocalStore, "posix": PosixStore}[kind]
        _race(functools.partial(store, str(tmp_path / "tier")), keys)


def _race(factory, keys):
    races = race_publishers(factory, keys=keys, writers=32, same=False, method="fork")
    assert [len(r.winners) for r in races] == [1] * len(keys)
    assert {a for r in races for a in r.answers} <= {"CREATED", "PRESENT", "CONFLICT"}
    store = factory()
    assert sorted(store.keys()) == keys
    for key in keys:
        store.verify(key)


def test_compile_job_without_components_costs_nothing_more(tmp_path):
    """For the record: what comparing the components adds to a hit."""
    store = LocalStore(tmp_path / "root")
    artifact, source = make_source(tmp_path / "s", KEY, {"f": b"x"}, components={"a": "b"})
    store.publish(artifact, source)
    coordinator = CompileCoordinator(store, CompilePolicy())
    without = CompileJob(KEY, print)
    with_ = CompileJob(KEY, print, {"a": "b"})
    plain = best(lambda: coordinator.get_or_compile(without), 1000)[1]
    compared = best(lambda: coordinator.get_or_compile(with_), 1000)[1]
    print(f"\nhit {plain * 1e6:.0f} us, compared {compared * 1e6:.0f} us")

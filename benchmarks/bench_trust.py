"""What signatures and digests cost, each figure against the same work without, in one run.

make bench ARGS='-k trust -s'
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from neuron_store import CompileCoordinator, TieredStore
from neuron_store.artifact import RECORD_NAME
from neuron_store.policy import CompilePolicy
from neuron_store.signing import Signer, create_key, statement
from neuron_store.testing import make_source
from neuron_store.trust import TrustPolicy
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile

pytestmark = [pytest.mark.bench, pytest.mark.slow]

KEY = "0123456789abcdef0123456789abcdef"
FILES = {f"file{n}": os.urandom(2000) for n in range(6)}
COMPONENTS = {f"component{n}": "x" * 60 for n in range(30)}


@pytest.fixture
def signer(tmp_path):
    create_key(tmp_path / "key")
    return Signer.load(tmp_path / "key", what="--key")


@pytest.fixture
def memory():
    """A directory without a disk beneath: flushing one takes tens of milliseconds, and varies."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def test_trust_a_signature_on_a_fetched_hit(tmp_path, memory, signer):
    """Bar: at most 1 ms more than the same fetch without one, the best of alternating fetches."""
    local, shared = LocalStore(memory / "local"), PosixStore(memory / "shared")
    artifact, source = make_source(tmp_path / "s", KEY, FILES, components=COMPONENTS)
    local.publish(artifact, source)
    TieredStore([local, shared], signer=signer).promote(KEY)
    policy = TrustPolicy([signer.public], required=True)
    stores = {
        "with": TieredStore([LocalStore(memory / "with"), shared], trust=policy),
        "without": TieredStore([LocalStore(memory / "without"), shared]),
    }
    spent = {name: [] for name in stores}
    for _ in range(300):
        for name, store in stores.items():
            store.local.delete(KEY)
            began = time.perf_counter()
            store.get(KEY)
            spent[name].append(time.perf_counter() - began)
    best = {name: min(s) for name, s in spent.items()}
    medians = {name: statistics.median(s) for name, s in spent.items()}
    added = best["with"] - best["without"]
    alone = []
    found = shared.find(KEY)
    for _ in range(500):
        began = time.perf_counter()
        policy.accept(found, "shared")
        alone.append(time.perf_counter() - began)
    signing = []
    for _ in range(500):
        began = time.perf_counter()
        signer.sign(found)
        signing.append(time.perf_counter() - began)
    print(
        f"\nfetch {best['without'] * 1e3:.2f} ms, with a signature {best['with'] * 1e3:.2f} ms: "
        f"{added * 1e3:+.3f} ms (medians {medians['without'] * 1e3:.2f}, "
        f"{medians['with'] * 1e3:.2f} ms); the check alone "
        f"{statistics.median(alone) * 1e6:.0f} us, signing {statistics.median(signing) * 1e6:.0f} "
        f"us, of a statement of {len(statement(found))} bytes"
    )
    assert added <= 0.001


def test_trust_a_local_hit_with_its_digests_checked_at_first(tmp_path):
    """Bar: at most 8 times the stats and the read of the record, as the hit in bench_core."""
    local = LocalStore(tmp_path / "root")
    job = FakeCompile(KEY, str(tmp_path / "log")).job(components={"target": "trn2"})
    coordinators = {
        mode: CompileCoordinator(TieredStore([local], verify=mode), CompilePolicy())
        for mode in ("size", "first", "always")
    }
    path = coordinators["first"].get_or_compile(job)
    names = [f"{path}/{f.name}" for f in local.find(KEY).files]

    def bare():
        for name in names:
            os.stat(name)
        with open(f"{path}/{RECORD_NAME}", "rb") as file:
            file.read()

    calls = {"bare": bare}
    for mode, coordinator in coordinators.items():
        calls[mode] = lambda coordinator=coordinator: coordinator.get_or_compile(job)
    spent = {name: [] for name in calls}
    for _ in range(2000):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            spent[name].append(time.perf_counter() - began)
    best = {name: min(s) for name, s in spent.items()}
    print(
        "\n"
        + ", ".join(
            f"{name} {best[name] * 1e6:.0f} us ({best[name] / best['bare']:.2f} x)" for name in best
        )
    )
    assert best["first"] <= 8 * best["bare"]


def test_trust_the_first_load_of_half_a_gibibyte(tmp_path, monkeypatch):
    """For the record: the first load, the next processes', and bare sha256 of the same bytes."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    source = tmp_path / "s"
    source.mkdir()
    block = os.urandom(16 << 20)
    with open(source / "graph.bin", "wb") as file:
        file.writelines(bytes([n]) + block[1:] for n in range(32))
    from neuron_store.artifact import Artifact, ArtifactFile

    LocalStore(tmp_path / "root").publish(
        Artifact(KEY, (ArtifactFile("graph.bin", 512 << 20),)), source, consume=True
    )
    told = {}
    for name in ("first", "next"):
        store = TieredStore([LocalStore(tmp_path / "root")], verify="first")
        began = time.perf_counter()
        store.path_of(KEY)
        told[name] = time.perf_counter() - began
    began = time.perf_counter()
    with open(tmp_path / "root" / KEY / "graph.bin", "rb") as file:
        hashlib.file_digest(file, "sha256")
    bare = time.perf_counter() - began
    shutil.rmtree(tmp_path / "root")
    print(
        f"\nof 512 MiB {told['first']:.2f} s ({told['first'] / bare:.2f} x bare sha256), "
        f"next process {told['next'] * 1e6:.0f} us"
    )

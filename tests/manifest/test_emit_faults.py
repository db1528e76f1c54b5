"""A fault at every file call of an emit, and a kill: a manifest, or the ledger for the next."""

from __future__ import annotations

import multiprocessing

import pytest

from neuron_store.manifest import ledger
from neuron_store.manifest.emitter import emit_manifest
from neuron_store.manifest.ledger import record_graph
from neuron_store.manifest.reader import read_manifest
from neuron_store.testing import FaultyFiles, FileFault, faults_for
from neuron_store_backends.local import LocalStore
from tests.manifest.entries import fill, key_of

pytestmark = pytest.mark.slow
KEYS = [key_of(number) for number in range(3)]


@pytest.fixture(autouse=True)
def _fresh_writer(monkeypatch):
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7")
    ledger._writer.reset()
    yield
    ledger._writer.reset()


@pytest.fixture
def store(tmp_path):
    for key in KEYS:
        fill(tmp_path / "root", key)
    return LocalStore(tmp_path / "root")


def capture(monkeypatch, place):
    monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", str(place))
    ledger._writer.reset()
    for rank, key in enumerate(KEYS):
        record_graph(key, rank, ["f32[1]"], "-O1")
    ledger._writer.reset()


def emit(store, fault, place):
    with FaultyFiles(place, fault) as files:
        emit_manifest(store, config={}, rank_to_global=[0, 1, 2])
    return files


def judge(store, place):
    """A manifest that is there is whole, or the next emit makes it; what lies beside it."""
    path, graphs = place / "dev0_7" / "manifest.json", None
    if path.exists():
        graphs = [g.graph_hash for g in read_manifest(path).graphs]
    if graphs != sorted(KEYS):
        assert (place / "ledger" / "dev0_7").exists()
        emit_manifest(store, config={}, rank_to_global=[0, 1, 2])
    assert [g.graph_hash for g in read_manifest(path).graphs] == sorted(KEYS)
    return [p.name for p in (place / "dev0_7").iterdir() if p.name != "manifest.json"]


def test_no_failing_call_of_an_emit_costs_a_graph(store, tmp_path, monkeypatch):
    capture(monkeypatch, tmp_path / "count")
    calls = emit(store, None, tmp_path / "count").calls
    points = 0
    for number, fault in enumerate(faults_for(calls)):
        place = tmp_path / str(number)
        capture(monkeypatch, place)
        points += bool(emit(store, fault, place).injected)
        left = judge(store, place)
        assert left == [], f"{fault} ({calls[fault.at - 1]}) leaves {left}"
    print(f"emit: {points} points injected at {len(calls)} calls")
    assert points > 20


def test_a_kill_at_any_call_of_an_emit_costs_no_graph(store, tmp_path, monkeypatch):
    capture(monkeypatch, tmp_path / "count")
    calls = emit(store, None, tmp_path / "count").calls
    context = multiprocessing.get_context("fork")
    for at in range(1, len(calls) + 1):
        place = tmp_path / str(at)
        capture(monkeypatch, place)
        child = context.Process(target=emit, args=(store, FileFault(at, kill=True), place))
        child.start()
        child.join()
        assert child.exitcode == -9, calls[at - 1]
        judge(store, place)

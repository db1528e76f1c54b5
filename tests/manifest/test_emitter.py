import dataclasses
import json
import logging
import os
import stat
import time
from pathlib import Path

import pytest

from neuron_store.manifest import emitter, enrich, ledger
from neuron_store.manifest.config import build_config, installed_packages
from neuron_store.manifest.emitter import emit_manifest, write_manifest
from neuron_store.manifest.engine import engine_id
from neuron_store.manifest.ledger import record_graph
from neuron_store.manifest.reader import read_manifest
from neuron_store.manifest.schema import Graph, Manifest
from neuron_store.tiered import TieredStore
from neuron_store_backends.local import LocalStore
from tests.manifest.entries import NAME_TOO_LONG, fill, key_of, publish

FLAGS = "--framework XLA --target trn2 --auto-cast=none --output /c/x.neff --logfile /c/log"


@pytest.fixture(autouse=True)
def _fresh_writer():
    ledger._writer.reset()
    yield
    ledger._writer.reset()


@dataclasses.dataclass
class ModelConfig:
    model: str = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    dtype: str = "torch.bfloat16"
    max_model_len: int = 256
    hf_token: str = "hf_sesame"


@dataclasses.dataclass
class ParallelConfig:
    world_size: int = 4
    tensor_parallel_size: int = 4
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 2
    enable_expert_parallel: bool = False


@dataclasses.dataclass
class SchedulerConfig:
    max_num_seqs: int = 4


@dataclasses.dataclass
class VllmConfig:
    model_config: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel_config: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    additional_config: dict = dataclasses.field(
        default_factory=lambda: {"neuron_config": {"attention_dp_degree": 2, "buckets": [128]}}
    )


def test_a_node_that_fetched_tells_the_time_of_the_compile_as_the_one_that_compiled(
    manifests, root, remote, tmp_path
):
    fill(root, key_of(1), mtime=1786048631.818072)
    compiled = TieredStore([LocalStore(root), remote])
    compiled.promote(key_of(1))
    fetched = TieredStore([LocalStore(tmp_path / "other"), remote])
    fetched.get(key_of(1))
    for store in (compiled, fetched, remote):
        record_graph(key_of(1), 0, [], FLAGS)
        told = read_manifest(emit_manifest(store)).graphs[0]
        assert told.created_timestamp == "2026-08-06T20:37:11.818072+00:00"


def test_a_time_that_nobody_knew_is_not_told(manifests, root, remote, tmp_path):
    fill(root, key_of(1), mtime=1e-9)
    TieredStore([LocalStore(root), remote]).promote(key_of(1))
    record_graph(key_of(1), 0, [], FLAGS)
    assert remote.find(key_of(1)).created.startswith("1970")
    graph = read_manifest(emit_manifest(remote)).graphs[0]
    assert graph.neff_size is not None
    assert graph.created_timestamp is None


class Leaving:
    @property
    def model_config(self):
        raise SystemExit(3)

    @property
    def parallel_config(self):
        raise GeneratorExit


def test_a_configuration_that_ends_the_program_costs_only_its_own_value(manifests, store, root):
    fill(root, key_of(1))
    record_graph(key_of(1), 0, [], FLAGS)
    record_graph(key_of(1), 1, [], FLAGS)

    def leaves(rank):
        if rank:
            raise SystemExit(3)
        return rank

    path = emit_manifest(store, config=Leaving(), rank_to_global=leaves)
    assert read_manifest(path).graphs[0].ranks == (0,)


def test_a_manifest_says_what_was_compiled_from_what_on_which_ranks(manifests, store, root):
    fill(root, key_of(1), payload=948_474, mtime=1786048631.818072)
    fill(root, key_of(2), hlo="scalar", mtime=1786048640.0)
    for rank in range(4):
        record_graph(key_of(1), rank, ["4,", "4,"], FLAGS)
        if rank % 2:
            record_graph(key_of(2), rank, [""], FLAGS)
    path = emit_manifest(store, config=VllmConfig(), rank_to_global=lambda rank: rank + 4)
    assert path == manifests / "dev0_7" / "manifest.json"
    written = json.loads(path.read_text())
    assert written["graphs"] == [
        {
            "graph_hash": key_of(1),
            "hlo_path": f"{key_of(1)}/graph.hlo",
            "neff_path": f"{key_of(1)}/graph_{key_of(1)}.neff",
            "neff_size": 949_498,
            "created_timestamp": "2026-08-06T20:37:11.818072+00:00",
            "input_shapes": ["4,", "4,"],
            "output_shapes": ["4", "4, 512", "8, 4, 64"],
            "compiler_flags": "--framework XLA --target trn2 --auto-cast=none",
            "ranks": [4, 5, 6, 7],
            "input_snapshot_paths": [],
            "output_snapshot_paths": [],
        },
        {
            "graph_hash": key_of(2),
            "hlo_path": f"{key_of(2)}/graph.hlo",
            "neff_path": f"{key_of(2)}/graph_{key_of(2)}.neff",
            "neff_size": 6024,
            "created_timestamp": "2026-08-06T20:37:20+00:00",
            "input_shapes": [""],
            "output_shapes": [""],
            "compiler_flags": "--framework XLA --target trn2 --auto-cast=none",
            "ranks": [5, 7],
            "input_snapshot_paths": [],
            "output_snapshot_paths": [],
        },
    ]
    config = written["config"]
    assert config["topology"] == {
        "world_size": 4,
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 2,
        "attention_dp_size": 2,
        "ep_degree": 1,
        "decode_context_parallel_size": 1,
        "has_collectives": True,
    }
    assert [config[name] for name in ("model", "target", "dtype", "max_num_seqs")] == [
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "trn2",
        "torch.bfloat16",
        4,
    ]
    assert config["neuron_config"] == {"attention_dp_degree": 2, "buckets": [128]}
    assert config["vllm_config"]["model_config"]["hf_token"] == "***"
    assert "sesame" not in path.read_text()
    assert "pytest" in written["environment"]
    assert "python" in written["environment"]
    assert not (manifests / "ledger" / "dev0_7").exists()
    assert (manifests / "ledger").is_dir()
    assert read_manifest(path).graphs[0].neff_size == 949_498


def test_the_executable_is_stat_once_and_the_store_asked_for_no_more_than_its_path(
    manifests, store, root, monkeypatch
):
    fill(root, key_of(1))
    record_graph(key_of(1), 0, [], "")
    counted = []
    real = os.stat

    def counting(path, **options):
        counted.append(str(path))
        return real(path, **options)

    monkeypatch.setattr(enrich.os, "stat", counting)
    emit_manifest(store)
    assert sum(path.endswith(".neff") for path in counted) == 1


@pytest.mark.parametrize("value", [None, ""])
def test_switched_off_nothing_happens(store, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("VLLM_NEURON_MANIFEST_DIR", raising=False)
    else:
        monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", value)
    monkeypatch.setattr(emitter, "read_ledger", lambda _: pytest.fail("computed"))
    assert emit_manifest(store) is None


def test_only_local_rank_0_emits_and_only_it_removes_the_ledger(manifests, store):
    record_graph(key_of(1), 0, [], "")
    assert emit_manifest(store, local_rank=1) is None
    assert (manifests / "ledger" / "dev0_7").is_dir()
    assert emit_manifest(store, local_rank=0) is not None


def test_an_empty_ledger_gives_an_empty_manifest(manifests, store):
    path = emit_manifest(store)
    written = json.loads(path.read_text())
    assert written["graphs"] == []
    assert written["manifest_version"] == "1"
    assert written["config"]["model"] is None


def test_neighbours_ledgers_and_manifests_stay(manifests, store, monkeypatch):
    record_graph(key_of(1), 0, [], "")
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-15")
    record_graph(key_of(2), 0, [], "")
    assert emit_manifest(store).parent.name == "dev8_15"
    assert [d.name for d in (manifests / "ledger").iterdir()] == ["dev0_7"]
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7")
    assert [g.graph_hash for g in read_manifest(emit_manifest(store)).graphs] == [key_of(1)]
    assert {d.name for d in manifests.iterdir()} == {"ledger", "dev0_7", "dev8_15"}


def test_an_artifact_that_has_vanished_gives_nulls(manifests, store, root):
    fill(root, key_of(1))
    record_graph(key_of(1), 0, ["4,"], "--a")
    record_graph(key_of(2), 0, ["8,"], "--b")
    written = json.loads(emit_manifest(store).read_text())["graphs"]
    assert written[0]["neff_size"] == 6024
    gone = written[1]
    assert gone["graph_hash"] == key_of(2)
    for name in ("hlo_path", "neff_path", "neff_size", "created_timestamp", "output_shapes"):
        assert gone[name] is None
    assert (gone["input_shapes"], gone["compiler_flags"], gone["ranks"]) == (["8,"], "--b", [0])


def test_an_hlo_module_that_cannot_be_read_costs_only_its_shapes(manifests, store, root, caplog):
    for number in (1, 2):
        (fill(root, key_of(number)) / "graph.hlo").write_bytes(b"not a module")
        record_graph(key_of(number), 0, [], "")
    graph = read_manifest(emit_manifest(store)).graphs[0]
    assert graph.neff_size == 6024
    assert graph.hlo_path is not None
    assert graph.output_shapes is None
    # Thousands of lines would say no more.
    assert caplog.text.count("cannot be read") == 1
    assert f"result shapes of 2 graphs cannot be read; the first: {graph.graph_hash}" in caplog.text


def test_another_compilers_executable_goes_by_its_own_name(manifests, store, tmp_path):
    publish(store, tmp_path / "src", key_of(1), executable=f"graph_{key_of(1)}.vmfb")
    record_graph(key_of(1), 0, [], "")
    graph = read_manifest(emit_manifest(store)).graphs[0]
    assert graph.neff_path == f"{key_of(1)}/graph_{key_of(1)}.vmfb"
    assert graph.neff_size == 6024


def test_nothing_but_the_interface_is_needed_to_describe_graphs(manifests, remote, tmp_path):
    for number in range(20):
        publish(remote, tmp_path / "src", key_of(number))
        record_graph(key_of(number), 0, [], "")
    record_graph(key_of(99), 0, [], "")
    graphs = read_manifest(emit_manifest(remote)).graphs
    assert [g.neff_size for g in graphs] == [6024] * 20 + [None]
    assert graphs[0].output_shapes == ("4", "4, 512", "8, 4, 64")
    assert graphs[0].created_timestamp.endswith("+00:00")


def test_a_store_in_trouble_costs_the_details_and_not_the_manifest(manifests, tmp_path, caplog):
    record_graph(key_of(1), 2, ["4,"], "")
    graph = read_manifest(emit_manifest(LocalStore(tmp_path / NAME_TOO_LONG))).graphs[0]
    assert (graph.ranks, graph.neff_size) == ((2,), None)
    assert f"graph {key_of(1)} cannot be described: TierError" in caplog.text


def test_a_stranger_of_a_store_that_raises_anything_costs_no_more(
    manifests, store, root, monkeypatch
):
    def broken(_):
        raise KeyError("third party")

    fill(root, key_of(2))
    record_graph(key_of(1), 0, [], "")
    record_graph(key_of(2), 0, [], "")
    real = LocalStore.path_of
    monkeypatch.setattr(
        LocalStore, "path_of", lambda s, key: broken(key) if key == key_of(1) else real(s, key)
    )
    assert [g.neff_size for g in read_manifest(emit_manifest(store)).graphs] == [None, 6024]


@pytest.mark.parametrize(
    ("mapping", "ranks"),
    [
        (None, [0, 1]),
        ({0: 8, 1: 9}, [8, 9]),
        ([4, 5], [4, 5]),
        (lambda rank: rank + 16, [16, 17]),
        ({0: 8}, [8]),
        ([7], [7]),
        (lambda _: -1, []),
        (lambda _: 1 / 0, []),
    ],
)
def test_tensor_parallel_ranks_become_global_ones_or_none(manifests, store, mapping, ranks):
    record_graph(key_of(1), 0, [], "")
    record_graph(key_of(1), 1, [], "")
    path = emit_manifest(store, rank_to_global=mapping)
    assert json.loads(path.read_text())["graphs"][0]["ranks"] == ranks


@pytest.mark.parametrize(
    ("rank", "mapping"),
    [("-1", None), ("1" + "0" * 30, None), ("1" + "0" * 5000, None), ("0", {0: 1 << 70, 3: 3})],
    ids=["no group", "large", "too large for Python", "large when mapped"],
)
def test_a_rank_that_no_manifest_can_hold_costs_only_itself(manifests, store, rank, mapping):
    """As vLLM has it, -1 is a rank that is in no group."""
    directory = manifests / "ledger" / engine_id()
    directory.mkdir(parents=True)
    (directory / "1.jsonl").write_text(
        f'{{"key": "bad", "rank": {rank}, "input_shapes": [], "compiler_flags": ""}}\n'
    )
    record_graph("good", 3, [(4,)], "")
    manifest = read_manifest(emit_manifest(store, rank_to_global=mapping))
    assert manifest.graph("good").ranks == (3,)
    bad = manifest.graph("bad")
    assert bad is None or bad.ranks == ()
    assert not directory.exists()


def test_a_target_that_ends_the_program_when_asked_costs_only_itself(manifests, store):
    class Ending:
        def __bool__(self):
            raise SystemExit(3)

    class Neuron:
        target = Ending()
        platform_target = "trn2"

    manifest = read_manifest(emit_manifest(store, config=VllmConfig(), neuron_config=Neuron()))
    assert manifest.config.model == ModelConfig.model
    assert "Ending" in manifest.config.target


def test_what_a_killed_emitter_left_is_removed_in_time(manifests, store):
    folder = manifests / engine_id()
    folder.mkdir(parents=True)
    old, young = folder / ".manifest.json.1.aa.tmp", folder / ".manifest.json.2.bb.tmp"
    for path in (old, young):
        path.write_text("half")
    past = time.time() - 7200
    os.utime(old, (past, past))
    emit_manifest(store)
    # The young one may be another emitter's that is still writing.
    assert sorted(p.name for p in folder.iterdir()) == [young.name, "manifest.json"]


def test_a_time_beyond_the_calendar_costs_only_itself(manifests, store, root):
    neff = next(fill(root, key_of(1)).glob("*.neff"))
    try:
        os.utime(neff, (1e12, 1e12))
    except OSError:
        pytest.skip("this file system holds no such time")
    record_graph(key_of(1), 0, [], "")
    graph = read_manifest(emit_manifest(store)).graphs[0]
    # ext4 ends in the year 2446.
    assert (graph.created_timestamp is None) is (neff.stat().st_mtime > 3e11)
    assert graph.neff_size == 6024


def test_graphs_stand_in_the_order_in_which_the_lowest_rank_traced_them(manifests, store):
    folder = manifests / "ledger" / "dev0_7"
    folder.mkdir(parents=True)

    def line(key: int, rank: int) -> str:
        return json.dumps(
            {"key": key_of(key), "rank": rank, "input_shapes": [], "compiler_flags": ""}
        )

    (folder / "100.jsonl").write_text("\n".join([line(5, 1), line(3, 1), line(9, 1)]) + "\n")
    (folder / "200.jsonl").write_text("\n".join([line(9, 0), line(3, 0)]) + "\n")
    graphs = read_manifest(emit_manifest(store)).graphs
    assert [int(g.graph_hash, 16) for g in graphs] == [9, 3, 5]


def test_a_torn_last_line_and_unsafe_keys_are_left_out(manifests, store):
    folder = manifests / "ledger" / "dev0_7"
    folder.mkdir(parents=True)
    good = {"key": key_of(1), "rank": 0, "input_shapes": [], "compiler_flags": ""}
    text = json.dumps(good)
    evil = json.dumps({**good, "key": "../../etc/passwd"})
    (folder / "1.jsonl").write_text(f"{evil}\n{text}\n{text[:30]}")
    assert [g.graph_hash for g in read_manifest(emit_manifest(store)).graphs] == [key_of(1)]


def test_pipes_and_endless_devices_in_the_ledger_hold_nobody_up(manifests, store):
    record_graph(key_of(1), 0, [], "")
    folder = manifests / "ledger" / "dev0_7"
    os.mkfifo(folder / "3.jsonl")
    (folder / "5.jsonl").symlink_to("/dev/zero")
    assert [g.graph_hash for g in read_manifest(emit_manifest(store)).graphs] == [key_of(1)]
    assert not folder.exists()
    assert Path("/dev/zero").exists()


@pytest.mark.parametrize("linked", ["directory", "file", "ledger"])
def test_no_manifest_is_written_through_a_link(manifests, store, tmp_path, linked, caplog):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("mine")
    if linked == "ledger":
        (manifests / "ledger").mkdir(parents=True)
        (manifests / "ledger" / "dev0_7").symlink_to(outside)
    else:
        record_graph(key_of(1), 0, [], "")
    if linked == "directory":
        (manifests / "dev0_7").symlink_to(outside)
    if linked == "file":
        (manifests / "dev0_7").mkdir()
        (manifests / "dev0_7" / "manifest.json").symlink_to(outside / "manifest.json")
    path = emit_manifest(store)
    assert [f.read_text() for f in outside.iterdir()] == ["mine"]
    if linked == "file":
        # Its place is taken by the manifest itself.
        assert not path.is_symlink()
        assert read_manifest(path).graphs
    else:
        assert path is None
        assert "symbolic link" in caplog.text
    assert (linked == "directory") == bool(list((manifests / "ledger").glob("dev0_7/*.jsonl")))


def test_relaunching_overwrites_and_leaves_nothing_beside(manifests, store):
    record_graph(key_of(1), 0, [], "")
    emit_manifest(store)
    record_graph(key_of(2), 0, [], "")
    path = emit_manifest(store)
    assert [g.graph_hash for g in read_manifest(path).graphs] == [key_of(2)]
    assert [f.name for f in path.parent.iterdir()] == ["manifest.json"]


def test_a_manifest_that_cannot_be_written_is_logged_and_the_ledger_kept(manifests, store, caplog):
    record_graph(key_of(1), 0, [], "")
    (manifests / "dev0_7").write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        assert emit_manifest(store) is None
    assert "no manifest was written" in caplog.text
    assert (manifests / "ledger" / "dev0_7").is_dir()


def test_a_configuration_that_raises_costs_only_itself(manifests, store):
    class Bad:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    record_graph(key_of(1), 0, [], "")
    manifest = read_manifest(emit_manifest(store, config=Bad(), neuron_config=Bad()))
    assert len(manifest.graphs) == 1


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "dev0_7" / "manifest.json"
    write_manifest(Manifest(), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(emitter, "write_all", full)
    with pytest.raises(OSError, match="space"):
        write_manifest(Manifest(graphs=(Graph("k"),)), path)
    assert path.read_bytes() == before
    assert [f.name for f in path.parent.iterdir()] == ["manifest.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0o044


def test_what_the_caller_says_wins_over_what_is_found():
    config = build_config(
        VllmConfig(),
        target="trn3",
        topology={"ep_degree": 8, "world_size": 16, "has_collectives": False, "unknown": 1},
        neuron_config={"target": "trn1"},
        compiler_flags="--target trn2",
        environ={"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"},
    )
    assert config.target == "trn3"
    assert (config.topology.ep_degree, config.topology.world_size) == (8, 16)
    assert config.topology.has_collectives is False


@pytest.mark.parametrize(
    ("neuron", "environ", "flags", "target"),
    [
        ({"target": "trn1"}, {"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}, "--target trn2", "trn1"),
        (None, {"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}, "--target trn2", "inf2"),
        (None, {}, "--target=trn2", "trn2"),
        (None, {}, "", None),
    ],
)
def test_the_target_is_looked_for_where_it_may_be(neuron, environ, flags, target):
    found = build_config(None, neuron_config=neuron, environ=environ, compiler_flags=flags)
    assert found.target == target


def test_one_rank_alone_has_no_collectives_and_experts_spread_over_all():
    alone = build_config(VllmConfig(parallel_config=ParallelConfig(1, 1, 1, 1)))
    assert alone.topology.has_collectives is False
    experts = build_config(
        VllmConfig(parallel_config=ParallelConfig(4, 4, 1, 2, enable_expert_parallel=True))
    )
    assert experts.topology.ep_degree == 8


def test_a_dictionary_serves_as_configuration():
    config = build_config({"model_config": {"model": "m", "dtype": "d"}, "api_key": "x"})
    assert (config.model, config.dtype) == ("m", "d")
    assert config.vllm_config["api_key"] == "***"
    assert config.topology.world_size is None


def test_installed_packages_are_told_with_python_first():
    packages = installed_packages()
    assert next(iter(packages)) == "python"
    assert packages["attrs"]
    assert list(packages)[1:] == sorted(list(packages)[1:])


def test_the_path_of_the_manifest_is_returned_as_a_path(manifests, store):
    assert isinstance(emit_manifest(store), Path)

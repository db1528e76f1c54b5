"""diff, merge, ready, plan, prefetch, promote, as functions."""

import json
import os
import signal
from multiprocessing import active_children, get_context
from pathlib import Path

import attrs
import pytest

from neuron_store.abc import Publication
from neuron_store.errors import ArtifactNotFound, ConfigError, PromoteError, TierError
from neuron_store.manifest.diff import diff_manifests
from neuron_store.manifest.merge import merge_engines
from neuron_store.manifest.plan import FlagChange, plan_upgrade
from neuron_store.manifest.prefetch import prefetch, promote_manifest
from neuron_store.manifest.reader import Engine
from neuron_store.manifest.ready import check_ready
from neuron_store.manifest.schema import (
    Config,
    Graph,
    Manifest,
    Topology,
    dump_manifest,
    load_manifest,
)
from neuron_store.tiered import TieredStore
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.manifest import samples
from tests.manifest.entries import NAME_TOO_LONG, InterfaceOnly, key_of, publish


def engine(*graphs: Graph, name: str = "dev0_7", world: int = 2, **options) -> Engine:
    config = Config(topology=Topology(world_size=world))
    return Engine(name, Path(name), Manifest(config=config, graphs=graphs, **options))


def graph(number: int, ranks=(0, 1), **options) -> Graph:
    return Graph(key_of(number), ranks=tuple(ranks), **options)


def two_tiers(local: Path, *shared: Path) -> TieredStore:
    return TieredStore([LocalStore(local), *(PosixStore(root) for root in shared)])


@pytest.fixture
def two(tmp_path, remote) -> TieredStore:
    return two_tiers(tmp_path / "local", remote.root)


# -- diff ------------------------------------------------------------------------------------------


def test_equal_manifests_do_not_differ():
    found = diff_manifests(samples.manifest(), samples.manifest())
    assert found.same
    assert found.plain()["same"] is True


def test_a_diff_names_graphs_fields_settings_and_packages():
    before = samples.manifest(graphs=4)
    graphs = list(before.graphs)
    graphs[1] = attrs.evolve(graphs[1], neff_size=1, ranks=(0,), extra={"new": 1})
    gone = graphs.pop(2)
    added = graph(77)
    after = attrs.evolve(
        before,
        graphs=(*graphs, added),
        environment={**before.environment, "torch": "2.12", "nki": "1"},
        config=attrs.evolve(
            before.config, max_num_seqs=64, vllm_config={"model_config": {"seed": 1}}
        ),
    )
    found = diff_manifests(before, after)
    assert not found.same
    assert [g.graph_hash for g in found.added] == [added.graph_hash]
    assert [g.graph_hash for g in found.gone] == [gone.graph_hash]
    assert set(found.changed[graphs[1].graph_hash]) == {"neff_size", "ranks", "new"}
    assert found.config["max_num_seqs"] == (32, 64)
    assert found.config["vllm_config.model_config.seed"] == (0, 1)
    assert "vllm_config.cache_config.block_size" in found.config
    assert set(found.environment) == {"torch", "nki"}
    plain = json.loads(json.dumps(found.plain()))
    assert plain["environment"]["nki"] == {"after": "1"}
    assert plain["changed"][graphs[1].graph_hash]["ranks"]["after"] == [0]


def test_fields_may_be_ignored():
    before = Manifest(graphs=(graph(1, created_timestamp="a"),))
    after = Manifest(graphs=(graph(1, created_timestamp="b"),))
    assert not diff_manifests(before, after).same
    assert diff_manifests(before, after, ignore={"created_timestamp"}).same


# -- merge -----------------------------------------------------------------------------------------


def test_a_merge_lists_each_graph_once_with_its_engines_and_is_itself_a_manifest():
    a = engine(graph(1), graph(2, neff_size=None), name="dev0_7", environment={"torch": "1"})
    b = engine(graph(2, (2, 3), neff_size=9), name="dev8_15", environment={"torch": "2"}, world=4)
    merged = load_manifest(dump_manifest(merge_engines([a, b])))
    assert [(g.graph_hash, g.ranks) for g in merged.graphs] == [
        (key_of(1), (0, 1)),
        (key_of(2), (0, 1, 2, 3)),
    ]
    assert merged.graphs[1].neff_size == 9
    assert merged.graphs[1].extra["engines"] == {"dev0_7": [0, 1], "dev8_15": [2, 3]}
    differences = merged.extra["engines"]["dev8_15"]
    assert differences["environment_differences"] == {"torch": "2"}
    assert differences["config_differences"] == {"topology.world_size": 4}
    assert merged.extra["engines"]["dev0_7"]["config_differences"] == {}


def test_merging_what_was_merged_keeps_the_engines_names():
    inner = merge_engines([engine(graph(1)), engine(graph(1, (2,)), name="dev8_15")])
    again = merge_engines([Engine("node1", Path("node1"), inner)])
    assert again.graphs[0].extra["engines"] == {"node1/dev0_7": [0, 1], "node1/dev8_15": [2]}


def test_a_merge_keeps_what_a_later_minor_brought():
    a = Engine("a", Path("a"), Manifest(extra={"later": 1, "x": 1}, manifest_version="1.2"))
    b = Engine("b", Path("b"), Manifest(extra={"later": 2, "more": 3}, manifest_version="1.10"))
    merged = load_manifest(dump_manifest(merge_engines([a, b])))
    assert merged.manifest_version == "1.10"
    assert {n: merged.extra[n] for n in ("later", "x", "more")} == {"later": 1, "x": 1, "more": 3}
    summary = merged.extra["engines"]
    assert summary["b"]["other_differences"] == {"later": 2, "more": 3, "x": None}
    assert "other_differences" not in summary["a"]


def test_merging_nothing_gives_an_empty_manifest():
    assert merge_engines([]).graphs == ()


# -- ready -----------------------------------------------------------------------------------------


def test_ready_when_every_graph_of_every_rank_is_there_and_verifies(remote, tmp_path):
    for number in (1, 2):
        publish(remote, tmp_path / "src", key_of(number))
    found = check_ready([engine(graph(1), graph(2))], remote)
    assert found.ready
    assert found.world_size == 2
    assert found.plain()["missing"] == []


def test_what_is_missing_is_named_with_its_ranks(remote, tmp_path):
    publish(remote, tmp_path / "src", key_of(1))
    found = check_ready([engine(graph(1), graph(2, (1,)))], remote)
    assert not found.ready
    assert [(g.key, g.ranks, g.state) for g in found.missing] == [(key_of(2), (1,), "missing")]


def test_damaged_bytes_are_found_only_by_verifying(remote, tmp_path):
    publish(remote, tmp_path / "src", key_of(1))
    program = remote.root / key_of(1) / f"graph_{key_of(1)}.neff"
    data = bytearray(program.read_bytes())
    data[-1] ^= 1
    program.write_bytes(data)
    assert check_ready([engine(graph(1))], remote, verify=False).ready
    found = check_ready([engine(graph(1))], remote)
    assert [g.state for g in found.missing] == ["corrupt"]


def test_a_tier_that_cannot_say_is_not_ready(tmp_path):
    found = check_ready([engine(graph(1))], InterfaceOnly(tmp_path / NAME_TOO_LONG))
    assert [(g.state, NAME_TOO_LONG in g.detail) for g in found.graphs] == [("error", True)]


def test_a_rank_that_traced_nothing_is_a_missing_manifest(remote, tmp_path):
    publish(remote, tmp_path / "src", key_of(1))
    found = check_ready([engine(graph(1))], remote, world_size=4)
    assert found.unseen_ranks == (2, 3)
    assert not found.ready


def test_ranks_beyond_the_world_size_are_a_no(remote, tmp_path):
    publish(remote, tmp_path / "src", key_of(1))
    found = check_ready([engine(graph(1, range(8)), world=8)], remote, world_size=4)
    assert not found.missing
    assert not found.ready
    assert found.beyond_ranks == (4, 5, 6, 7)
    assert found.plain()["beyond_ranks"] == [4, 5, 6, 7]


def test_a_world_size_that_cannot_be_is_refused(remote):
    with pytest.raises(ConfigError, match="2000000000 ranks"):
        check_ready([engine(graph(1), world=2_000_000_000)], remote)


def test_a_directory_that_does_not_exist_is_no_tier_that_lacks_graphs(tmp_path):
    with pytest.raises(TierError, match="does not exist; mount the share"):
        check_ready([engine(graph(1))], InterfaceOnly(tmp_path / "unmounted"))


def test_several_engines_ranks_add_up(remote, tmp_path):
    for number in (1, 2):
        publish(remote, tmp_path / "src", key_of(number))
    engines = [engine(graph(1)), engine(graph(2, (2, 3)), name="dev8_15")]
    assert check_ready(engines, remote, world_size=4).ready


def test_no_graphs_at_all_are_not_ready(remote):
    assert not check_ready([engine()], remote).ready


def test_ranks_with_fewer_graphs_than_others_are_pointed_out(remote, tmp_path):
    for number in (1, 2):
        publish(remote, tmp_path / "src", key_of(number))
    found = check_ready([engine(graph(1), graph(2, (0,)))], remote)
    assert found.ready
    assert found.partial == ("dev0_7: up to 2 graphs a rank, but rank 1: 1",)


# -- plan ------------------------------------------------------------------------------------------

FLAGS = "--target trn2 --auto-cast=none -O2"


def planned(environment=None, **options):
    graphs = (graph(1, compiler_flags=FLAGS, neff_size=100), graph(2, compiler_flags="-O1"))
    deployment = engine(*graphs, environment=environment or {"neuronx-cc": "2.31", "torch": "2.11"})
    return plan_upgrade([deployment], **options)


@pytest.mark.parametrize("name", ["neuronx-cc", "neuronxcc", "neuronx_cc", "NeuronX.cc"])
def test_another_compiler_misses_every_key(name):
    found = planned(upgrades={name: "2.32"})
    assert [g.outcome for g in found.graphs] == ["miss", "miss"]
    assert "2.31 -> 2.32" in found.graphs[0].reasons[0]
    assert found.plain()["bytes_to_compile"] == 100


def test_the_same_version_misses_nothing():
    assert planned(upgrades={"neuronx-cc": "2.31", "torch": "2.11"}).plain()["hit"] == 2


def test_another_framework_may_miss():
    found = planned(upgrades={"torch": "2.12"})
    assert [g.outcome for g in found.graphs] == ["may miss", "may miss"]


def test_a_version_that_was_not_recorded_is_said_to_be_unknown():
    found = planned(environment={"torch": "1"}, upgrades={"neuronx-cc": "2.32"})
    assert "not recorded" in found.graphs[0].reasons[0]


@pytest.mark.parametrize(
    ("change", "outcomes"),
    [
        (FlagChange(add=("--auto-cast=all",)), ["miss", "miss"]),
        (FlagChange(add=("--auto-cast none",)), ["hit", "miss"]),
        (FlagChange(remove=("-O1",)), ["hit", "miss"]),
        (FlagChange(remove=("--verbose",)), ["hit", "hit"]),
        (FlagChange(remove=("-O",)), ["miss", "miss"]),
        (FlagChange(add=("--target trn2",)), ["hit", "miss"]),
        (FlagChange(remove=("-O2",), add=("--optlevel=2",)), ["may miss", "miss"]),
        (FlagChange(add=("--output=/elsewhere", "--auto-cast=none")), ["may miss", "miss"]),
    ],
)
def test_a_change_of_flags_misses_where_the_canonical_flags_change(change, outcomes):
    assert [g.outcome for g in planned(flags=change).graphs] == outcomes


def test_what_concerns_nothing_here_is_said():
    change = FlagChange(remove=("--nope", "-O3", "-O1"))
    found = planned(upgrades={"neuronx-c": "2.32", "torch": "2.12"}, flags=change)
    assert found.plain()["notes"] == [
        "no manifest lists a package neuronx-c: is it spelt right?",
        "no graph was compiled with --nope: nothing to remove",
        "no graph was compiled with -O3: nothing to remove",
    ]


def test_a_graph_of_two_engines_takes_the_worse_of_both():
    old = engine(graph(1, (0,)), environment={"nki": "1"})
    new = engine(graph(1, (1,)), name="b", environment={"nki": "2"})
    found = plan_upgrade([new, old], upgrades={"nki": "2"})
    assert [(g.outcome, g.ranks) for g in found.graphs] == [("miss", (0, 1))]


# -- prefetch --------------------------------------------------------------------------------------


def test_prefetch_brings_what_is_not_local_and_tells_each_outcome(two, remote, tmp_path):
    for number in (1, 2):
        publish(remote, tmp_path / "src", key_of(number))
    publish(two.local, tmp_path / "src2", key_of(3))
    told = []
    found = prefetch(
        two, [engine(*(graph(n) for n in (1, 2, 3, 4)))], progress=lambda g: told.append(g.key)
    )
    assert [g.outcome for g in found.graphs] == ["fetched", "fetched", "present", "missing"]
    assert sorted(told) == [key_of(n) for n in (1, 2, 3, 4)]
    assert not found.complete
    assert found.size > 2 * 6024
    again = prefetch(two, [engine(graph(1), graph(2))])
    assert again.complete
    assert again.size == 0
    assert two.counters()[two.shared[0].name].hits == 2


def test_prefetch_keeps_to_its_budget_in_the_manifests_order(two, remote, tmp_path):
    for number in range(4):
        publish(remote, tmp_path / "src", key_of(number), payload=100_000)
    size = remote.find(key_of(0)).size
    found = prefetch(two, [engine(*(graph(n) for n in range(4)))], budget=2 * size + 4000)
    assert [g.outcome for g in found.graphs] == ["fetched", "fetched", "skipped", "skipped"]
    assert "left of the budget" in found.graphs[2].detail
    assert not found.complete


def test_a_budget_counts_what_lies_on_the_disk_in_the_end(two, remote, tmp_path):
    publish(remote, tmp_path / "src", key_of(1), payload=100)
    size = remote.find(key_of(1)).size
    found = prefetch(two, [engine(graph(1))], budget=size + 100)
    assert [g.outcome for g in found.graphs] == ["skipped"]
    needed = int(found.graphs[0].detail.split()[0])
    found = prefetch(two, [engine(graph(1))], budget=needed)
    assert [(g.outcome, g.size) for g in found.graphs] == [("fetched", needed)]


def test_prefetch_tells_trouble_as_an_error_and_brings_the_rest(remote, tmp_path):
    publish(remote, tmp_path / "src", key_of(2))
    three = two_tiers(tmp_path / "local", remote.root, tmp_path / NAME_TOO_LONG)
    found = prefetch(three, [engine(graph(1), graph(2))])
    assert [g.outcome for g in found.graphs] == ["error", "fetched"]
    assert NAME_TOO_LONG in found.graphs[0].detail


def test_nothing_to_bring_is_complete(two):
    assert prefetch(two, [engine()]).complete


def _rank(local: Path, shared: Path, path: Path, counts) -> None:
    from neuron_store.manifest.reader import read_engines

    store = two_tiers(local, shared)
    found = prefetch(store, read_engines([path]))
    counts.put((found.complete, store.counters()[store.shared[0].name].hits, found.plain()))
    counts.close()
    counts.join_thread()
    os._exit(0)


def test_ranks_that_prefetch_at_once_fetch_each_graph_once(two, remote, tmp_path):
    for number in range(12):
        publish(remote, tmp_path / "src", key_of(number))
    path = tmp_path / "manifest.json"
    path.write_bytes(dump_manifest(engine(*(graph(n) for n in range(12))).manifest))
    context = get_context("fork")
    counts = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(tmp_path / "local", remote.root, path, counts))
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    answers = [counts.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert all(complete for complete, _, _ in answers)
    assert sum(hits for _, hits, _ in answers) == len(list(two.local.keys())) == 12
    # Ranks that only waited do not count what the others fetched.
    assert sum(told["fetched"] for _, _, told in answers) == 12
    assert sum(told["bytes"] for _, _, told in answers) == sum(
        f.stat().st_size
        for key in two.local.keys()  # noqa: SIM118  (a store is no dict)
        for f in two.local.path_of(key).iterdir()
    )


def test_processes_that_share_a_prefetch_fetch_each_graph_once(two, remote, tmp_path):
    count = 20
    for number in range(count):
        publish(remote, tmp_path / "src", key_of(number))
    publish(two.local, tmp_path / "src2", key_of(count))
    told = []
    graphs = [graph(n) for n in range(count + 2)]
    found = prefetch(two, [engine(*graphs)], processes=2, progress=told.append)
    outcomes = ["fetched"] * count + ["present", "missing"]
    assert [g.outcome for g in found.graphs] == outcomes
    assert [g.key for g in found.graphs] == [key_of(n) for n in range(count + 2)]
    assert len(told) == count + 2
    assert found.size == sum(
        f.stat().st_size for n in range(count) for f in two.local.path_of(key_of(n)).iterdir()
    )
    # Not by this process: that would be what the test is to rule out.
    assert two.counters()[two.shared[0].name].hits == 0
    two.local.uses.flush()
    assert len(os.listdir(two.local.root / ".stats" / "uses")) == count + 1


def test_what_the_local_tier_cannot_take_is_an_error_and_leaves_nothing(
    two, remote, tmp_path, monkeypatch
):
    publish(remote, tmp_path / "src", key_of(1))

    def full(self, artifact, source, *, consume=False):
        raise TierError(str(self.root), "publish", "the disk is full", key=artifact.key)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", full)
        (found,) = prefetch(two, [engine(graph(1))]).graphs
    assert found.outcome == "error"
    assert "could not take it" in found.detail
    assert os.listdir(two.local.root / ".staging") == []
    assert prefetch(two, [engine(graph(1))]).complete


def test_what_a_tier_has_damaged_is_told_as_that(two, remote, tmp_path):
    publish(remote, tmp_path / "src", key_of(1))
    (neff,) = (remote.root / key_of(1)).glob("*.neff")
    neff.write_bytes(b"x" * neff.stat().st_size)
    done = prefetch(two, [engine(graph(1))])
    assert [g.outcome for g in done.graphs] == ["corrupt"]
    assert done.plain()["corrupt"] == 1
    assert not done.complete


def test_a_process_that_dies_costs_its_own_graphs_only(two, remote, tmp_path, monkeypatch):
    for number in range(20):
        publish(remote, tmp_path / "src", key_of(number))
    parent, bring = os.getpid(), TieredStore.bring

    def dies(self, key):
        if key == key_of(3) and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return bring(self, key)

    monkeypatch.setattr(TieredStore, "bring", dies)
    found = prefetch(two, [engine(*(graph(n) for n in range(20)))], workers=1, processes=2)
    wrong = {g.key: g for g in found.graphs if g.outcome != "fetched"}
    # What it had not begun, the other one did.
    assert list(wrong) == [key_of(3)]
    assert {g.outcome for g in wrong.values()} == {"error"}
    assert all("ended early (by SIGKILL)" in g.detail for g in wrong.values())
    monkeypatch.undo()
    assert prefetch(two, [engine(*(graph(n) for n in range(20)))], processes=2).complete


def test_whoever_leaves_a_shared_prefetch_takes_its_processes_along(two, remote, tmp_path):
    for number in range(20):
        publish(remote, tmp_path / "src", key_of(number))

    def leave(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefetch(two, [engine(*(graph(n) for n in range(20)))], processes=2, progress=leave)
    assert not active_children()


# -- promote ---------------------------------------------------------------------------------------


def test_promotion_by_manifest_goes_on_after_a_failure_and_tells_it(two, remote, tmp_path):
    publish(two.local, tmp_path / "src", key_of(1))
    (tmp_path / "broken").write_text("no directory")
    three = two_tiers(tmp_path / "local", remote.root, tmp_path / "broken")
    told = []
    done = promote_manifest(three, [engine(graph(20), graph(1))], progress=told.append)
    assert isinstance(done[0].error, ArtifactNotFound)
    assert isinstance(done[1].error, PromoteError)
    shared = two.shared[0].name
    assert done[1].tiers == {shared: Publication.CREATED}
    assert sorted(one.key for one in told) == [key_of(1), key_of(20)]
    (again,) = promote_manifest(two, [engine(graph(1))])
    assert (again.error, again.tiers) == (None, {shared: Publication.PRESENT})

from __future__ import annotations

import pytest

from neuron_store.artifact import Artifact, ArtifactFile
from neuron_store.errors import InvalidKey
from neuron_store.explain import compare, explain
from neuron_store.key import compute_key
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore

BASE = {
    "graph": "g1",
    "graph_format": "hlo",
    "compiler": "neuronx-cc",
    "compiler_version": "2.31",
    "compiler_flags": "--optlevel=1",
    "target": "trn2",
}


@pytest.fixture
def tiers(tmp_path):
    return [LocalStore(tmp_path / "local"), PosixStore(tmp_path / "shared")]


@pytest.fixture
def put(tmp_path):
    def publish(tier, key=None, created="2026-01-01T00:00:00+00:00", **changes):
        components = {} if key else {**BASE, **changes}
        key = key or compute_key(components)
        source = tmp_path / f"source-{key}"
        source.mkdir(exist_ok=True)
        (source / "x").write_bytes(b"x")
        files = (ArtifactFile("x", 1),)
        tier.publish(Artifact(key, files, created=created, components=components), source)
        return key

    return publish


def asked(**changes):
    components = {**BASE, **changes}
    return compute_key(components), components


def test_components_are_compared_by_value_and_type_and_a_side_may_lack_one():
    found = compare(
        {"a": 1, "b": [1, {"x": 2}], "c": None}, {"a": True, "b": [1, {"x": 2}], "d": 0}
    )
    assert [d.plain() for d in found] == [
        {"name": "a", "before": 1, "after": True},
        {"name": "c", "before": None},
        {"name": "d", "after": 0},
    ]


def test_a_key_that_is_there_is_told_with_its_components_and_no_search(tiers, put):
    key = put(tiers[1])
    put(tiers[0], target="trn1")
    told = explain(key, tiers)
    assert told.found
    assert [answer.outcome for answer in told.tiers] == ["miss", "hit"]
    assert told.components == BASE
    assert (told.nearest, told.records) == (None, 0)
    assert list(tiers[0].keys()) != [key], "nothing is fetched"


def test_the_nearest_artifact_of_any_tier_is_named_with_what_it_differs_in(tiers, put):
    put(tiers[0], compiler_version="2.30", target="trn1")
    near = put(tiers[1], compiler_version="2.30")
    key, components = asked()
    told = explain(key, tiers, components=components)
    assert not told.found
    assert (told.nearest.key, told.nearest.location) == (near, tiers[1].location)
    (difference,) = told.nearest.differences
    assert difference.plain() == {"name": "compiler_version", "before": "2.31", "after": "2.30"}
    assert (told.records, told.more) == (2, False)


def test_another_graph_is_farther_than_two_other_differences(tiers, put):
    put(tiers[0], graph="g2")
    same_graph = put(tiers[0], compiler_version="2.30", target="trn1")
    key, components = asked()
    assert explain(key, tiers, components=components).nearest.key == same_graph


def test_of_equally_near_ones_the_youngest_is_told(tiers, put):
    put(tiers[0], target="trn1", created="2026-01-01T00:00:00+00:00")
    young = put(tiers[0], target="trn3", created="2026-03-01T00:00:00+00:00")
    put(tiers[0], target="inf2", created="2026-02-01T00:00:00+00:00")
    key, components = asked()
    assert explain(key, tiers, components=components).nearest.key == young


def test_what_shares_less_than_half_is_not_near(tiers, put):
    put(tiers[0], graph="g2", target="trn1", compiler_version="1")
    put(tiers[0], key="foreign")
    key, components = asked()
    told = explain(key, tiers, components=components)
    assert (told.nearest, told.records) == (None, 2)


def test_a_key_that_nobody_knows_has_nothing_near_it(tiers, put):
    put(tiers[0])
    told = explain("0" * 32, tiers)
    assert (told.components, told.nearest, told.records) == (None, None, 0)


def test_keys_of_libneuronxla_say_themselves_which_half_differs(tiers, put):
    put(tiers[0], key="MODULE_77+d41d8cd9")
    near = put(tiers[1], key="MODULE_12+2c2d707e")
    told = explain("MODULE_12+d41d8cd9", tiers)
    assert told.nearest.key == near
    assert [d.name for d in told.nearest.differences] == ["compiler_flags"]
    assert explain("MODULE_99+4497a662", tiers).nearest is None


def test_the_number_of_records_is_bounded_and_a_key_of_two_tiers_read_once(tiers, put):
    for number in range(6):
        put(tiers[0], target=f"t{number}")
        put(tiers[1], target=f"t{number}")
    key, components = asked()
    told = explain(key, tiers, components=components, records=4)
    assert (told.records, told.more) == (4, True)
    told = explain(key, tiers, components=components, records=6)
    assert (told.records, told.more) == (6, False)
    assert explain(key, tiers, components=components, records=0).nearest is None


def test_a_tier_in_trouble_is_told_and_the_others_are_searched(tmp_path, tiers, put):
    near = put(tiers[1], target="trn1")
    broken = PosixStore(tmp_path / ("x" * 300))
    key, components = asked()
    told = explain(key, [tiers[0], broken, tiers[1]], components=components)
    assert [answer.outcome for answer in told.tiers] == ["miss", "error", "miss"]
    assert told.nearest.key == near


def test_a_damaged_artifact_is_told_as_corrupt_and_not_as_there(tiers, put, tmp_path):
    key = put(tiers[1])
    (tmp_path / "shared" / key / "x").write_bytes(b"longer")
    told = explain(key, tiers)
    assert [answer.outcome for answer in told.tiers] == ["miss", "corrupt"]
    assert not told.found


def test_an_unsafe_key_is_refused(tiers):
    with pytest.raises(InvalidKey):
        explain("../x", tiers)

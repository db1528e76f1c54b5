import copy
import json
import os
import threading

import attrs
import jsonschema
import pytest

from neuron_store.errors import ManifestError
from neuron_store.manifest import reader
from neuron_store.manifest.json_schema import SCHEMA_PATH, json_schema, schema_text
from neuron_store.manifest.reader import find_manifests, read_engines, read_manifest
from neuron_store.manifest.schema import Graph, Manifest, dump_manifest, load_manifest
from tests.manifest import samples

# The vendor page's own example, trimmed as it is there.
PAGE = {
    "manifest_version": "1",
    "config": {
        "model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "target": "trn2",
        "dtype": "torch.bfloat16",
        "max_num_seqs": 4,
        "max_model_len": 256,
        "topology": {
            "world_size": 2,
            "tensor_parallel_size": 2,
            "data_parallel_size": 1,
            "ep_degree": 1,
            "has_collectives": True,
        },
        "neuron_config": {"...": "..."},
        "vllm_config": {"...": "..."},
    },
    "graphs": [
        {
            "graph_hash": "fc5c06b7...",
            "hlo_path": "fc5c06b7.../graph.hlo",
            "neff_path": "fc5c06b7.../graph_fc5c06b7....neff",
            "neff_size": 949498,
            "created_timestamp": "2026-08-06T20:37:11.818072+00:00",
            "input_shapes": ["4,", "4,", "..."],
            "output_shapes": ["4", "4, 49152", "..."],
            "compiler_flags": "--framework XLA --target trn2 --auto-cast=none ...",
            "ranks": [0, 1],
            "input_snapshot_paths": [],
            "output_snapshot_paths": [],
        }
    ],
    "environment": {"python": "3.13.7", "torch": "2.11.0", "vllm": "0.24.0"},
}


def load(value) -> Manifest:
    return load_manifest(json.dumps(value), source="m.json")


def changed(**changes) -> dict:
    """The page's example with one graph's fields replaced."""
    value = copy.deepcopy(PAGE)
    value["graphs"][0].update(changes)
    return value


def test_the_vendors_example_reads_and_writes_back_field_for_field():
    manifest = load(PAGE)
    written = json.loads(dump_manifest(manifest))
    assert written["graphs"] == PAGE["graphs"]
    assert list(written["graphs"][0]) == list(PAGE["graphs"][0])
    assert written["environment"] == PAGE["environment"]
    for name, value in PAGE["config"]["topology"].items():
        assert written["config"]["topology"][name] == value
    assert load_manifest(dump_manifest(manifest)) == manifest


def test_a_written_manifest_has_every_field_of_the_page_in_its_order():
    written = json.loads(dump_manifest(samples.manifest(graphs=1)))
    assert list(written) == ["manifest_version", "config", "graphs", "environment"]
    assert list(written["config"]) == [
        *("model", "target", "dtype", "max_num_seqs", "max_model_len"),
        *("topology", "neuron_config", "vllm_config"),
    ]
    assert list(written["config"]["topology"]) == [
        *("world_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("attention_dp_size", "ep_degree", "decode_context_parallel_size", "has_collectives"),
    ]
    assert list(written["graphs"][0]) == list(PAGE["graphs"][0])


def test_an_empty_manifest_has_an_empty_list_of_graphs():
    assert json.loads(dump_manifest(Manifest()))["graphs"] == []


def test_fields_of_a_later_minor_are_kept_at_every_level():
    value = changed(novel={"a": [1]})
    value["manifest_version"] = "1.3"
    value["later"] = 1
    value["config"]["more"] = None
    value["config"]["topology"]["extra"] = "called as our own field is"
    written = json.loads(dump_manifest(load(value)))
    assert written["manifest_version"] == "1.3"
    assert written["later"] == 1
    assert "more" in written["config"]
    assert written["config"]["topology"]["extra"] == "called as our own field is"
    assert written["graphs"][0]["novel"] == {"a": [1]}


@pytest.mark.parametrize("version", ["2", "1.", "", "10", "1.x", "1\n", "1." + "9" * 5000])
def test_an_unknown_version_is_refused_with_the_remedy(version):
    with pytest.raises(ManifestError, match=r"m\.json: manifest_version .* upgrade neuron-store"):
        load({**PAGE, "manifest_version": version})


@pytest.mark.parametrize("version", [1, None, ["1"]])
def test_a_version_that_is_no_string_is_told_as_that(version):
    with pytest.raises(ManifestError, match=r"m\.json: manifest_version .* is no string"):
        load({**PAGE, "manifest_version": version})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"neff_size": "9"}, r'an integer expected, not "9" @ manifest.graphs\[0\].neff_size'),
        ({"neff_size": 9.5}, "neff_size"),
        ({"neff_size": True}, "neff_size"),
        ({"neff_size": -1}, "negative"),
        ({"ranks": "01"}, r"a list expected, not str @ manifest.graphs\[0\].ranks"),
        ({"ranks": [0, "1"]}, "ranks"),
        ({"ranks": [0, -1]}, "negative"),
        ({"input_shapes": [4]}, "input_shapes"),
        ({"input_shapes": None}, "input_shapes"),
        ({"compiler_flags": None}, "compiler_flags"),
        ({"graph_hash": "../../etc"}, "safe path component"),
        ({"graph_hash": "a/b"}, "safe path component"),
        ({"graph_hash": "<script>"}, "safe path component"),
        ({"created_timestamp": 3}, "created_timestamp"),
    ],
)
def test_a_field_that_does_not_hold_what_it_should_is_named_with_its_place(change, told):
    with pytest.raises(ManifestError, match=told):
        load(changed(**change))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "no compile-artifact manifest"),
        ({}, "manifest_version is missing"),
        ({**PAGE, "graphs": {}}, "graphs: a list expected"),
        ({**PAGE, "graphs": [3]}, r"an object expected, not int @ manifest.graphs\[0\]"),
        ({**PAGE, "graphs": [{}]}, "'graph_hash' is missing"),
        ({**PAGE, "graphs": PAGE["graphs"] * 2}, "listed twice"),
        ({**PAGE, "environment": {"a": 1}}, "a string expected for 'a'"),
        ({**PAGE, "config": []}, "an object expected, not list @ manifest.config"),
        ({**PAGE, "config": {"topology": {"has_collectives": 1}}}, "true or false expected"),
        ({**PAGE, "config": {"vllm_config": []}}, "an object expected"),
    ],
)
def test_what_is_no_manifest_is_refused(value, told):
    with pytest.raises(ManifestError, match=told):
        load(value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"manifest_version": "1"'])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ManifestError, match="not JSON"):
        load_manifest(text)


@pytest.mark.parametrize("number", ["9" * 4300, "-" + "9" * 4300])
def test_a_number_that_python_cannot_write_out_is_refused(number):
    config = f'{{"topology": {{"world_size": {number}}}}}'
    text = f'{{"manifest_version": "1", "graphs": [], "config": {config}}}'
    with pytest.raises(ManifestError, match="world_size of 14285 bits is out of range"):
        load_manifest(text)
    # As vLLM has it: as many as fit.
    negative = load_manifest(text.replace(number, "-1"))
    assert negative.config.topology.world_size == -1


def test_a_name_that_is_given_twice_is_refused():
    """Readers differ on which one counts: a gate must not pass by one that others do not see."""
    with pytest.raises(ManifestError, match="'graphs' is given twice"):
        load_manifest('{"manifest_version": "1", "graphs": [{"graph_hash": "a"}], "graphs": []}')
    many = ", ".join(f'"n{n}": 0' for n in range(50_000))
    with pytest.raises(ManifestError, match="'n7' is given twice"):
        load_manifest(f'{{"manifest_version": "1", "graphs": [], {many}, "n7": 1}}')


def test_many_faults_are_counted_and_not_all_told():
    value = copy.deepcopy(PAGE)
    value["graphs"] = [{"graph_hash": f"{n:032x}", "neff_size": "x"} for n in range(50)]
    with pytest.raises(ManifestError, match="and 42 more") as caught:
        load(value)
    assert len(str(caught.value)) < 2000


def test_the_schema_file_is_what_the_classes_give():
    assert SCHEMA_PATH.read_text() == schema_text()


def test_the_schema_accepts_what_is_written_and_refuses_what_reading_refuses():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    manifest = samples.manifest(graphs=3, vanished=(1,))
    for value in (PAGE, json.loads(dump_manifest(manifest)), changed(novel=1)):
        validator.validate(value)
    for value in (
        changed(neff_size="9"),
        changed(ranks=[-1]),
        changed(graph_hash="../x"),
        {**PAGE, "manifest_version": "2"},
        {**PAGE, "graphs": {}},
    ):
        assert not validator.is_valid(value)
        with pytest.raises(ManifestError):
            load(value)


def write(path, manifest):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump_manifest(manifest))
    return path


def test_manifests_are_found_below_a_directory_and_ledgers_left_alone(tmp_path):
    one = samples.manifest(graphs=1)
    for place in ("dev8_15", "dev0_7", "node1/dev0_7", "ledger/dev0_7", ".hidden"):
        write(tmp_path / place / "manifest.json", one)
    (tmp_path / "link").symlink_to(tmp_path / "dev0_7")
    found = find_manifests(tmp_path)
    assert [str(f.parent.relative_to(tmp_path)) for f in found] == [
        "dev0_7",
        "dev8_15",
        "node1/dev0_7",
    ]
    assert [e.name for e in read_engines([tmp_path])] == ["dev0_7", "dev8_15", "node1/dev0_7"]


def test_engines_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    a = write(tmp_path / "a/dev0_7/manifest.json", samples.manifest(graphs=1))
    b = write(tmp_path / "b/dev0_7/manifest.json", samples.manifest(graphs=1))
    assert [e.name for e in read_engines([a, b])] == [str(a), str(b)]


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ManifestError, match=r"absent\.json.*No such file"):
        read_manifest(tmp_path / "absent.json")
    with pytest.raises(ManifestError, match=r"no manifest\.json in it"):
        read_engines([tmp_path])


def test_what_never_ends_is_read_no_further_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_MANIFEST_BYTES", 1000)
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(ManifestError, match="at most 1000 bytes"):
        read_manifest(tmp_path / "endless")


def test_links_are_followed_as_a_config_map_has_them(tmp_path):
    one = samples.manifest(graphs=1)
    data = write(tmp_path / "map/..2026_08_06/manifest.json", one)
    (tmp_path / "map/..data").symlink_to(data.parent.name)
    (tmp_path / "map/manifest.json").symlink_to("..data/manifest.json")
    write(tmp_path / "base/m/dev8_11/manifest.json", one)
    (tmp_path / "all").mkdir()
    (tmp_path / "all/dev8_11").symlink_to("../base/m/dev8_11")
    (tmp_path / "all/node").symlink_to("../base")
    assert [e.name for e in read_engines([tmp_path / "map"])] == ["map"]
    # Both links lead to one manifest, which is one engine's.
    assert [e.name for e in read_engines([tmp_path / "all"])] == ["dev8_11"]
    assert read_manifest(tmp_path / "map/manifest.json") == one


def test_a_cycle_of_links_ends(tmp_path):
    write(tmp_path / "dev0_7/manifest.json", samples.manifest(graphs=1))
    (tmp_path / "dev0_7/up").symlink_to("..")
    (tmp_path / "self").symlink_to("self")
    assert len(find_manifests(tmp_path)) == 1


def test_the_directories_that_are_searched_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_DIRECTORIES", 3)
    for number in range(3):
        write(tmp_path / f"{number}/manifest.json", samples.manifest(graphs=1))
    with pytest.raises(ManifestError, match="more than 3 directories"):
        find_manifests(tmp_path)


def test_a_link_that_leads_nowhere_is_not_passed_over_in_silence(tmp_path, caplog):
    write(tmp_path / "dev0_7/manifest.json", samples.manifest(graphs=1))
    (tmp_path / "dev8_15").symlink_to("gone")
    assert len(find_manifests(tmp_path)) == 1
    assert "dev8_15 is a link that leads nowhere" in caplog.text
    (tmp_path / "dev0_7/manifest.json").unlink()
    (tmp_path / "dev0_7/manifest.json").symlink_to("gone")
    with pytest.raises(ManifestError, match=r"manifest\.json: it is a link that leads nowhere"):
        find_manifests(tmp_path)


def test_a_pipe_is_read_to_its_end(tmp_path):
    one = samples.manifest(graphs=40)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(dump_manifest(one),))
    writer.start()
    assert read_manifest(tmp_path / "pipe") == one
    writer.join()


def test_ranks_are_a_set():
    assert load(changed(ranks=[0, 0, 3, 1])).graphs[0].ranks == (0, 1, 3)


def test_what_lacks_its_graphs_is_no_manifest_and_lesser_gaps_are_said(caplog):
    with pytest.raises(ManifestError, match="graphs is missing"):
        load({name: value for name, value in PAGE.items() if name != "graphs"})
    assert load({"manifest_version": "1", "graphs": []}) == Manifest()
    assert "config is missing" in caplog.text
    assert "environment is missing" in caplog.text


def test_graphs_are_values():
    graph = Graph("k")
    assert graph == Graph("k")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        graph.ranks = ()

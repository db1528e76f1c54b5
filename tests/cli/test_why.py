from __future__ import annotations

import json

import pytest

from neuron_store.key import compute_key
from tests.cli.conftest import KEY

BASE = {"graph": "g1", "compiler": "iree", "compiler_version": "3.3", "target": "znver4"}


@pytest.fixture
def stored(put, places):
    def store(root=places.shared, **changes):
        components = {**BASE, **changes}
        key = compute_key(components)
        put(root, key, components=components)
        return key

    return store


@pytest.fixture
def asked(tmp_path):
    def write(value):
        file = tmp_path / "components.json"
        file.write_text(value if isinstance(value, str) else json.dumps(value))
        return file

    return write


def test_a_key_that_is_there_is_a_yes_with_what_each_tier_answers(cli, stored, places):
    key = stored()
    result = cli("why", key)
    assert result.stdout == f"{places.local}\tmiss\t-\n{places.shared}\thit\t-\n"
    assert result.stderr == f"{key} is there\n"
    assert not list(places.local.glob("[0-9a-f]*")), "nothing is fetched"


def test_components_without_an_artifact_are_compared_with_the_stored_ones(cli, stored, asked):
    near = stored(compiler_version="3.2")
    result = cli("why", "--components", asked(BASE))
    assert result.stdout.splitlines()[2:] == ["compiler_version\t3.3\t3.2"]
    assert f"is missing; the nearest, {near} in " in result.stderr
    assert "differs in 1 component\n" in result.stderr
    (told,) = cli.json("why", "--components", asked(BASE))["keys"]
    assert told["key"] == compute_key(BASE)
    assert told["nearest"]["differences"] == [
        {"name": "compiler_version", "before": "3.3", "after": "3.2"}
    ]


def test_a_key_with_nothing_near_is_an_honest_no(cli, stored, asked):
    stored()
    unknown = cli("why", KEY, status=1)
    assert f"error: {KEY} is unknown, and so is what it was computed from" in unknown.stderr
    far = cli("why", "--components", asked({"graph": "z", "compiler": "q"}), status=1)
    assert "none of 1 records is near it" in far.stderr
    (told,) = cli.json("why", KEY, status=1)["keys"]
    assert (told["found"], told["nearest"], told["components"]) == (False, None, None)


def test_two_keys_are_compared_by_what_is_recorded_of_them(cli, stored, places):
    one, other = stored(), stored(places.local, target="skylake", extra=[1])
    result = cli("why", one, other)
    assert result.stdout == "extra\t-\t[1]\ntarget\tznver4\tskylake\n"
    document = cli.json("why", one, other)
    assert [d["name"] for d in document["differences"]] == ["extra", "target"]
    assert "the components are the same" in cli("why", one, one).stderr


def test_two_keys_of_which_one_is_unknown_cannot_be_compared(cli, stored):
    key = stored()
    assert f"no tier knows what {KEY}" in cli("why", key, KEY, status=1).stderr
    assert cli.json("why", key, KEY, status=1)["differences"] is None


def test_a_bounded_search_says_so(cli, stored, asked):
    for number in range(3):
        stored(target=f"t{number}")
    result = cli("why", "--components", asked(BASE), "--records", 2)
    assert "only 2 records were read" in result.stderr


def test_every_job_of_a_jobs_file_is_explained(cli, tmp_path):
    pytest.importorskip("iree.compiler")
    (tmp_path / "g.mlir").write_text("func.func @main() { return }")
    job = {"compiler": "iree", "graph": "g.mlir"}
    lines = [{**job, "flags": [f"--iree-opt-level=O{level}"]} for level in (2, 3)]
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("\n".join(map(json.dumps, lines)))
    cli("compile", tmp_path / "g.mlir", "--flag=--iree-opt-level=O2")
    first, second = cli.json("why", "--jobs", jobs)["keys"]
    assert first["found"]
    assert [d["name"] for d in second["nearest"]["differences"]] == ["compiler_flags"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"a": NaN}'])
def test_a_components_file_that_cannot_be_used(cli, asked, content):
    result = cli("why", "--components", asked(content), status=2)
    assert "component" in result.stderr


def test_what_to_explain_must_be_said_once(cli, asked, tmp_path):
    components = asked(BASE)
    for arguments in (
        [],
        [KEY, KEY, KEY],
        [KEY, KEY, "--components", components],
        [KEY, "--jobs", components],
    ):
        assert "Usage" in cli("why", *arguments, status=2).stderr
    assert "InvalidKey" in cli("why", "../x", "--json", status=2).stdout

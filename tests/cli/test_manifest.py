from __future__ import annotations

import json
import os
import re

import attrs
import pytest

from neuron_store.counting import counted, ranks_text
from neuron_store.manifest.schema import Graph, Manifest, dump_manifest, load_manifest
from neuron_store.manifest.shapes import shapes_text
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.cli.test_app import on_terminal
from tests.manifest import samples
from tests.manifest.entries import key_of, publish


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump_manifest(value))
    return path


@pytest.fixture
def one(tmp_path):
    return write(tmp_path / "dev0_7" / "manifest.json", samples.manifest(graphs=3, vanished=(2,)))


@pytest.fixture
def shared(places, tmp_path):
    """Publishes the entry of that number in the shared tier."""
    return lambda number: publish(PosixStore(places.shared), tmp_path / "src", key_of(number))


def listing(path, *numbers):
    graphs = tuple(Graph(key_of(n), ranks=(0, 1)) for n in numbers)
    return write(path, Manifest(graphs=graphs))


def test_show_prints_a_line_for_each_graph_when_piped(cli, one):
    lines = cli("manifest", "show", one).stdout.splitlines()
    assert len(lines) == 3
    engine, key, size, created, ranks, inputs, outputs = lines[0].split("\t")
    assert engine == "dev0_7"
    assert re.fullmatch("[0-9a-f]{32}", key)
    assert (ranks, int(size) > 0, created[:2]) == ("0-7", True, "20")
    assert inputs == "[1] [1] [1, 128] [2048, 2048] and 8 more"
    assert outputs.startswith("[")
    assert lines[2].split("\t")[2:4] == ["-", "-"]


def test_show_prints_json(cli, one):
    (engine,) = cli.json("manifest", "show", one)["engines"]
    assert engine["engine"] == "dev0_7"
    assert len(engine["manifest"]["graphs"]) == 3


def test_show_takes_a_directory_of_engines(cli, tmp_path, one):
    del one
    write(tmp_path / "dev8_15" / "manifest.json", samples.manifest(graphs=1, seed=2))
    lines = cli("manifest", "show", tmp_path).stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["dev0_7"] * 3 + ["dev8_15"]


def test_text_of_a_manifest_reaches_no_terminal_as_control_or_markup(cli, tmp_path):
    evil = "\x1b]0;owned\x07[bold]x[/bold]\x1b[2J"
    graph = Graph("k", input_shapes=(evil,), created_timestamp=evil)
    value = samples.manifest(graphs=0, model=evil)
    path = write(tmp_path / "manifest.json", attrs.evolve(value, graphs=(graph,)))
    output = cli("manifest", "show", path).stdout
    assert "\x1b" not in output
    assert "\\x1b]0;owned" in output
    status, shown = on_terminal("manifest", "show", path)
    assert status == 0
    assert "\x1b]0;" not in shown
    assert "\x1b[2J" not in shown
    assert shown.count("[bold]x[/bold]") >= 2


def test_show_draws_a_table_with_the_engine_above_on_a_terminal(one):
    status, shown = on_terminal("manifest", "show", one)
    assert status == 0
    assert "dev0_7: TinyLlama/TinyLlama-1.1B-Chat-v1.0, trn2" in re.sub(
        r"\x1b\[[0-9;]*m", "", shown
    )
    assert "compiled" in shown
    assert "\t" not in shown


def test_hashes_and_times_stay_on_one_line_of_a_narrow_terminal(one):
    _, shown = on_terminal("manifest", "show", one, width=80)
    for graph in load_manifest(one.read_bytes()).graphs[:2]:
        assert graph.graph_hash in shown
        assert graph.created_timestamp[:19].replace("T", " ") in shown
    assert "T20:" not in shown


@pytest.mark.parametrize("argument", ["-", "/dev/stdin"])
def test_a_manifest_comes_from_the_standard_input_too(command, one, argument):
    result = command("manifest", "show", argument, input=one.read_text())
    assert result.returncode == 0, result.stderr
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["stdin"] * 3


def test_a_manifest_comes_from_a_pipe_of_the_shell(command, one):
    read, write_end = os.pipe()
    os.write(write_end, one.read_bytes())
    os.close(write_end)
    result = command("manifest", "show", f"/dev/fd/{read}", pass_fds=(read,))
    os.close(read)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 3


def test_diff_exits_0_when_equal_and_1_when_not(cli, tmp_path, one):
    value = load_manifest(one.read_bytes())
    graphs = (attrs.evolve(value.graphs[0], neff_size=1), *value.graphs[1:])
    other = write(tmp_path / "b.json", attrs.evolve(value, graphs=graphs))
    same = cli("manifest", "diff", one, one)
    assert (same.stdout, same.stderr) == ("", "no difference\n")
    found = cli("manifest", "diff", one, other, status=1)
    assert re.fullmatch(r"changed\t\w{32}\tneff_size\t\d+\t1\n", found.stdout)
    cli("manifest", "diff", one, other, "--ignore", "neff_size")
    document = cli.json("manifest", "diff", one, other, status=1)
    assert (document["command"], document["same"]) == ("manifest diff", False)


def test_diff_tells_graphs_settings_and_packages(cli, tmp_path, one):
    value = load_manifest(one.read_bytes())
    config = attrs.evolve(value.config, max_num_seqs=64)
    environment = {**value.environment, "nki": "1"}
    graphs = (*value.graphs[1:], Graph(key_of(7), ranks=(0, 1, 3)))
    changed = attrs.evolve(value, config=config, environment=environment, graphs=graphs)
    other = write(tmp_path / "b.json", changed)
    assert cli("manifest", "diff", one, other, status=1).stdout.splitlines() == [
        f"added\t{key_of(7)}\tranks\t-\t0-1,3",
        f"gone\t{value.graphs[0].graph_hash}\tranks\t0-7\t-",
        "changed\tconfig\tmax_num_seqs\t32\t64",
        "changed\tenvironment\tnki\t-\t1",
    ]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"future": {"a": 1}}, {"future": {"a": 2}}, "changed\tmanifest\tfuture.a\t1\t2"),
        ({}, {"manifest_version": "1.1"}, "changed\tmanifest\tmanifest_version\t1\t1.1"),
        (
            {"config": {"vllm_config": {"a.b": 1, "a": {"b": 2}}}},
            {"config": {"vllm_config": {"a.b": 3, "a": {"b": 2}}}},
            'changed\tconfig\tvllm_config."a.b"\t1\t3',
        ),
        (
            {"config": {"vllm_config": {"a": [1]}}},
            {"config": {"vllm_config": {"a": [True]}}},
            "changed\tconfig\tvllm_config.a\t[1]\t[true]",
        ),
    ],
)
def test_no_difference_passes_for_none(cli, tmp_path, before, after, told):
    base = {"manifest_version": "1", "graphs": [], "config": {}, "environment": {}}
    for name, more in (("a", before), ("b", after)):
        (tmp_path / name).write_text(json.dumps({**base, **more}))
    result = cli("manifest", "diff", tmp_path / "a", tmp_path / "b", status=1)
    assert result.stdout.splitlines() == [told]
    assert cli.json("manifest", "diff", tmp_path / "a", tmp_path / "a")["other"] == {}


def test_show_says_that_there_is_no_graph(cli, tmp_path):
    assert "the manifests list no graph" in cli("manifest", "show", listing(tmp_path / "m")).stderr


def test_a_field_that_is_unknown_cannot_be_ignored(cli, one):
    result = cli("manifest", "diff", one, one, "--ignore", "nonsense", status=2)
    assert "known: compiler_flags" in result.stderr


def test_bad_input_exits_2_and_names_the_file(cli, tmp_path, one):
    (tmp_path / "bad.json").write_text("{")
    for arguments in (
        ("show", tmp_path / "bad.json"),
        ("diff", one, tmp_path / "bad.json"),
        ("plan", tmp_path / "bad.json", "--upgrade", "a=1"),
        ("report", tmp_path / "bad.json", "-o", tmp_path / "r.html"),
        ("ready", tmp_path / "bad.json"),
    ):
        assert "bad.json" in cli("manifest", *arguments, status=2).stderr
    cli("manifest", "show", tmp_path / "absent", status=2)
    cli("manifest", "show", status=2)
    assert "several engines" not in cli("manifest", "diff", one.parent, one).stderr
    write(tmp_path / "dev8_15" / "manifest.json", samples.manifest(graphs=1))
    assert "several engines" in cli("manifest", "diff", tmp_path, one, status=2).stderr


def test_merge_writes_one_manifest_that_other_commands_take(cli, tmp_path, one):
    del one
    write(tmp_path / "dev8_15" / "manifest.json", samples.manifest(graphs=2, first_rank=8))
    result = cli("manifest", "merge", tmp_path, "-o", tmp_path / "all.json")
    assert "2 manifests, 3 graphs" in result.stderr
    merged = load_manifest((tmp_path / "all.json").read_bytes())
    assert merged.ranks == tuple(range(16))
    assert load_manifest(cli("manifest", "merge", tmp_path / "dev0_7").stdout).graphs
    document = cli.json("manifest", "merge", tmp_path / "dev0_7")
    assert len(document["manifest"]["graphs"]) == 3
    cli("manifest", "show", tmp_path / "all.json")


# -- ready --------------------------------------------------------------------------------------


def test_ready_is_the_gate_of_a_roll_out(cli, tmp_path, shared, places):
    shared(1)
    path = listing(tmp_path / "m.json", 1)
    yes = cli("manifest", "ready", path, "--world-size", 2)
    assert yes.stderr == f"ready: 1 of 1 graph of 2 ranks in {places.shared}\n"
    assert yes.stdout == ""
    path = listing(tmp_path / "m.json", 1, 2)
    no = cli("manifest", "ready", path, "--world-size", 3, status=1)
    assert no.stdout == f"{key_of(2)}\tmissing\t0-1\t-\n"
    assert "no graph was traced by rank 2: " in no.stderr
    assert "NOT ready: 1 of 2" in no.stderr
    document = cli.json("manifest", "ready", path, status=1)
    assert document["missing"][0]["key"] == key_of(2)


def test_ready_asks_the_tier_that_is_named_or_any_by_its_url(
    cli, command, tmp_path, shared, places
):
    shared(1)
    path = listing(tmp_path / "m.json", 1)
    cli("manifest", "ready", path, "--tier", places.shared)
    elsewhere = tmp_path / "elsewhere"
    assert str(elsewhere) in cli("manifest", "ready", path, "--tier", elsewhere, status=1).stderr
    named = command(
        "--tier", f"posix://{places.shared}?name=fsx", "--tier", elsewhere,
        "manifest", "ready", path, "--tier", "fsx",
    )  # fmt: skip
    assert named.returncode == 0
    assert not places.local.exists()


def test_ready_must_know_which_tier(command, tmp_path, places):
    path = listing(tmp_path / "m.json", 1)
    none = command("manifest", "ready", path)
    assert none.returncode == 2
    assert "there is no shared tier" in none.stderr
    two = ["--tier", places.shared, "--tier", f"posix://{tmp_path / 'b'}?name=b"]
    several = command(*two, "manifest", "ready", path)
    assert several.returncode == 2
    assert f"there are {places.shared}, b; give --tier" in several.stderr


def test_ready_says_no_to_ranks_beyond_the_world_size(cli, tmp_path, shared):
    shared(1)
    path = write(tmp_path / "m.json", Manifest(graphs=(Graph(key_of(1), ranks=tuple(range(8))),)))
    no = cli("manifest", "ready", path, "--world-size", 4, status=1)
    assert "ranks 4-7, beyond the world size of 4: correct --world-size" in no.stderr
    assert cli.json("manifest", "ready", path, "--world-size", 4, status=1)["beyond_ranks"]
    cli("manifest", "ready", path, "--world-size", 8)
    cli("manifest", "ready", path, "--world-size", 2_000_000_000, status=2)


def test_ready_names_a_share_that_is_not_mounted(cli, tmp_path):
    path = listing(tmp_path / "m.json", 1)
    no = cli("manifest", "ready", path, "--tier", tmp_path / "unmounted", status=1)
    assert "the directory does not exist; mount the share" in no.stderr
    assert no.stdout == ""


def test_ready_asks_whether_it_is_the_right_place_when_nothing_is_there(cli, tmp_path, places):
    places.shared.mkdir()
    path = listing(tmp_path / "m.json", 1, 2)
    assert "right place" in cli("manifest", "ready", path, status=1).stderr


def test_ready_draws_no_table_of_nothing(tmp_path, shared, places):
    shared(1)
    path = listing(tmp_path / "m.json", 1)
    status, shown = on_terminal("--tier", places.shared, "manifest", "ready", path)
    assert status == 0
    assert "outcome" not in shown


def test_ready_may_be_strict_about_ranks_that_traced_less(cli, tmp_path, shared):
    for number in (1, 2):
        shared(number)
    graphs = (Graph(key_of(1), ranks=(0, 1)), Graph(key_of(2), ranks=(0,)))
    path = write(tmp_path / "m.json", Manifest(graphs=graphs))
    loose = cli("manifest", "ready", path)
    assert "note: m.json: up to 2 graphs a rank, but rank 1: 1" in loose.stderr
    assert "NOT ready" in cli("manifest", "ready", path, "--strict", status=1).stderr


def test_an_unknown_tier_is_a_usage_error(cli, tmp_path):
    path = listing(tmp_path / "m.json", 1)
    assert "nosuch" in cli("manifest", "ready", path, "--tier", "nosuch://x", status=2).stderr


# -- plan, report -------------------------------------------------------------------------------


def test_plan_tells_which_keys_miss(cli, one):
    result = cli("manifest", "plan", one, "--upgrade", "neuronx-cc=2.32")
    assert result.stderr.startswith("3 keys miss (")
    assert result.stdout.count("\tmiss\t") == 3
    assert "neuronx-cc 2.31.1 -> 2.32" in result.stdout
    document = cli.json("manifest", "plan", one, "--upgrade", "torch=3")
    assert (document["miss"], document["may_miss"]) == (0, 3)
    stays = cli("manifest", "plan", one, "--add-flag", "--verbose 35")
    assert stays.stderr == "0 keys miss (0 B to compile anew), 0 may miss, 3 stay\n"
    assert stays.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        *((), ("--upgrade", "x"), ("--upgrade", "=1"), ("--add-flag", "--a='")),
        *(("--upgrade", "neuronx-cc>=2.32"), ("--upgrade", "neuronx-cc=>2"), ("--upgrade", "a=")),
        *(("--add-flag", ""), ("--remove-flag", " ")),
    ],
)
def test_a_plan_without_a_change_or_with_no_flags_is_a_usage_error(cli, one, arguments):
    cli("manifest", "plan", one, *arguments, status=2)


def test_a_plan_says_what_concerns_nothing(cli, one):
    told = cli("manifest", "plan", one, "--upgrade", "nosuch==1", "--remove-flag", "--nope")
    assert "note: no manifest lists a package nosuch" in told.stderr
    assert "note: no graph was compiled with --nope" in told.stderr


def test_a_report_and_a_merge_may_go_to_the_standard_output(cli, tmp_path, one, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("manifest", "report", one, "-o", "-").stdout.startswith("<!doctype html>")
    assert load_manifest(cli("manifest", "merge", one.parent, "-o", "-").stdout).graphs
    assert "for itself" in cli("manifest", "report", one, "-o", "-", "--json", status=2).stderr
    assert not (tmp_path / "-").exists()


def test_report_writes_a_page_in_one_step(cli, tmp_path, one):
    folder = tmp_path / "out"
    folder.mkdir()
    result = cli("manifest", "report", one, "-o", folder / "report.html", "--title", "A & B")
    assert result.stdout == ""
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "A &amp; B" in page
    assert {f.name for f in folder.iterdir()} == {"report.html"}


def test_merge_and_report_tell_in_json_what_they_wrote(cli, tmp_path, one):
    for name, file in (("merge", "all.json"), ("report", "r.html")):
        output = tmp_path / "out" / file
        output.parent.mkdir(exist_ok=True)
        told = cli.json("manifest", name, one.parent, "-o", output)
        assert told["output"] == str(output)
        assert told["manifests"] == 1
        assert output.stat().st_size == told.get("bytes", output.stat().st_size)


def test_a_report_that_cannot_be_written_says_where(cli, one):
    result = cli("manifest", "report", one, "-o", "/nowhere/at/all.html", status=2)
    assert "/nowhere/at/all.html cannot be written" in result.stderr


@pytest.mark.parametrize("name", ["merge", "report"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_read_is_not_written_over(cli, one, name, linked):
    before, output = one.read_bytes(), one
    if linked:
        output = one.parent / "link"
        output.symlink_to(one)
    result = cli("manifest", name, one.parent, "-o", output, status=2)
    assert f"{output} is what is being read; choose another for -o" in result.stderr
    assert one.read_bytes() == before


# -- prefetch, promote --------------------------------------------------------------------------


def test_prefetch_brings_all_and_exits_1_when_one_is_missing(cli, tmp_path, shared, places):
    shared(1)
    result = cli("prefetch", "--manifest", listing(tmp_path / "m.json", 1))
    assert re.fullmatch(rf"{key_of(1)}\tfetched\t\d+\n", result.stdout)
    assert re.match(r"0 present, 1 fetched, .*; \d.* in \d", result.stderr)
    assert (places.local / key_of(1)).is_dir()
    listing(tmp_path / "m.json", 1, 2)
    missing = cli("prefetch", "--manifest", tmp_path / "m.json", status=1)
    assert f"missing: {key_of(2)}: " in missing.stderr
    document = cli.json("prefetch", "--manifest", tmp_path / "m.json", status=1)
    assert (document["present"], document["missing"]) == (1, 1)
    assert document["command"] == "prefetch"


@pytest.mark.parametrize(("budget", "fetched"), [("1K", 0), ("20MB", 1)])
def test_a_budget_bounds_what_is_fetched(cli, tmp_path, shared, budget, fetched):
    shared(1)
    path = listing(tmp_path / "m.json", 1)
    arguments = ["prefetch", "--manifest", path, "--budget", budget]
    assert cli.json(*arguments, status=1 - fetched)["fetched"] == fetched


def test_what_is_over_a_budget_is_told_in_one_line(cli, tmp_path, shared):
    for number in (1, 2, 3):
        shared(number)
    path = listing(tmp_path / "m.json", 1, 2, 3)
    told = cli("prefetch", "--manifest", path, "--budget", "1K", status=1)
    first, counts = told.stderr.splitlines()
    assert first.startswith(f"skipped: {key_of(1)}: ")
    assert first.endswith("1024 left of the budget, and 2 more graphs")
    assert "3 over budget" in counts
    assert told.stdout.count("\tskipped\t") == 3


def test_a_share_that_is_not_mounted_is_told_after_the_misses(cli, tmp_path, places):
    path = listing(tmp_path / "m.json", 1)
    told = cli("prefetch", "--manifest", path, status=1)
    assert f"missing: {key_of(1)}: " in told.stderr
    assert f"{places.shared}: the directory does not exist; mount the share" in told.stderr
    places.shared.mkdir()
    told = cli("prefetch", "--manifest", path, status=1)
    assert "mount the share" not in told.stderr


def test_prefetch_by_several_processes_tells_the_same(cli, tmp_path, shared, places):
    path = listing(tmp_path / "m.json", *range(18))
    document = cli.json("prefetch", "--manifest", path, "--processes", "2", status=1)
    one = cli.json("prefetch", "--manifest", path, "--processes", "1", status=1)
    assert [g["key"] for g in document["graphs"]] == [g["key"] for g in one["graphs"]]
    assert document["fetched"] == one["present"]
    assert document["missing"] == one["missing"]


def test_prefetch_asks_which_tier_when_there_is_none(command, tmp_path, places):
    path = listing(tmp_path / "m.json", 1)
    none = command("--local", places.local, "prefetch", "--manifest", path)
    assert none.returncode == 2
    assert "which tier? there is no shared tier" in none.stderr
    publish(LocalStore(places.local), tmp_path / "src", key_of(1))
    here = command("--local", places.local, "prefetch", "--manifest", path)
    assert here.returncode == 0
    assert here.stdout == f"{key_of(1)}\tpresent\t0\n"


def test_prefetch_says_that_manifests_list_no_graph(cli, tmp_path):
    told = cli("prefetch", "--manifest", listing(tmp_path / "m.json"))
    assert "the manifests list no graph" in told.stderr


def test_a_budget_that_is_no_size_is_a_usage_error(cli, tmp_path):
    path = listing(tmp_path / "m.json", 1)
    result = cli("prefetch", "--manifest", path, "--budget", "1Q", status=2)
    assert "--budget '1Q' is no size" in result.stderr


def test_several_manifests_are_promoted_each_graph_once(cli, tmp_path, places):
    for number in (1, 2):
        publish(LocalStore(places.local), tmp_path / "src", key_of(number))
    paths = [listing(tmp_path / "a.json", 1), listing(tmp_path / "b.json", 1, 2)]
    document = cli.json("promote", "--manifest", paths[0], "--manifest", paths[1])
    told = [(a["key"], a["outcome"]) for a in document["artifacts"]]
    assert told == [(key_of(1), "created"), (key_of(2), "created")]


def test_one_is_told_in_the_singular():
    assert counted(1, "graph") == "1 graph"
    assert counted(0, "graph") == "0 graphs"
    assert counted(2048, "child", "children") == "2,048 children"


def test_ranks_and_shapes_are_told_in_few_words():
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranks_text([]) == ""
    assert shapes_text(["4,", "4, 8", ""], limit=2) == "[4] [4, 8] and 1 more"

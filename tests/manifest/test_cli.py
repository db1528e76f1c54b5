import json
import os
import re
import subprocess
import sys

import attrs
import click
import pytest
from click.testing import CliRunner

from neuron_store.abc import Publication
from neuron_store.cli.manifest import manifest
from neuron_store.cli.prefetch import prefetch, promote_by_manifest
from neuron_store.errors import (
    ArtifactNotFound,
    ConfigError,
    ManifestError,
    NeuronStoreError,
    PromoteError,
    TierError,
)
from neuron_store.manifest.schema import Graph, Manifest, dump_manifest, load_manifest
from tests.manifest import samples
from tests.manifest.stores import DirectoryStore, key_of, publish


class Main(click.Group):
    """What the program's main command does with errors, in small."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except NeuronStoreError as error:
            click.echo(f"neuron-store: {error}", err=True)
            bad_input = isinstance(error, (ConfigError, ManifestError))
            ctx.exit(2 if bad_input else 1)


main = Main("neuron-store", commands={"manifest": manifest, "prefetch": prefetch})


def run(*arguments, store=None):
    result = CliRunner().invoke(main, [str(a) for a in arguments], obj=store)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump_manifest(value))
    return path


@pytest.fixture
def one(tmp_path):
    return write(tmp_path / "dev0_7" / "manifest.json", samples.manifest(graphs=3, vanished=(2,)))


def test_show_prints_plain_lines_when_piped(one):
    result = run("manifest", "show", one)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("dev0_7: TinyLlama/TinyLlama-1.1B-Chat-v1.0, trn2")
    assert len(lines) == 4
    key, size, created, ranks, inputs, outputs = lines[1].split("\t")
    assert re.fullmatch("[0-9a-f]{32}", key)
    assert ranks == "0-7"
    assert inputs == "[1] [1] [1, 128] [2048, 2048] and 8 more"
    assert lines[3].split("\t")[1:3] == ["-", "-"]
    assert (size, created[:4], outputs[:3]) != ("-", "", "")


def test_show_prints_json(one):
    value = json.loads(run("manifest", "show", one, "--json").output)
    assert value[0]["engine"] == "dev0_7"
    assert len(value[0]["graphs"]) == 3


def test_show_takes_a_directory_of_engines(tmp_path, one):
    write(tmp_path / "dev8_15" / "manifest.json", samples.manifest(graphs=1, seed=2))
    output = run("manifest", "show", tmp_path).output
    assert "dev0_7: " in output
    assert "dev8_15: " in output


def test_text_of_a_manifest_cannot_drive_the_terminal(tmp_path):
    evil = "\x1b]0;owned\x07[bold]x[/bold]\x1b[2J"
    path = write(
        tmp_path / "manifest.json",
        Manifest(graphs=(Graph("k", input_shapes=(evil,), created_timestamp=evil),)),
    )
    output = run("manifest", "show", path).output
    assert "\x1b" not in output
    assert "\\x1b]0;owned" in output


def test_show_draws_a_table_on_a_terminal(one):
    program = (
        "import sys; from neuron_store.cli.manifest import manifest\n"
        f"manifest(['show', {str(one)!r}])"
    )
    master, slave = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdout=slave, stderr=slave)
    os.close(slave)
    output = b""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:
            break
        if not data:
            break
        output += data
    os.close(master)
    assert process.wait() == 0
    assert b"compiled" in output
    assert b"\t" not in output


def test_diff_exits_0_when_equal_and_1_when_not(tmp_path, one):
    value = load_manifest(one.read_bytes())
    graphs = (attrs.evolve(value.graphs[0], neff_size=1), *value.graphs[1:])
    other = write(tmp_path / "b.json", attrs.evolve(value, graphs=graphs))
    same = run("manifest", "diff", one, one)
    assert (same.exit_code, same.output) == (0, "no difference\n")
    found = run("manifest", "diff", one, other)
    assert found.exit_code == 1
    assert re.search(r"~ graph \w+ neff_size: \d+ -> 1\n", found.output)
    assert run("manifest", "diff", one, other, "--ignore", "neff_size").exit_code == 0
    as_json = run("manifest", "diff", one, other, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.output)["same"] is False


def test_a_field_that_is_unknown_cannot_be_ignored(one):
    result = run("manifest", "diff", one, one, "--ignore", "nonsense")
    assert result.exit_code == 2
    assert "known: compiler_flags" in result.output


def test_bad_input_exits_2_and_names_the_file(tmp_path, one):
    (tmp_path / "bad.json").write_text("{")
    for arguments in (
        ("show", tmp_path / "bad.json"),
        ("diff", one, tmp_path / "bad.json"),
        ("plan", tmp_path / "bad.json", "--upgrade", "a=1"),
        ("report", tmp_path / "bad.json", "-o", tmp_path / "r.html"),
    ):
        result = run("manifest", *arguments)
        assert result.exit_code == 2
        assert "bad.json" in result.output
        assert "Traceback" not in result.output
    assert run("manifest", "show", tmp_path / "absent").exit_code == 2
    assert run("manifest", "show").exit_code == 2


def test_merge_writes_one_manifest_that_other_commands_take(tmp_path, one):
    write(tmp_path / "dev8_15" / "manifest.json", samples.manifest(graphs=2, first_rank=8))
    result = run("manifest", "merge", tmp_path, "-o", tmp_path / "all.json")
    assert result.exit_code == 0
    assert "2 manifests, 3 graphs" in result.output
    merged = load_manifest((tmp_path / "all.json").read_bytes())
    assert merged.ranks == tuple(range(16))
    assert load_manifest(run("manifest", "merge", tmp_path / "dev0_7").output).graphs
    assert run("manifest", "show", tmp_path / "all.json").exit_code == 0


def ready_manifest(path, *numbers):
    graphs = tuple(Graph(key_of(n), ranks=(0, 1)) for n in numbers)
    return write(path, Manifest(graphs=graphs))


def test_ready_is_the_gate_of_a_roll_out(tmp_path, remote):
    publish(remote, tmp_path / "src", key_of(1))
    path = ready_manifest(tmp_path / "m.json", 1)
    yes = run("manifest", "ready", path, "--tier", "x", "--world-size", 2, store=remote)
    assert yes.exit_code == 0
    assert yes.output.startswith("ready: 1 of 1 graphs of 2 ranks in ")
    path = ready_manifest(tmp_path / "m.json", 1, 2)
    no = run("manifest", "ready", path, "--tier", "x", "--world-size", 3, store=remote)
    assert no.exit_code == 1
    assert f"missing {key_of(2)} needed by ranks 0-1" in no.output
    assert "no graph was traced by ranks 2" in no.output
    assert "NOT ready: 1 of 2" in no.output
    value = json.loads(run("manifest", "ready", path, "--tier", "x", "--json", store=remote).output)
    assert value["missing"][0]["key"] == key_of(2)


def test_ready_may_be_strict_about_ranks_that_traced_less(tmp_path, remote):
    for number in (1, 2):
        publish(remote, tmp_path / "src", key_of(number))
    graphs = (Graph(key_of(1), ranks=(0, 1)), Graph(key_of(2), ranks=(0,)))
    path = write(tmp_path / "m.json", Manifest(graphs=graphs))
    loose = run("manifest", "ready", path, "--tier", "x", store=remote)
    assert loose.exit_code == 0
    assert "note: m.json: up to 2 graphs a rank, but rank 1: 1" in loose.output
    assert run("manifest", "ready", path, "--tier", "x", "--strict", store=remote).exit_code == 1


def test_an_unknown_tier_is_a_usage_error(tmp_path):
    path = ready_manifest(tmp_path / "m.json", 1)
    result = run("manifest", "ready", path, "--tier", "nosuch://x")
    assert result.exit_code == 2
    assert "nosuch" in result.output


def test_plan_tells_which_keys_miss(one):
    result = run("manifest", "plan", one, "--upgrade", "neuronx-cc=2.32")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].startswith("3 keys miss (")
    assert "neuronx-cc 2.31.1 -> 2.32" in result.output
    value = json.loads(run("manifest", "plan", one, "--upgrade", "torch=3", "--json").output)
    assert (value["miss"], value["may_miss"]) == (0, 3)
    stays = run("manifest", "plan", one, "--add-flag", "--verbose 35")
    assert stays.output == "0 keys miss (0 B to compile anew), 0 may miss, 3 stay\n"


@pytest.mark.parametrize("arguments", [(), ("--upgrade", "x"), ("--upgrade", "=1")])
def test_a_plan_without_a_change_is_a_usage_error(one, arguments):
    assert run("manifest", "plan", one, *arguments).exit_code == 2


def test_report_writes_a_page_in_one_step(tmp_path, one):
    result = run("manifest", "report", one, "-o", tmp_path / "report.html", "--title", "A & B")
    assert result.exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "A &amp; B" in page
    assert {f.name for f in tmp_path.iterdir()} == {"dev0_7", "report.html"}


def test_a_report_that_cannot_be_written_says_where(one):
    result = run("manifest", "report", one, "-o", "/nowhere/at/all.html")
    assert result.exit_code == 2
    assert "/nowhere/at/all.html cannot be written" in result.output


class Local(DirectoryStore):
    """A local side whose shared tier is `remote`."""

    def __init__(self, root, remote):
        super().__init__(root)
        self.shared = remote

    def find(self, key):
        return super().find(key) or self.shared.find(key)

    def path_of(self, key):
        return None if DirectoryStore.find(self, key) is None else self.root / key

    def get(self, key):
        if self.path_of(key) is None:
            artifact = self.shared.find(key)
            if artifact is None:
                raise ArtifactNotFound(key, self.location)
            self.publish(artifact, self.shared.root / key)
        return self.root / key

    def promote(self, key):
        artifact = DirectoryStore.find(self, key)
        if artifact is None:
            raise PromoteError(key, {"s3": TierError("s3", "publish", "403", key=key)}, {})
        return {"shared": self.shared.publish(artifact, self.root / key)}


def test_prefetch_brings_all_and_exits_1_when_one_is_missing(tmp_path, remote):
    publish(remote, tmp_path / "src", key_of(1))
    local = Local(tmp_path / "local", remote)
    result = run("prefetch", "--manifest", ready_manifest(tmp_path / "m.json", 1), store=local)
    assert result.exit_code == 0
    assert re.match(r"0 present, 1 fetched \(\d.* in \d", result.output)
    missing = run("prefetch", "--manifest", ready_manifest(tmp_path / "m.json", 1, 2), store=local)
    assert missing.exit_code == 1
    assert f"missing {key_of(2)}" in missing.output
    value = json.loads(
        run("prefetch", "--manifest", tmp_path / "m.json", "--json", store=local).output
    )
    assert (value["present"], value["missing"]) == (1, 1)


@pytest.mark.parametrize(
    ("budget", "fetched"), [("1", 0), ("1K", 0), ("20MB", 1), ("0.5GiB", 1), ("1000000", 1)]
)
def test_a_budget_may_have_a_unit(tmp_path, remote, budget, fetched):
    publish(remote, tmp_path / "src", key_of(1))
    path = ready_manifest(tmp_path / "m.json", 1)
    local = Local(tmp_path / "local", remote)
    result = run("prefetch", "--manifest", path, "--budget", budget, "--json", store=local)
    assert json.loads(result.output)["fetched"] == fetched


@pytest.mark.parametrize("budget", ["x", "-1", "1Q", "", "nan", "1e40"])
def test_a_budget_that_is_no_size_is_a_usage_error(tmp_path, budget, remote):
    path = ready_manifest(tmp_path / "m.json", 1)
    assert run("prefetch", "--manifest", path, "--budget", budget, store=remote).exit_code == 2


def test_promote_by_manifest_tells_each_graph_and_whether_all_arrived(tmp_path, remote, capsys):
    local = Local(tmp_path / "local", remote)
    publish(local, tmp_path / "src", key_of(1))
    assert promote_by_manifest(local, [ready_manifest(tmp_path / "m.json", 1)])
    assert f"created {key_of(1)} shared" in capsys.readouterr().out
    assert not promote_by_manifest(local, [ready_manifest(tmp_path / "m.json", 1, 2)], as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert [g["error"] is None for g in value["graphs"]] == [True, False]
    assert value["graphs"][0]["tiers"] == {"shared": Publication.PRESENT.value}

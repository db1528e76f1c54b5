from __future__ import annotations

import json
import shutil

import pytest

from neuron_store_backends.posix import PosixStore
from tests.cli.conftest import KEY, OTHER
from tests.manifest.entries import fill


def fields(result):
    return [line.split("\t") for line in result.stdout.splitlines()]


class TestConfig:
    def test_prints_every_setting_and_where_it_came_from(self, cli, monkeypatch, tmp_path):
        file = tmp_path / "settings.toml"
        file.write_text("compile_attempts = 3\n")
        monkeypatch.setenv("NEURON_STORE_CONFIG", str(file))
        monkeypatch.setenv("NEURON_STORE_PROMOTE", "auto")
        rows = {row[0]: row[1:] for row in fields(cli("config"))}
        assert rows["NEURON_STORE_COMPILE_ATTEMPTS"] == ["3", str(file), "compile_attempts"]
        assert rows["NEURON_STORE_PROMOTE"] == ["auto", "environment", "promote"]
        assert rows["NEURON_LIBTORCH_COMPILATION_TIMEOUT"][:2] == ["600", "default"]

    def test_options_of_the_command_line_take_the_place_of_settings(self, cli, places, monkeypatch):
        monkeypatch.setenv("NEURON_STORE_TIERS", "/elsewhere")
        document = cli.json("config")
        assert [tier["location"] for tier in document["tiers"]] == [str(places.shared)]
        assert document["local_root"] == str(places.local)
        settings = {each["name"]: each for each in document["settings"]}
        assert settings["NEURON_STORE_TIERS"]["source"] == "command line"

    def test_shows_the_options_of_tiers(self, command):
        env = {"NEURON_STORE_TIERS": "s3://b/p?endpoint_url=http://h:1&name=far&read_only=1"}
        result = command("config", env=env)
        assert "s3://b/p endpoint_url=http://h:1 read_only=1 name=far" in result.stdout

    def test_a_scheme_that_nobody_serves_is_an_error_and_the_rest_is_printed(self, command):
        env = {"NEURON_STORE_TIERS": "nfs4://host/path s3://b/p"}
        result = command("config", env=env)
        assert result.returncode == 2
        assert "error: nfs4://host/path: no tier for scheme 'nfs4'; known: " in result.stderr
        rows = {row[0]: row[1] for row in fields(result)}
        assert rows["shared tier 1"] == "nfs4://host/path"
        assert rows["shared tier 2"] == "s3://b/p"
        assert rows["NEURON_STORE_VERIFY"] == "first"
        result = command("config", "--json", env=env)
        assert result.returncode == 2
        document = json.loads(result.stdout)
        assert document["ok"] is False
        first, second = document["tiers"]
        assert "no tier for scheme" in first["error"]
        assert second["error"] is None


class TestDoctor:
    def test_measures_each_tier(self, cli, places):
        places.shared.mkdir()
        document = cli.json("doctor")
        assert [tier["location"] for tier in document["tiers"]] == [
            str(places.local),
            str(places.shared),
        ]
        for tier in document["tiers"]:
            assert tier["fit"] is True
            assert tier["latency_seconds"] > 0
            assert {"writable", "exclusive create"} <= {c["name"] for c in tier["checks"]}

    def test_a_refused_tier_is_an_honest_no_and_the_others_are_measured_all_the_same(
        self, cli, places
    ):
        places.shared.write_text("a file")
        document = cli.json("doctor", status=1)
        good, bad = document["tiers"]
        assert good["fit"] is True
        assert bad["fit"] is False
        assert "Not a directory" in bad["refused"]

    def test_a_tier_that_cannot_be_opened_is_refused_with_the_reason(self, command, places):
        result = command("--local", places.local, "--tier", "ftp://x", "doctor")
        assert result.returncode == 2
        assert "ftp://x must not be used: no tier for scheme 'ftp'; known: " in result.stderr
        assert f"{places.local}\tin all\tfit" in result.stdout

    def test_leaves_nothing_behind(self, cli, places):
        places.shared.mkdir()
        cli("doctor")
        left = [p for p in places.shared.rglob("*") if p.name != ".staging"]
        assert left == []


class TestLs:
    def test_lists_the_artifacts_of_each_tier(self, cli, put, places):
        put(places.local)
        put(places.shared)
        put(places.shared, OTHER, b"other program")
        rows = fields(cli("ls"))
        assert [row[:4] for row in rows] == [
            [str(places.local), KEY, "hit", "7"],
            [str(places.shared), KEY, "hit", "7"],
            [str(places.shared), OTHER, "hit", "13"],
        ]
        assert rows[0][5:] == ["iree 3.3", f"graph_{KEY}.vmfb"]

    def test_an_unknown_time_of_compile_is_none_and_not_1970(self, cli, put, places):
        put(places.shared, created="1970-01-01T00:00:00+00:00")
        assert fields(cli("ls"))[0][4] == "-"
        assert cli.json("ls")["artifacts"][0]["created"] is None
        assert "1970" not in cli("show", KEY).stdout

    def test_an_entry_of_the_neuron_stack_was_compiled_when_its_neff_was_written(self, cli, places):
        entry = fill(places.local, KEY, mtime=1786048631.0)
        mark = entry / ".compilation_complete"
        mark.write_text(mark.read_text().partition("\n")[2])  # without the `completed:` line
        assert fields(cli("ls"))[0][4] == "2026-08-06T20:37:11"
        cli("promote", KEY)
        assert [row[4] for row in fields(cli("ls"))] == ["2026-08-06T20:37:11"] * 2

    def test_lists_one_tier_by_name(self, cli, put, places):
        put(places.local)
        put(places.shared, OTHER)
        assert [row[1] for row in fields(cli("ls", "--tier", "local"))] == [KEY]
        assert [row[1] for row in fields(cli("ls", "--tier", places.shared))] == [OTHER]
        result = cli("ls", "--tier", "nowhere", status=2)
        assert "no tier is called 'nowhere'" in result.stderr

    def test_quiet_prints_each_key_once(self, cli, put, places):
        put(places.local)
        put(places.shared)
        put(places.shared, OTHER)
        assert cli("ls", "-q").stdout == f"{KEY}\n{OTHER}\n"

    def test_shows_damaged_entries_and_says_no(self, cli, put, places):
        (put(places.shared) / f"graph_{KEY}.vmfb").write_bytes(b"short")
        result = cli("ls", status=1)
        assert fields(result)[0][2] == "corrupt"
        assert "5 bytes, the record says 7" in result.stderr

    def test_a_tier_in_trouble_does_not_hide_the_others(self, cli, put, places):
        put(places.local)
        places.shared.write_text("a file")
        document = cli.json("ls", status=1)
        assert [(a["key"], a["outcome"]) for a in document["artifacts"]] == [
            (KEY, "hit"),
            (None, "error"),
        ]

    def test_an_empty_store_prints_nothing(self, cli):
        assert cli("ls").stdout == ""
        assert cli.json("ls")["artifacts"] == []


class TestShow:
    def test_shows_the_record_and_what_each_tier_answers(self, cli, put, places):
        put(places.shared, components={"target": "trn2", "flags": ["-O1"]})
        document = cli.json("show", KEY)
        assert document["artifact"]["components"] == {"target": "trn2", "flags": ["-O1"]}
        assert document["path"] is None
        assert [(t["location"], t["outcome"]) for t in document["tiers"]] == [
            (str(places.local), "miss"),
            (str(places.shared), "hit"),
        ]
        text = cli("show", KEY).stdout
        assert "component target\ttrn2\n" in text
        assert f"graph_{KEY}.vmfb\t7\t" in text

    def test_says_where_a_local_artifact_is(self, cli, put, places):
        path = put(places.local)
        assert cli.json("show", KEY)["path"] == str(path)

    def test_tells_that_two_tiers_hold_different_bytes(self, cli, put, places):
        put(places.local)
        put(places.shared, data=b"another")
        assert "other bytes" in cli.json("show", KEY)["tiers"][1]["detail"]

    def test_a_miss_everywhere_is_an_honest_no(self, cli):
        result = cli("show", KEY, status=1)
        assert result.stderr == f"error: no tier has a whole artifact {KEY}\n"
        assert [row[1] for row in fields(result)] == ["miss", "miss"]


class TestFetch:
    def test_brings_an_artifact_to_the_local_tier(self, cli, put, places):
        put(places.shared)
        (fetched,) = cli.json("fetch", KEY)["artifacts"]
        assert fetched["outcome"] == "fetched"
        assert fetched["tier"] == str(places.shared)
        assert fetched["bytes"] == 7
        assert fetched["path"] == str(places.local / KEY)
        assert (places.local / KEY / f"graph_{KEY}.vmfb").read_bytes() == b"program"

    def test_what_is_there_is_left_alone(self, cli, put, places):
        put(places.local)
        (fetched,) = cli.json("fetch", KEY)["artifacts"]
        assert (fetched["outcome"], fetched["bytes"]) == ("present", 0)

    def test_one_that_is_missing_does_not_stop_the_others(self, cli, put, places):
        put(places.shared, OTHER)
        result = cli("fetch", KEY, OTHER, status=1)
        assert [(row[0], row[1]) for row in fields(result)] == [
            (KEY, "missing"),
            (OTHER, "fetched"),
        ]
        assert f"error: no artifact {KEY}" in result.stderr


class TestPromote:
    def test_publishes_in_the_shared_tiers(self, cli, put, places):
        put(places.local)
        (promoted,) = cli.json("promote", KEY)["artifacts"]
        assert promoted["outcome"] == "created"
        assert (places.shared / KEY / f"graph_{KEY}.vmfb").read_bytes() == b"program"
        assert fields(cli("promote", KEY))[0][2] == "present"

    def test_all_takes_everything_that_is_local(self, cli, put, places):
        put(places.local)
        put(places.local, OTHER)
        assert sorted(row[0] for row in fields(cli("promote", "--all"))) == [KEY, OTHER]
        assert sorted(p.name for p in places.shared.iterdir() if p.name[0] != ".") == [KEY, OTHER]

    def test_an_empty_local_tier_is_no_failure(self, cli):
        assert "nothing to promote" in cli("promote", "--all").stderr

    def test_a_conflict_leaves_the_first_writers_bytes_and_is_no_failure(self, cli, put, places):
        put(places.local)
        put(places.shared, data=b"first")
        assert fields(cli("promote", KEY))[0][2] == "conflict"
        assert (places.shared / KEY / f"graph_{KEY}.vmfb").read_bytes() == b"first"

    def test_to_names_the_tiers(self, command, put, places, tmp_path):
        put(places.local)
        tiers = [f"posix://{places.shared}?name=a", f"posix://{tmp_path}/second?name=b"]
        options = ["--local", places.local, "--tier", tiers[0], "--tier", tiers[1]]
        result = command(*options, "promote", KEY, "--to", "b")
        assert result.stdout == f"{KEY}\tb\tcreated\n"
        assert not (places.shared / KEY).exists()
        result = command(*options, "promote", KEY, "--to", "c")
        assert result.returncode == 2
        assert "no shared tier is called 'c'; there are: a, b" in result.stderr

    def test_a_tier_that_fails_is_an_honest_no_and_the_others_are_done(
        self, command, put, places, tmp_path
    ):
        put(places.local)
        (tmp_path / "file").write_text("")
        options = ["--local", places.local, "--tier", tmp_path / "file", "--tier", places.shared]
        result = command(*options, "promote", KEY)
        assert result.returncode == 1
        rows = [line.split("\t")[1:] for line in result.stdout.splitlines()]
        assert sorted(rows) == sorted(
            [[str(places.shared), "created"], [str(tmp_path / "file"), "error"]]
        )

    def test_what_is_not_local_is_missing(self, cli, put, places):
        put(places.shared)
        assert fields(cli("promote", KEY, status=1))[0][2] == "missing"

    def test_the_graphs_of_a_manifest(self, cli, put, places, tmp_path):
        put(places.local)
        put(places.local, OTHER)
        manifest = tmp_path / "manifest.json"
        manifest.write_text(
            '{"manifest_version": "1", "config": {}, "environment": {}, '
            f'"graphs": [{{"graph_hash": "{OTHER}"}}]}}'
        )
        assert [row[0] for row in fields(cli("promote", "--manifest", manifest))] == [OTHER]

    @pytest.mark.parametrize("arguments", [[], [KEY, "--all"]])
    def test_exactly_one_way_to_name_the_artifacts(self, cli, arguments):
        assert "give either" in cli("promote", *arguments, status=2).stderr

    def test_a_read_only_tier_is_a_matter_of_settings(self, command, put, places):
        put(places.local)
        tier = f"posix://{places.shared}?read_only=1"
        result = command("--local", places.local, "--tier", tier, "promote", KEY)
        assert result.returncode == 2
        assert "read-only" in result.stderr

    def test_no_shared_tier_is_a_matter_of_settings(self, command, put, places):
        put(places.local)
        result = command("--local", places.local, "promote", KEY)
        assert result.returncode == 2
        assert "NEURON_STORE_TIERS" in result.stderr


class TestVerify:
    @pytest.fixture(autouse=True)
    def mounted(self, places):
        places.shared.mkdir()

    def test_reads_everything(self, cli, put, places):
        put(places.local)
        put(places.shared, OTHER)
        assert [(row[1], row[2]) for row in fields(cli("verify"))] == [(KEY, "ok"), (OTHER, "ok")]

    def test_finds_changed_bytes_of_the_same_size(self, cli, put, places):
        (put(places.shared) / f"graph_{KEY}.vmfb").write_bytes(b"PROGRAM")
        result = cli("verify", status=1)
        assert fields(result)[0][2] == "corrupt"
        assert "sha256" in result.stderr

    @pytest.mark.parametrize("how", ["short", "gone", "record"])
    def test_finds_entries_whose_damage_shows_at_a_look(self, cli, put, places, how):
        path = put(places.local)
        if how == "short":
            (path / f"graph_{KEY}.vmfb").write_bytes(b"p")
        elif how == "gone":
            (path / f"graph_{KEY}.vmfb").unlink()
        else:
            (path / ".neuron_store.json").write_text("{")
        (seen,) = cli.json("verify", status=1)["artifacts"]
        assert seen["outcome"] == "corrupt"

    def test_a_key_that_one_tier_lacks_is_no_fault(self, cli, put, places):
        put(places.shared)
        assert [row[2] for row in fields(cli("verify", KEY))] == ["missing", "ok"]

    def test_unless_that_tier_was_asked_for(self, cli, put, places):
        put(places.shared)
        cli("verify", KEY, "--tier", "local", status=1)

    def test_a_key_that_no_tier_has_is_missing(self, cli):
        result = cli("verify", KEY, status=1)
        assert f"error: no artifact {KEY}" in result.stderr

    def test_a_stray_directory_is_none_of_our_business(self, cli, put, places):
        put(places.local)
        (places.local / "lost+found").mkdir()
        shutil.copytree(places.local / KEY, places.local / ".backup")
        assert len(fields(cli("verify"))) == 1

    @pytest.mark.parametrize("keys", [[], [KEY]])
    def test_a_share_that_is_not_mounted_is_an_error_of_that_tier(self, cli, put, places, keys):
        put(places.local)
        places.shared.rmdir()
        for options in ([], ["--repair"], ["--tier", places.shared]):
            told = cli("verify", *options, *keys, status=1)
            assert "the directory does not exist; mount the share" in told.stderr
            assert not places.shared.exists()
        assert cli.json("verify", *keys, status=1)["artifacts"][0]["outcome"] == "error"
        cli("verify", "--tier", "local", *keys)

    def test_a_local_tier_that_is_not_there_yet_has_nothing_to_verify(self, cli, places):
        assert cli("verify").stdout == ""
        assert not places.local.exists()


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_record_of_a_newer_release_is_one_row_and_the_rest_goes_on(cli, put, places, command):
    put(places.shared)
    record = put(places.shared, OTHER) / ".neuron_store.json"
    facts = json.loads(record.read_text())
    facts["neuron_store_record"] = 99
    record.write_text(json.dumps(facts))
    told = cli.json(command, "--tier", str(places.shared), status=1)["artifacts"]
    outcomes = {seen["key"]: seen["outcome"] for seen in told}
    assert outcomes == {KEY: "hit" if command == "ls" else "ok", OTHER: "error"}
    assert list(PosixStore(places.shared).keys()) == [KEY]

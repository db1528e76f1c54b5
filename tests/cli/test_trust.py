"""`keygen`, `promote --sign`, `verify --repair`, and what the commands say of signatures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from neuron_store.artifact import RECORD_NAME
from neuron_store.manifest.schema import Graph, Manifest, dump_manifest
from neuron_store.scrub_progress import ScrubProgress
from neuron_store.testing.killing import run_killed_at
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
# Steps at which a repair has brought the copy already.
_MENDED = {"publish.renamed", "publish.done", "scrub.published"}


@pytest.fixture
def key(cli, tmp_path):
    """The path of a private key, and its public half as the command printed it."""
    return tmp_path / "key", cli("keygen", tmp_path / "key").stdout.strip()


@pytest.fixture
def cli_json(cli):
    return cli.json


@pytest.fixture
def trusting(monkeypatch, key):
    monkeypatch.setenv("NEURON_STORE_TRUSTED_KEYS", key[1])
    monkeypatch.setenv("NEURON_STORE_REQUIRE_SIGNATURE", "1")


def rot(root, key=KEY):
    path = root / key / f"graph_{key}.vmfb"
    path.write_bytes(b"?" + path.read_bytes()[1:])


class TestKeygen:
    def test_prints_the_public_key_and_overwrites_nothing(self, cli, tmp_path):
        printed = cli("keygen", tmp_path / "k").stdout
        assert printed.startswith("ed25519:")
        assert (tmp_path / "k.pub").read_text() == printed
        assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
        secret = (tmp_path / "k").read_bytes()
        assert "exists" in cli("keygen", tmp_path / "k", status=2).stderr
        assert (tmp_path / "k").read_bytes() == secret
        assert secret.decode().splitlines()[1] not in printed

    def test_prints_the_public_key_of_an_existing_one(self, cli, key, tmp_path):
        (tmp_path / "key.pub").unlink()
        assert cli("keygen", "--public", key[0]).stdout.strip() == key[1]
        assert not (tmp_path / "key.pub").exists()

    def test_json(self, cli_json, tmp_path):
        told = cli_json("keygen", tmp_path / "k")
        assert told["key"].startswith("ed25519:")
        assert len(told["key_id"]) == 32
        assert told["private"] == str(tmp_path / "k")

    def test_a_place_that_cannot_be_written_is_named(self, cli, tmp_path):
        assert str(tmp_path) in cli("keygen", tmp_path / "no" / "k", status=2).stderr


class TestPromoteAndFetch:
    def test_signed_promote_then_fetch_where_a_signature_is_required(
        self, cli, cli_json, put, places, key, trusting, tmp_path
    ):
        put(places.local)
        cli("promote", KEY, "--sign", "--key", key[0])
        LocalStore(places.local).delete(KEY)
        assert cli_json("fetch", KEY)["artifacts"][0]["outcome"] == "fetched"
        told = cli_json("show", KEY)
        assert [t["outcome"] for t in told["tiers"]] == ["hit", "hit"]
        assert told["tiers"][1]["detail"].endswith("trusted")
        assert len(told["artifact"]["signatures"]) == 1
        assert "trusted" in cli("show", KEY).stdout
        cli("verify")

    def test_unsigned_is_refused_everywhere_and_stays(
        self, cli, cli_json, put, places, trusting, tmp_path
    ):
        put(places.shared)
        told = cli_json("fetch", KEY, status=1)["artifacts"][0]
        assert told["outcome"] == "refused"
        assert "not signed" in told["detail"]
        assert cli_json("show", KEY, status=1)["tiers"][1]["outcome"] == "refused"
        assert cli_json("ls", status=1)["artifacts"][0]["outcome"] == "refused"
        assert cli_json("verify", status=1)["artifacts"][0]["outcome"] == "refused"
        assert cli_json("verify", "--repair", status=1)["artifacts"][0]["outcome"] == "refused"
        assert cli_json("why", KEY, status=1)["keys"][0]["tiers"][1]["outcome"] == "refused"
        manifest = write_manifest(tmp_path, places.shared / KEY)
        ready = cli_json("manifest", "ready", manifest, "--tier", str(places.shared), status=1)
        assert ready["missing"][0]["state"] == "refused"
        fetched = cli_json("prefetch", "--manifest", manifest, status=1)
        assert fetched["refused"] == 1
        assert fetched["graphs"][0]["outcome"] == "refused"
        PosixStore(places.shared).verify(KEY)
        assert not (places.shared / ".quarantine").exists()

    def test_signed_is_ready_and_prefetched(
        self, cli, cli_json, put, places, key, trusting, tmp_path
    ):
        put(places.local)
        cli("promote", KEY, "--key", key[0])
        manifest = write_manifest(tmp_path, places.shared / KEY)
        LocalStore(places.local).delete(KEY)
        cli_json("manifest", "ready", manifest, "--tier", str(places.shared))
        assert cli_json("prefetch", "--manifest", manifest)["fetched"] == 1

    def test_the_variable_signs_without_an_option(self, cli, put, places, key, monkeypatch):
        monkeypatch.setenv("NEURON_STORE_SIGNING_KEY", str(key[0]))
        put(places.local)
        cli("promote", "--all")
        assert len(PosixStore(places.shared).find(KEY).signatures) == 1

    def test_sign_without_a_key_is_a_usage_error_that_names_the_remedy(self, cli, put, places):
        put(places.local)
        assert "keygen" in cli("promote", KEY, "--sign", status=2).stderr
        assert not places.shared.exists()

    def test_a_tier_with_another_record_is_not_reached(self, cli, put, places, key):
        put(places.shared, components={"target": "x"})
        put(places.local)
        told = cli("promote", KEY, "--key", key[0], status=1)
        assert "delete it there" in told.stderr

    def test_show_names_a_signer_whom_nobody_checks(self, cli, put, places, key):
        put(places.local)
        cli("promote", KEY, "--key", key[0])
        assert "not checked" in cli("show", KEY).stdout

    def test_config_shows_the_keys_and_no_secret(self, cli, cli_json, key, trusting, monkeypatch):
        monkeypatch.setenv("NEURON_STORE_SIGNING_KEY", str(key[0]))
        shown = cli("config").stdout
        assert key[1] in shown
        assert key[0].read_text().splitlines()[1] not in shown
        values = {s["name"]: s["value"] for s in cli_json("config")["settings"]}
        assert values["NEURON_STORE_TRUSTED_KEYS"] == [key[1]]


def write_manifest(tmp_path, entry):
    """A manifest of one graph, as an engine writes it."""
    path = tmp_path / "manifest.json"
    path.write_bytes(dump_manifest(Manifest(graphs=(Graph(entry.name, ranks=(0,)),))))
    return path


class TestVerify:
    @pytest.fixture(autouse=True)
    def mounted(self, places):
        places.shared.mkdir()

    def test_repair_exchanges_and_says_from_where(self, cli, cli_json, put, places):
        put(places.local)
        cli("promote", "--all")
        rot(places.shared)
        assert cli_json("verify", status=1)["beyond_repair"] is None
        told = cli_json("verify", "--repair")
        assert told["repaired"] == 1
        assert told["beyond_repair"] == 0
        (mended,) = [a for a in told["artifacts"] if a["outcome"] == "repaired"]
        assert str(places.local) in mended["detail"]
        cli("verify")

    def test_beyond_repair_is_status_1(self, cli, put, places):
        put(places.shared)
        rot(places.shared)
        for _ in range(2):
            told = cli("verify", "--repair", status=1)
            assert "beyond repair" in told.stderr
            assert (places.shared / KEY).exists()

    def test_only_the_tier_that_is_named(self, cli, cli_json, put, places):
        put(places.local)
        cli("promote", "--all")
        rot(places.local)
        rot(places.shared)
        told = cli_json("verify", "--tier", "local", "--repair", status=1)
        assert {a["tier"] for a in told["artifacts"]} == {str(places.local)}

    @pytest.mark.parametrize(
        ("rate", "status"), [("200MiB/s", 0), ("1G", 0), ("0", 2), ("fast", 2), ("-1M", 2)]
    )
    def test_the_rate_is_a_size(self, cli, put, places, rate, status):
        put(places.local)
        told = cli("verify", "--rate", rate, status=status)
        assert not status or "--rate" in told.stderr

    def test_piped_each_entry_is_a_line(self, cli, put, places):
        put(places.local)
        put(places.local, OTHER)
        lines = [line.split("\t") for line in cli("verify").stdout.splitlines()]
        assert sorted(line[1] for line in lines) == [KEY, OTHER]
        assert {line[2] for line in lines} == {"ok"}

    def test_no_note_stays_when_all_is_done(self, cli, put, places, tmp_path):
        put(places.local)
        cli("verify")
        cli("verify", "--resume", tmp_path / "note")
        assert not (tmp_path / "note").exists()
        assert not list((places.local / ".stats").iterdir())

    def test_a_kill_at_any_step_of_a_repair_loses_nothing_to_a_plain_rerun(
        self, cli, cli_json, put, places
    ):
        put(places.local)
        killed = []
        for number in range(1, 80):
            shutil.rmtree(places.shared, ignore_errors=True)
            put(places.shared)
            rot(places.shared)
            told = run_killed_at(lambda: cli("verify", "--repair", "--workers", "1"), number)
            assert told.error is None
            if told.step is None:
                break
            killed.append(told.step)
            whole = (places.shared / KEY / RECORD_NAME).exists()
            for _ in range(2):
                # Without --repair nothing is changed, and nothing forgotten.
                seen = cli_json("verify", status=0 if told.step in _MENDED else 1)["artifacts"]
                outcomes = {a["tier"]: a["outcome"] for a in seen}
                assert outcomes[str(places.local)] == "ok"
                wanted = "ok" if told.step in _MENDED else "corrupt"
                assert outcomes[str(places.shared)] == wanted
                assert (places.shared / KEY / RECORD_NAME).exists() == whole
            again = cli_json("verify", "--repair")
            assert again["repaired"] == (told.step not in _MENDED)
            PosixStore(places.shared).verify(KEY)
            assert not (places.local / ".stats" / "verify.jsonl").exists()
        assert told.step is None
        assert {"note.show", "scrub.copied", "aside.move", "scrub.aside"} < set(killed)
        assert {"publish.rename", "publish.done", "scrub.published"} < set(killed)

    def test_a_kill_at_any_step_of_the_rerun_loses_nothing_either(self, cli, put, places):
        put(places.local)
        for number in range(1, 80):
            shutil.rmtree(places.shared, ignore_errors=True)
            put(places.shared)
            os.rename(places.shared / KEY, places.outside / f"{number}")
            note = ScrubProgress.begin(places.local)
            note.say(str(places.shared), KEY, "damaged")
            note.close()
            told = run_killed_at(lambda: cli("verify", "--repair", "--workers", "1"), number)
            assert told.error is None
            cli("verify", "--repair")
            PosixStore(places.shared).verify(KEY)
            if told.step is None:
                break
        assert told.step is None

    def test_what_was_set_aside_and_is_nowhere_else_is_told_of_again(self, cli, put, places):
        put(places.shared)
        put(places.local, OTHER)
        note = ScrubProgress.begin(places.local)
        note.say(str(places.shared), KEY, "damaged")
        note.close()
        os.rename(places.shared / KEY, places.outside / KEY)
        for _ in range(2):
            assert "did not end" in cli("verify", status=1).stderr
            assert "beyond repair" in cli("verify", "--repair", status=1).stderr
            # Another key's run says nothing of it, and forgets nothing.
            cli("verify", OTHER)
        put(places.shared)
        cli("verify")
        assert not (places.local / ".stats" / "verify.jsonl").exists()

    def test_what_is_beyond_repair_and_still_in_its_place_leaves_no_note(self, cli, put, places):
        put(places.shared)
        rot(places.shared)
        cli("verify", "--repair", status=1)
        assert not list((places.local / ".stats").iterdir())

    def test_a_repair_without_a_note_is_warned_of(self, cli, put, places):
        put(places.local)
        put(places.shared)
        first = ScrubProgress.begin(places.local)
        assert "progress note" in cli("verify", "--repair").stderr
        assert "progress note" not in cli("verify").stderr
        first.finish()

    def test_an_interrupted_run_is_gone_on_with(self, cli_json, put, places, tmp_path):
        keys = [f"{n:032x}" for n in range(6)]
        for each in keys:
            put(places.local, each, b"x" * 400_000)
        command = [sys.executable, "-m", "neuron_store.cli", "--local", str(places.local)]
        note = tmp_path / "note"
        command += ["verify", "--workers", "1", "--rate", "400k", "--resume", str(note)]
        env = {k: v for k, v in os.environ.items() if k != "NEURON_STORE_TIERS"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=env) as child:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if note.exists() and note.read_text().count("\n") >= 3:
                    break
                time.sleep(0.02)
            child.send_signal(signal.SIGINT)
            told = child.communicate()[1].decode()
        assert child.returncode == 130
        assert f"--resume {note}" in told
        done = note.read_text().count('"ok"')
        assert 0 < done < 6
        again = cli_json("verify", "--tier", "local", "--resume", note)
        assert again["resumed"] == done
        assert again["checked"] == 6 - done
        assert not note.exists()

    def test_a_note_that_is_something_else_is_status_2(self, cli, put, places, tmp_path):
        put(places.local)
        (tmp_path / "thesis").write_text("chapter one")
        assert "progress note" in cli("verify", "--resume", tmp_path / "thesis", status=2).stderr
        assert (tmp_path / "thesis").read_text() == "chapter one"


def test_a_record_may_say_what_it_likes_of_its_signer_and_sends_no_control_characters(
    cli, put, places
):
    entry = put(places.shared)
    record = json.loads((entry / RECORD_NAME).read_text())
    record["signatures"] = [{"key_id": "a" * 32, "scheme": "x", "signature": "y"}]
    record["components"] = {"\x1b[31m": "\x1b]0;title\x07"}
    (entry / RECORD_NAME).write_text(json.dumps(record))
    told = cli("show", KEY)
    assert "\x1b" not in told.stdout + told.stderr
    assert "a" * 32 in told.stdout

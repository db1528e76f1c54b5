"""`neuron-store gc`, and the words of `doctor`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from neuron_store import steps
from neuron_store.abc import Check, Speed, TierReport
from neuron_store.cli.app import app
from neuron_store.collector import COLLECTOR_KEY
from neuron_store.diagnosis import diagnose
from neuron_store_backends import _collecting_local, _probe_renaming
from tests.cli import test_s3
from tests.cli.conftest import KEY, OTHER
from tests.cli.test_commands import fields

OLD = 40 * 86400


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_collecting_local, "SETTLE_SECONDS", 0.05)


# The fixtures of the other file.
bucket, s3 = test_s3.bucket, test_s3.s3


def past(path, age=OLD):
    moment = time.time() - age
    os.utime(path, (moment, moment))


@pytest.fixture
def old(put, places):
    """An artifact in each tier, published long ago, and a killed process's staging in each."""

    def make(*keys):
        for root in (places.local, places.shared):
            for key in keys or (KEY,):
                past(put(root, key) / ".neuron_store.json")
            left = root / ".staging" / "gone.1"
            left.mkdir(parents=True)
            past(left)

    return make


def test_without_a_criterion_only_leftovers_go(cli, old, places):
    """Pitfall 40."""
    old()
    rows = fields(cli("gc"))
    assert [row[:5] for row in rows] == [
        [str(places.local), "staging", ".staging/gone.1", "removed", "0"],
        [str(places.shared), "staging", ".staging/gone.1", "removed", "0"],
    ]
    assert (places.local / KEY).exists()
    assert (places.shared / KEY).exists()


def test_a_dry_run_shows_what_would_go_and_why_and_changes_nothing(cli, old, places, tmp_path):
    """Pitfall 40: dry run first."""
    old()
    before = sorted(tmp_path.rglob("*"))
    document = cli.json("gc", "--older-than", "30d", "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    local, shared = document["tiers"]
    assert document["dry_run"] is True
    (gone,) = [r for r in local["removals"] if r["kind"] == "artifact"]
    assert (gone["key"], gone["outcome"]) == (KEY, "would go")
    assert "40 d ago; older than 30 d" in gone["reason"]
    assert gone["age_seconds"] > 39 * 86400
    assert local["freed"] == gone["bytes"] == document["freed"] > 7
    assert [r["kind"] for r in shared["removals"]] == ["staging"]


def test_artifacts_of_a_shared_tier_go_only_when_it_is_named(cli, old, places):
    old()
    result = cli("gc", "--older-than", "30d")
    assert f"artifacts in {places.shared} stay: add --tier {places.shared}" in result.stderr
    assert not (places.local / KEY).exists()
    assert (places.shared / KEY).exists()
    cli("gc", "--older-than", "30d", "--tier", places.shared)
    assert not (places.shared / KEY).exists()


def test_this_nodes_uses_count_for_shared_tiers_too(cli, old, places):
    """Pitfall 35: the shared tier knows nothing of hits."""
    old(KEY, OTHER)
    cli("fetch", OTHER)
    cli("gc", "--older-than", "30d", "--tier", places.shared)
    assert not (places.shared / KEY).exists()
    assert (places.shared / OTHER).exists()


def test_manifests_pin_what_they_list(cli, old, places, tmp_path):
    """Pitfall 40: pinned keys are kept."""
    from neuron_store.manifest.schema import Graph, Manifest, dump_manifest

    old(KEY, OTHER)
    engine = tmp_path / "engines" / "dev0_7"
    engine.mkdir(parents=True)
    manifest = Manifest(graphs=(Graph(graph_hash=OTHER),))
    (engine / "manifest.json").write_bytes(_bytes(dump_manifest(manifest)))
    result = cli(
        "gc",
        "--max-size",
        "0",
        "--tier",
        "local",
        "--keep-manifest",
        tmp_path / "engines",
        status=1,
    )
    assert "more than --max-size: the rest is pinned" in result.stderr
    assert not (places.local / KEY).exists()
    assert (places.local / OTHER).exists()


def _bytes(data):
    return data if isinstance(data, bytes) else data.encode()


def test_a_manifest_that_cannot_be_read_stops_it_before_anything_goes(cli, old, places, tmp_path):
    old()
    (tmp_path / "manifest.json").write_text("{")
    cli("gc", "--older-than", "1d", "--keep-manifest", tmp_path / "manifest.json", status=2)
    assert (places.local / KEY).exists()
    assert (places.local / ".staging" / "gone.1").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--older-than", "30"], "--older-than '30' is no duration; write 30d"),
        (["--max-size", "lots"], "--max-size 'lots' is no size"),
        (["--grace", "-1d"], "--grace '-1d' is no duration"),
        (["--tier", "nowhere"], "no tier is called 'nowhere'"),
    ],
)
def test_what_does_not_parse_is_refused_by_name(cli, old, places, options, said):
    old()
    assert said in cli("gc", *options, status=2).stderr
    assert (places.local / ".staging" / "gone.1").exists()


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--older-than", "30d", "--min-age", "59s"], True),
        (["--older-than", "30d", "--min-age", "1m"], False),
        (["--min-age", "0s"], False),
        (["--older-than", "30d", "--min-age", "0s", "--tier", "shared"], False),
    ],
)
def test_a_min_age_in_which_a_use_may_not_be_noted_is_warned_of(cli, old, places, options, warned):
    """The soak's finding: it took what a process was handed this moment."""
    old()
    options = [str(places.shared) if each == "shared" else each for each in options]
    result = cli("gc", *options, "--dry-run")
    assert ("--min-age is below 1m" in result.stderr) is warned


def test_a_read_only_tier_refuses_when_named_and_is_passed_over_when_not(command, old, places):
    old()
    tier = f"{places.shared}?read_only=1"
    result = command("--local", places.local, "--tier", tier, "gc")
    assert result.returncode == 0, result.stderr
    assert "left alone: it cannot be collected, or is read-only" in result.stderr
    assert (places.shared / ".staging" / "gone.1").exists()
    result = command("--local", places.local, "--tier", tier, "gc", "--tier", places.shared)
    assert result.returncode == 2
    assert "read-only" in result.stderr


def test_a_collector_at_work_is_an_honest_no_and_the_other_tiers_are_done(cli, old, places):
    """Pitfall 41."""
    from neuron_store_backends.posix import PosixStore

    old()
    # One that is renewed every few milliseconds: the newcomer sees that at its second look.
    with PosixStore(places.shared).lease(COLLECTOR_KEY, 0.2):
        document = cli.json("gc", status=1)
    local, shared = document["tiers"]
    assert f"pid {os.getpid()}" in shared["error"]
    assert [r["outcome"] for r in local["removals"]] == ["removed"]
    assert (places.shared / ".staging" / "gone.1").exists()


def test_gc_on_an_object_store(s3, bucket, put, places):
    put(places.local)
    s3("promote", "--all")
    bucket.put_object(Bucket="cli", Key="cache/payload/x/y/f", Body=b"12345")
    document = s3("gc")
    # Younger than an hour: its record may be on the way.
    assert [tier["removals"] for tier in document["tiers"]] == [[], []]
    (far,) = s3("gc", "--tier", "far", "--older-than", "0s", "--min-age", "0s")["tiers"]
    assert [(r["kind"], r["key"], r["outcome"]) for r in far["removals"]] == [
        ("artifact", KEY, "removed")
    ]
    assert far["artifacts"] == 0
    names = [o["Key"] for o in bucket.list_objects_v2(Bucket="cli")["Contents"]]
    assert names == ["cache/payload/x/y/f"]


# -- stopped ------------------------------------------------------------------------------------


@pytest.fixture
def stopped_at():
    """Sends this process a signal at the n-th step of that name."""

    def at(name, number, signal_):
        seen = []

        def hook(step):
            seen.extend([step] if step == name else [])
            if len(seen) == number:
                steps.set_hook(None)
                os.kill(os.getpid(), signal_)
                time.sleep(0.1)

        steps.set_hook(hook)

    yield at
    steps.set_hook(None)


@pytest.fixture
def leftovers(places):
    for name in ("gone.1", "gone.2", "gone.3"):
        left = places.shared / ".staging" / name
        left.mkdir(parents=True)
        past(left)


STOPS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.usefixtures("leftovers")
@pytest.mark.parametrize(("number", "status"), STOPS)
def test_stopped_it_says_what_it_did_and_gives_the_lease_back(
    cli, places, stopped_at, number, status
):
    stopped_at("gc.hide", 2, number)
    result = cli("gc", status=status)
    name = str(places.shared)
    (removed, stopped) = [row[:4] for row in fields(result)]
    assert removed == [name, "staging", ".staging/gone.1", "removed"]
    assert stopped == [name, "tier", "-", "error"]
    assert f"error: {name}: stopped before everything was looked at" in result.stderr
    assert list((places.shared / ".leases").iterdir()) == []
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    # So the next one need not watch it for half a minute.
    began = time.monotonic()
    assert len(fields(cli("gc"))) == 2
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("leftovers")
def test_stopped_it_prints_its_one_document(cli, stopped_at):
    stopped_at("gc.hide", 3, signal.SIGTERM)
    document = cli.json("gc", status=143)
    local, shared = document["tiers"]
    assert local["error"] is None
    assert "stopped" in shared["error"]
    assert [r["outcome"] for r in shared["removals"]] == ["removed"] * 2


def test_stopped_on_an_object_store_it_gives_the_lease_back(
    s3, bucket, server, put, places, stopped_at
):
    put(places.local)
    s3("promote", "--all")
    stopped_at("gc.evict", 1, signal.SIGTERM)
    tier = f"s3://cli/cache?endpoint_url={server.url}"
    command = ["--local", str(places.local), "--tier", tier, "gc", "--tier", "s3://cli/cache"]
    result = CliRunner().invoke(app, [*command, "--older-than", "0s", "--min-age", "0s"])
    assert result.exit_code == 143, result.stderr
    names = [o["Key"] for o in bucket.list_objects_v2(Bucket="cli")["Contents"]]
    assert [name for name in names if "/lease/" in name] == []
    assert f"cache/index/{KEY}.json" in names


@pytest.mark.usefixtures("leftovers")
def test_terminated_the_process_ends_with_143(places):
    script = (
        "import os, signal, sys, time\n"
        "from neuron_store import steps\n"
        "from neuron_store.cli._main import main\n"
        "def hook(step):\n"
        "    if step == 'gc.free':\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.1)\n"
        "steps.set_hook(hook)\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "--local", places.local, "--tier", places.shared, "gc"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 143, ended.stderr
    assert "Traceback" not in ended.stderr
    assert list((places.shared / ".leases").iterdir()) == []


# -- doctor -------------------------------------------------------------------------------------


def test_doctor_measures_latency_and_throughput_and_leaves_nothing(cli, places):
    places.shared.mkdir()
    document = cli.json("doctor")
    for tier in document["tiers"]:
        assert tier["speed"]["size"] >= 1 << 20
        assert tier["speed"]["write_seconds"] > 0
        assert tier["speed"]["read_seconds"] > 0
        assert [f["name"] for f in tier["findings"]] == ["look-up", "write", "read"]
    rows = fields(cli("doctor"))
    (write,) = [row for row in rows if row[:2] == [str(places.shared), "write"]]
    assert re.search(r"MiB/s|GiB/s|KiB/s", write[4])
    assert [p for p in places.shared.rglob("*") if p.name != ".staging"] == []


def test_doctor_measures_an_object_store_and_leaves_nothing(s3, bucket):
    far = s3("doctor")["tiers"][1]
    assert far["speed"]["size"] >= 1 << 20
    assert "delete" in {c["name"] for c in far["checks"]}
    assert "Contents" not in bucket.list_objects_v2(Bucket="cli")


def test_doctor_says_what_a_failed_check_means_and_what_to_do(cli, places, monkeypatch):
    places.shared.mkdir()
    monkeypatch.setattr(
        _probe_renaming,
        "_flock_excludes",
        lambda _place: Check(
            "flock excludes", passed=False, detail="they do not", required=False, remedy="mount 4.1"
        ),
    )
    result = cli("doctor")
    assert f"warning: {places.shared}: flock excludes: they do not; mount 4.1" in result.stderr


def test_doctor_says_when_a_tier_is_slow(cli, places, monkeypatch):
    places.shared.mkdir()
    monkeypatch.setattr(_probe_renaming, "_speed", lambda _path: Speed(1 << 20, 2.0, 0.001))
    result = cli("doctor")
    assert f"slow: {places.shared}: write: 512.0 KiB/s" in result.stderr
    assert "an artifact of 512.0 MiB takes about 1024 s to promote" in result.stderr
    assert f"slow: {places.shared}: read" not in result.stderr


def test_a_slow_look_up_means_other_things_for_the_local_tier():
    report = TierReport("there", (), latency=0.5)
    (local,), (shared,) = (list(diagnose(report, local=local)) for local in (True, False))
    assert "VLLM_CACHE_ROOT" in local.remedy
    assert "costs 0.5 s" in shared.remedy
    assert next(diagnose(TierReport("there", (), latency=0.001), local=True)).remedy == ""


def test_the_json_is_one_document(command, places):
    result = command("--local", places.local, "gc", "--json")
    assert json.loads(result.stdout)["command"] == "gc"

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner

from neuron_store.cli import demo as command_module
from neuron_store.cli.app import app
from neuron_store.demo import scenario
from neuron_store.demo.processes import Child, DemoFailed, clean_environment, gather

NEEDS = ["iree.compiler", "botocore", "moto", "flask"]


@pytest.fixture
def extra():
    for module in NEEDS:
        pytest.importorskip(module)


# What a user may have set, and none of which may reach the demo.
USERS = {
    "NEURON_STORE_TIERS": "ftp://nowhere",
    "NEURON_STORE_CONFIG": "/no/such/file",
    "NEURON_LIBTORCH_REMOTE_CACHE": "/no/such/mount",
    "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1",
    "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
    "VLLM_CACHE_ROOT": "/no/such/root",
    "AWS_PROFILE": "no-such-profile",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
}


@pytest.mark.slow
@pytest.mark.usefixtures("extra")
def test_two_compiles_for_twelve_ranks_and_every_claim_holds(command, tmp_path):
    tree = tmp_path / "tree"
    result = command("demo", "--json", "--keep", tree, env=USERS)
    document = json.loads(result.stdout)
    assert result.returncode == 0, document
    assert document["ok"] is True
    assert all(claim["holds"] for claim in document["claims"])
    steps = {step["name"]: step for step in document["steps"]}
    assert sum(step["compiled"] or 0 for step in steps.values()) == 2
    asked = [s for s in steps.values() if s["compiled"] is not None]
    for step in asked:
        assert step["compiled"] + step["waited"] + step["hits"] + step["fetched"] == 8
    assert [s["fetched"] for s in asked] == [0, 2, 2]
    # What was counted is what lies on the disk.
    keys = {p.name for p in (tree / "shared").iterdir() if not p.name.startswith(".")}
    assert len(keys) == 2
    for node in "abc":
        cache = tree / f"node-{node}" / "neuron" / "compile_cache"
        assert {p.name for p in cache.iterdir() if not p.name.startswith(".")} == keys
        for key in keys:
            program = (cache / key / f"graph_{key}.vmfb").read_bytes()
            assert program == (tree / "shared" / key / f"graph_{key}.vmfb").read_bytes()
    log = (tree / "logs" / "s3.log").read_text()
    assert "PUT /neuron-store-demo/cache/index/" in log


@pytest.mark.slow
@pytest.mark.usefixtures("extra")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_takes_everything_with_it(tmp_path, number, status):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "neuron_store.cli", "demo"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "node A compiles" in line:
            break
    time.sleep(1.0)  # into the compiles; when exactly does not matter
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert stdout == ""
    assert "Traceback" not in stderr
    psutil.wait_procs(children, timeout=15)
    assert [child for child in children if child.is_running()] == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("extra")
def test_killed_it_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "neuron_store.cli", "demo", "--keep", str(tmp_path / "tree")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "node A compiles" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert len(gone) >= 5
    assert alive == []


def test_one_claim_that_does_not_hold_is_a_failed_demo(monkeypatch):
    def play(tree, tell):
        report = scenario.Report()
        report.claim("the sun shines", True)
        report.claim("it rains", False, "not a cloud")
        return report

    monkeypatch.setattr(scenario, "play", play)
    monkeypatch.setattr(command_module, "_check_extra", lambda: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "FAILED   it rains        not a cloud" in result.stdout
    assert "NOT as it should be" in result.stdout
    assert json.loads(CliRunner().invoke(app, ["demo", "--json"]).stdout)["ok"] is False


def test_a_report_without_claims_is_no_success():
    assert scenario.Report().ok is False


def test_a_missing_package_is_named_with_its_extra(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['moto'] = None")
    result = command("demo", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    assert "needs moto, which is not installed" in result.stderr
    assert "pip install 'neuron-store[demo]'" in result.stderr


@pytest.mark.usefixtures("extra")
def test_a_directory_to_keep_must_be_empty(command, tmp_path):
    (tmp_path / "precious").write_text("")
    result = command("demo", "--keep", tmp_path)
    assert result.returncode == 2
    assert "is not empty" in result.stderr
    assert os.listdir(tmp_path) != []


def test_tiers_of_the_command_line_are_not_for_the_demo(cli):
    assert "demo makes its own tiers" in cli("demo", status=2).stderr


def test_nothing_of_the_users_reaches_the_processes(monkeypatch, tmp_path):
    for name, value in USERS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEPT", "1")
    env = clean_environment(tmp_path)
    assert not {name for name in USERS if name in env}
    assert env["KEPT"] == "1"
    assert env["AWS_SHARED_CREDENTIALS_FILE"] == os.devnull


class TestChild:
    @pytest.fixture
    def child(self, tmp_path):
        """Starts a process that runs the given program."""

        def start(program: str) -> Child:
            (tmp_path / "program.py").write_text(program)
            env = {**os.environ, "PYTHONPATH": str(tmp_path)}
            return Child("the child", "program", env, tmp_path / "log")

        return start

    def test_its_death_is_told_with_the_last_lines_of_its_log(self, child):
        program = "import sys; sys.stderr.write('on fire\\n'); sys.exit(3)"
        with child(program) as started, pytest.raises(DemoFailed) as caught:
            gather([started], 30)
        assert str(caught.value) == "the child ended with status 3\non fire"

    def test_its_error_is_told(self, child):
        program = 'print(\'{"error": "no luck"}\', flush=True); input()'
        with child(program) as started, pytest.raises(DemoFailed, match="the child no luck"):
            gather([started], 30)

    def test_its_silence_is_told(self, child):
        with child("input()") as started, pytest.raises(DemoFailed, match="has not answered in"):
            gather([started], 0.2)

    def test_it_is_ended_even_when_it_does_not_want_to(self, child):
        program = (
            "import signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print('{\"ready\": 1}', flush=True)\n"
            "time.sleep(600)\n"
        )
        with child(program) as started:
            gather([started], 30)
            pid = started._process.pid
            started.stop(patience=0.0)
        assert not psutil.pid_exists(pid)

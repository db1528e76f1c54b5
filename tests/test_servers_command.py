"""`make servers`: the test servers for people who want to try by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_it_prints_what_to_paste_and_stops_all_on_an_interrupt(tmp_path):
    command = [sys.executable, "-m", "tests.servers", "moto", "gcs"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("# try:"):
                break
        script = "\n".join(
            [*lines[: lines.index("")], f"{sys.executable} -m neuron_store.cli doctor --json"]
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "NEURON_"))}
        env |= {"VLLM_CACHE_ROOT": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
        told = subprocess.run(
            ["sh", "-c", script], env=env, capture_output=True, text=True, timeout=200, check=False
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert told.returncode == 0, told.stderr
    assert '"location": "s3://neuron-store/cache"' in told.stdout
    (url,) = [u for line in lines if "s3://" in line for u in [line.split("endpoint_url=")[1]]]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url.strip("'"), timeout=5)


def test_a_server_that_does_not_exist_is_refused_with_those_that_do():
    command = [sys.executable, "-m", "tests.servers", "oracle"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "no server 'oracle'; there are: moto, seaweed, azurite, gcs" in ended.stderr

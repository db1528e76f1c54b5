"""What several benchmarks run against."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def slow_s3(tmp_path, monkeypatch):
    """An S3 server in a process of its own that answers each request 20 ms later."""
    pytest.importorskip("localbucket")
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    (tmp_path / "buckets" / "bench").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(__file__).with_name("slow_bucket.py")
    server = subprocess.Popen(
        [sys.executable, program, tmp_path / "buckets", str(port), "0.02"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"s3://bench/prefix?endpoint_url=http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()

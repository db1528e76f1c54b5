from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from neuron_store.artifact import Artifact, ArtifactFile
from neuron_store.cli.app import app
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore

if TYPE_CHECKING:
    from pathlib import Path

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No setting of whoever runs the tests, and a home of the test's own."""
    for name in list(os.environ):
        if name.startswith(("NEURON_", "VLLM_", "AWS_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture
def places(tmp_path):
    """The directories of a local and of a shared tier, and one that nothing may write to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("untouched")
    return SimpleNamespace(local=tmp_path / "local", shared=tmp_path / "shared", outside=outside)


@pytest.fixture
def put(tmp_path):
    """Publishes an artifact of one file in a local or shared directory."""

    def publish(root: Path, key: str = KEY, data: bytes = b"program", **facts):
        source = tmp_path / f"source-{len(list(tmp_path.iterdir()))}"
        source.mkdir()
        name = f"graph_{key}.vmfb"
        (source / name).write_bytes(data)
        facts = {"compiler": "iree", "compiler_version": "3.3", "executable": name, **facts}
        artifact = Artifact(key=key, files=(ArtifactFile(name, len(data)),), **facts)
        store = (LocalStore if root.name == "local" else PosixStore)(root)
        store.publish(artifact, source)
        return root / key

    return publish


@pytest.fixture
def cli(places):
    """Runs a command in this process, on the two tiers, and checks its exit status."""

    def run(*arguments: object, status: int = 0):
        options = ["--local", str(places.local), "--tier", str(places.shared)]
        result = CliRunner().invoke(app, [*options, *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == status, (result.stdout, result.stderr)
        return result

    def run_json(*arguments: object, status: int = 0):
        result = run(*arguments, "--json", status=status)
        document = json.loads(result.stdout)
        assert document["ok"] is (status == 0)
        assert document["schema"] == 1
        return document

    run.json = run_json
    return run


@pytest.fixture
def command():
    """Runs the real command in a process of its own."""

    def run(*arguments: object, env=None, **more):
        result = subprocess.run(
            [sys.executable, "-m", "neuron_store.cli", *map(str, arguments)],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **more,
        )
        assert "Traceback" not in result.stderr, result.stderr
        return result

    return run


@pytest.fixture(scope="package")
def server():
    """An S3 server."""
    from tests.servers.moto import MotoServer

    with MotoServer() as running:
        yield running

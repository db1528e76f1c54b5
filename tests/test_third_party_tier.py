"""The example of a third party's tier: its own distribution, in an environment of its own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "third_party_tier"


def imported(path: Path) -> list[str]:
    """Every module and name of ours that a file imports, dotted."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [n for n in names if n.split(".")[0] in {"neuron_store", "neuron_store_backends"}]


def test_it_uses_nothing_but_public_names():
    used = [name for path in EXAMPLE.rglob("*.py") for name in imported(path)]
    assert "neuron_store_backends.objects.AsyncObjects" in used
    assert [name for name in used if any(p.startswith("_") for p in name.split("."))] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_built_and_installed_on_its_own_it_keeps_the_contract_at_a_real_server(tmp_path):
    """The wheels of both, a fresh environment, the entry point, and an SFTP server."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    environment["PYTHONDONTWRITEBYTECODE"] = ""

    def run(*command, **options):
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            **options,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    for project in (ROOT, EXAMPLE):
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir")
        run(*build, tmp_path / "dist", project)
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "-q", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (ours,) = (tmp_path / "dist").glob("neuron_store-*.whl")
    (theirs,) = (tmp_path / "dist").glob("neuron_store_sftp-*.whl")
    run(*uv, "pip", "install", "-q", "--python", python, ours, f"{theirs}[test]")
    where = run(python, "-P", "-c", "import neuron_store_sftp as m; print(m.__file__)", cwd="/")
    assert str(tmp_path) in where, "it must not come from the checkout"
    command = (python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null")
    told = run(*command, "--import-mode=importlib", EXAMPLE / "tests", cwd=tmp_path)
    print(told[-400:])
    assert "passed" in told

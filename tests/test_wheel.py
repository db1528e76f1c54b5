"""What users get is the wheel: its names, its entry points, and that it works on its own."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An environment with the wheel and what it requires, no extra."""
    place = tmp_path_factory.mktemp("venv")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(place)], check=True)
    python = place / "bin" / "python"
    subprocess.run([*uv, "pip", "install", "-q", "--python", str(python), str(wheel)], check=True)
    return python


def run(python, *arguments, **env):
    return subprocess.run(
        [str(python), "-P", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": str(python.parent), **env},
    )


def test_the_top_level_names_are_the_two_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {
        "neuron_store",
        "neuron_store_backends",
    }
    assert {"neuron_store/py.typed", "neuron_store_backends/py.typed"} <= set(names)
    assert "neuron_store/_graphs/prefill.mlir" in names
    assert "neuron_store/manifest/manifest.schema.json" in names
    assert not [n for n in names if "test" in n.split("/")[-1] and n.endswith(".py")]
    checked = subprocess.run(
        [sys.executable, "-m", "check_wheel_contents", "--ignore", "W004,W009", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


def test_the_entry_points_are_these(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        parser = configparser.ConfigParser()
        parser.optionxform = str
        parser.read_string(archive.read(name).decode())
    groups = {section: set(parser[section]) for section in parser.sections()}
    assert groups["console_scripts"] == {"neuron-store"}
    assert groups["neuron_store.tiers"] >= {"local", "posix", "s3", "memory"}
    assert groups["neuron_store.compilers"] == {"iree", "neuronx-cc"}
    assert groups["torch_dynamo_backends"] == {"neuron_store"}


def test_without_extras_it_compiles_caches_and_says_what_is_missing(python):
    code = """
import sys
from pathlib import Path
from neuron_store import CompileCoordinator, CompileJob, MissingExtra, open_store
def compile_(workdir): (workdir / "out").write_bytes(b"x")
with open_store("memory://wheel") as store:
    path = CompileCoordinator(store).get_or_compile(CompileJob("k", compile_))
    assert (path / "out").read_bytes() == b"x"
    store.promote("k")
try:
    open_store("s3://bucket/prefix")
except MissingExtra as error:
    print(error)
for name in ("botocore", "adlfs", "gcsfs", "iree", "torch", "jax", "moto", "pytest"):
    assert name not in sys.modules, name
"""
    ended = run(python, "-c", code)
    assert ended.returncode == 0, ended.stderr
    assert "pip install 'neuron-store[s3]'" in ended.stdout


def test_the_command_works_without_extras(python):
    command = str(python.parent / "neuron-store")
    assert run(python, command, "--version").stdout.strip()
    ended = run(python, command, "config", "--json")
    assert ended.returncode == 0, ended.stderr
    ended = run(python, command, "demo")
    assert ended.returncode == 2
    assert "neuron-store[demo]" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_importing_it_brings_no_client_and_little_else(python):
    code = "import sys, neuron_store; print(*sys.modules)"
    loaded = set(run(python, "-c", code).stdout.split())
    heavy = {"asyncio", "cattrs", "click", "filelock", "fsspec", "rich", "botocore", "torch", "jax"}
    assert not loaded & heavy

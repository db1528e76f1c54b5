"""Each example runs as its first lines say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# What an example needs beside the development environment; without it the test skips aloud.
NEEDS = {"tensor_parallel.py": ("torch", "jax")}


def scripts():
    for path in sorted(EXAMPLES.glob("*.py")):
        marks = [pytest.mark.slow]
        if "torch" in NEEDS.get(path.name, ()):
            marks.append(pytest.mark.torch)
        yield pytest.param(path, marks=marks, id=path.name)


@pytest.mark.parametrize("script", list(scripts()))
def test_the_example_runs(script, tmp_path):
    for module in NEEDS.get(script.name, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{script.name} needs {module}, which is not installed")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert ended.stdout.strip()

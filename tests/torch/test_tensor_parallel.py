"""The example runs, and what it prints is so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")
pytest.importorskip("iree.compiler", reason="compiling needs the extra `iree`")

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_four_ranks_compile_one_graph_once_and_two_graphs_side_by_side():
    done = subprocess.run(
        [sys.executable, os.path.join("examples", "tensor_parallel.py")],
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    same, apart = done.stdout.split("Prefill on one half")
    assert same.count("compiled") == 1
    assert same.count("waited") == 3
    assert "4 ranks, 1 compile\n" in same
    assert apart.count("compiled") == 2
    assert "4 ranks, 2 compiles" in apart
    assert "side by side" in apart

"""The tier that docs/writing-a-tier.md shows passes the contract that it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_docs import BLOCK

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-tier.md"


def test_the_tier_that_is_shown_passes_the_contract(tmp_path):
    (code,) = (block for block in BLOCK.findall(PAGE.read_text()) if "class FolderStore" in block)
    (tmp_path / "test_shown.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "test_shown.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]

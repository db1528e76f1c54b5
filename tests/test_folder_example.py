"""The tier that docs/writing-a-tier.md shows keeps what the page says, and shows what it is for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neuron_store.testing import FETCH, FIND, OPERATIONS, inject_files, inject_steps
from tests.test_docs import BLOCK

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-tier.md"


def shown() -> str:
    (code,) = (block for block in BLOCK.findall(PAGE.read_text()) if "class FolderStore" in block)
    return code


def folder_store(code: str):
    names = {"__name__": "shown"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["FolderStore"]


def changed(old: str, new: str):
    code = shown()
    assert code.count(old) == 1, "the page has changed; change this test with it"
    return folder_store(code.replace(old, new))


def test_the_tier_that_is_shown_passes_the_contract(tmp_path):
    (tmp_path / "test_shown.py").write_text(shown())
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


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
def test_no_failing_call_makes_the_tier_that_is_shown_break_a_promise(operation, tmp_path):
    report = inject_files(operation, folder_store(shown()), tmp_path)
    assert report.failures == []
    assert report.points > 0


# A look-up has no step, and a fetch those of the tier's own look-up: none.
STEPPED = [operation for operation in OPERATIONS if operation not in {FIND, FETCH}]


@pytest.mark.parametrize("operation", STEPPED, ids=lambda o: o.name)
def test_no_failing_step_makes_the_tier_that_is_shown_break_a_promise(operation, tmp_path):
    report = inject_steps(operation, folder_store(shown()), tmp_path)
    assert report.failures == []
    assert report.points > 0


@pytest.mark.parametrize("operation", [FIND, FETCH], ids=lambda o: o.name)
def test_were_its_errors_misses_it_would_be_caught(operation, tmp_path):
    broken = changed(
        "            except (FileNotFoundError, NotADirectoryError):\n                return None",
        "            except OSError:\n                return None",
    )
    report = inject_files(operation, broken, tmp_path)
    assert report.failures
    assert all("taken for a miss" in failure for failure in report.failures)


def test_were_foreign_errors_let_out_it_would_be_caught(tmp_path):
    broken = changed(
        """            raise TierError(
                self.location, operation, str(error), key=key, code=error.errno
            ) from error
""",
        "            raise\n",
    )
    report = inject_files(FIND, broken, tmp_path)
    assert any("a foreign error escaped" in failure for failure in report.failures)

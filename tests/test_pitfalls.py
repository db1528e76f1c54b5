"""Each failure that others reported is held off by a test that names it; see docs/pitfalls.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = range(1, 46)
_NAMED = re.compile(
    r"(?<![a-z])pitfall(?:[ _](\d+)|s[ _](\d+(?:(?:, and |, | and |_and_|_)\d+)*))", re.IGNORECASE
)


def rows_in(text: str) -> set[int]:
    """The rows that `pitfall N`, `pitfalls N, M and O` or `test_pitfall_N` name."""
    return {
        int(row) for found in _NAMED.finditer(text) for row in re.findall(r"\d+", found.group())
    }


def named_rows() -> dict[int, set[str]]:
    """Row to the tests that name it: in their own name or docstring, or in that of their class."""
    found: dict[int, set[str]] = {}

    def add(node: ast.AST, where: str, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                add(child, f"{where}::{child.name}", f"{around} {ast.get_docstring(child) or ''}")
            elif isinstance(child, ast.FunctionDef) and child.name.startswith("test_"):
                told = f"{around} {child.name} {ast.get_docstring(child) or ''}"
                for row in rows_in(told):
                    found.setdefault(row, set()).add(f"{where}::{child.name}")

    # The contract is a suite too, which tests/ subclasses for each tier.
    for folder in (ROOT / "tests", ROOT / "neuron_store" / "testing"):
        for path in sorted(folder.rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            add(tree, str(path.relative_to(ROOT)), ast.get_docstring(tree) or "")
    return found


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Pitfall 9.", {9}),
        ("Pitfalls 5 and 27: x 3", {5, 27}),
        ("pitfalls 1, 2 and 3", {1, 2, 3}),
        ("test_pitfall_40_is_avoided", {40}),
        ("Pitfall 31, 5 files are left", {31}),
        ("a pitfall of 3", set()),
    ],
)
def test_the_ways_to_name_a_row(text, rows):
    assert rows_in(text) == rows


def test_every_row_has_a_test_that_names_it():
    named = named_rows()
    missing = [row for row in ROWS if row not in named]
    assert not missing, f"no test names these rows of docs/pitfalls.md: {missing}"
    assert set(named) <= set(ROWS)


def test_the_table_has_every_row_and_its_tests_exist():
    text = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text, re.MULTILINE)
    assert [int(row) for row, _ in rows] == list(ROWS)
    named = named_rows()
    for row, tests in rows:
        for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", tests):
            there = [where for where in named[int(row)] if where.endswith(f"::{name}")]
            assert any(where.startswith(file) for where in there), f"row {row}: {file}::{name}"

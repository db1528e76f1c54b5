"""A short replay of the fuzz targets: their corpus, then some hundred new inputs for each."""

from __future__ import annotations

import re

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.fuzz.guarding import SECRET, Broken, confined, listening
from tests.fuzz.mutating import Mutator, shrunk
from tests.fuzz.running import KEPT, LARGEST_KEPT, Runner, fuzz, in_home, run_one
from tests.fuzz.target import HERE, Target
from tests.fuzz.targets import TARGETS

BY_NAME = {target.name: target for target in TARGETS}


@pytest.fixture
def home():
    with in_home() as home:
        yield home


@pytest.mark.parametrize("name", BY_NAME)
def test_the_corpus_and_new_inputs_end_in_a_value_or_in_the_targets_own_errors(name, home):
    target = BY_NAME[name]
    inputs = target.inputs()
    mutants = st.integers(0, 2**32).map(lambda n: Mutator(n, target.tokens).mutant(inputs)[:4096])

    # Derandomised: CI finds the same each time; `python -m tests.fuzz` looks for more.
    @hypothesis.settings(
        max_examples=200,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.strategy | mutants | mutants)
    def examples(data):
        run_one(target, data, home, logged)

    with listening() as logged:
        for data in inputs:
            run_one(target, data, home, logged)
        examples()


def test_seeds_are_valid_input(home):
    """Else the mutants would be refused at the door."""
    with listening() as logged:
        for name in ("record", "manifest", "ledger", "hlo", "jobs", "byte_size", "duration"):
            for data in BY_NAME[name].seeds():
                assert run_one(BY_NAME[name], data, home, logged).startswith("value"), (name, data)


def test_every_target_has_a_corpus_and_a_row_in_the_docs_and_no_other_has_one():
    text = (HERE.parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .* \| [\d,]+ \|$", text, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"\w+", row)}
    assert told == set(BY_NAME)
    assert {folder.name for folder in (HERE / "corpus").iterdir()} == set(BY_NAME)


def test_the_corpus_is_small_and_of_known_targets():
    for folder in (HERE / "corpus").iterdir():
        files = list(folder.iterdir())
        assert folder.name in BY_NAME
        assert len(files) <= KEPT
        assert all(path.stat().st_size < LARGEST_KEPT for path in files)


# -- the fuzzer itself: one that finds nothing must be one that would have found something ---------


def _finds(call, tmp_path, **facts) -> str:
    target = Target("made_up", call, (ValueError,), lambda: [b"seed"], **facts)
    with in_home() as home, listening() as logged:
        runner = Runner(home, logged, 0)
        runner.turn(target, 0.3)
    (found,) = {f.what.splitlines()[0] for f in runner.found["made_up"].findings.values()}
    return found


def _raises(error):
    def call(*_):
        raise error

    return call


def test_another_exception_is_found(tmp_path):
    assert "KeyError" in _finds(_raises(KeyError("x")), tmp_path)


def test_a_write_outside_of_the_root_is_found_and_does_not_happen(tmp_path):
    victim = tmp_path / "victim"
    assert "opened for writing" in _finds(lambda *_: victim.write_bytes(b""), tmp_path)
    assert "mkdir" in _finds(lambda *_: victim.mkdir(), tmp_path)
    assert not victim.exists()


def test_a_secret_that_is_told_is_found(tmp_path):
    told = _raises(ValueError(f"cannot read {SECRET}"))
    assert "tells the secret" in _finds(told, tmp_path, secret=lambda _: True)


def test_an_error_as_long_as_its_input_is_found(tmp_path):
    assert "characters" in _finds(_raises(ValueError("x" * 20_000)), tmp_path)


def test_a_reader_that_does_not_end_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fuzz.guarding.CPU_SECONDS", 0.05)

    def endless():
        while True:
            pass

    with pytest.raises(Broken, match="of the processor"), confined(str(tmp_path)):
        endless()


def test_a_finding_is_made_smaller():
    assert shrunk(b"a" * 50 + b"needle" + b"b" * 50, lambda data: b"needle" in data) == b"needle"


def test_the_same_seed_gives_the_same_inputs():
    one, two = (
        [m.mutant([b'{"a": [1, {"b": null}]}']) for _ in range(50)]
        for m in (Mutator(7), Mutator(7))
    )
    assert one == two
    assert len(set(one)) > 40


def test_two_processes_work_through_all_targets_and_tell_what_they_did():
    targets = [BY_NAME[name] for name in ("duration", "byte_size", "lease_object")]
    found = fuzz(targets, 0.6)
    assert {name for name, each in found.items() if each.executions > 10} == {
        "duration",
        "byte_size",
        "lease_object",
    }
    assert not any(each.findings for each in found.values())

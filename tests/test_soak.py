"""The soak itself: that it runs, and that its judge convicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("moto")

from benchmarks.soak_findings import Judge, left_behind
from benchmarks.soak_journal import History, Journal
from benchmarks.soak_worker import Plan

ROOT = Path(__file__).parents[1]
# The first is compiled under a lease, the second not.
KEY, FREE = "a" * 32, "b" * 32


@pytest.mark.slow
def test_twenty_seconds_of_it_find_nothing(tmp_path):
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "20", "--seed", "7"]
    command += ["--workers", "8", "--keys", "16", "--grace", "3", "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "findings                    0" in done.stdout


class Told:
    """A journal that is told what happened, operation by operation."""

    def __init__(self, folder):
        for name in ("posix", "outside"):
            (folder / name).mkdir()
        self.plan = Plan(str(folder), 1, 0.0, "", (KEY, FREE), 4, 1.0)
        self.parent = Journal(self.plan.journal)
        self.journals = {}

    def op(self, *events, worker=0, life=0, node=0, key=KEY, name="get", end="ok"):
        journal = self.journals.setdefault(
            (worker, life), Journal(self.plan.journal, worker, life, node)
        )
        journal.say("begin", op=name, key=key)
        for event, facts in events:
            journal.say(event, **{"key": key, **facts})
        if end:
            journal.say("end", op=name, outcome=end)

    def findings(self):
        return list(Judge(self.plan, History(self.plan.journal)).findings())


COMPILE = ("compile", {})


@pytest.fixture
def told(tmp_path):
    return Told(tmp_path)


def test_a_second_compile_on_a_node_needs_a_reason(told):
    told.op(COMPILE, key=FREE)
    told.op(COMPILE, key=FREE, node=0, worker=4)
    (finding,) = told.findings()
    assert "compiled 2 times on node 0, explained: 1" in finding
    told.op(("remove", {"tier": "local"}), key=FREE, name="delete")
    assert told.findings() == []


def test_a_removal_on_another_node_is_none(told):
    told.op(COMPILE, key=FREE)
    told.op(COMPILE, key=FREE)
    told.op(("remove", {"tier": "local"}), key=FREE, worker=1, node=1, name="delete")
    assert len(told.findings()) == 1


def test_a_second_compile_in_the_fleet_needs_one_only_with_a_lease(told):
    for key in (KEY, FREE):
        told.op(COMPILE, key=key)
        told.op(COMPILE, key=key, worker=1, node=1)
    (finding,) = told.findings()
    assert KEY in finding
    assert "with a lease" in finding


def test_a_compile_of_a_killed_process_may_be_done_again(told):
    told.op(COMPILE, end=None)
    told.parent.say("kill", target=0, target_life=0)
    told.op(COMPILE, life=1)
    assert told.findings() == []


@pytest.mark.parametrize("event", ["wrong", "conflict", "unexpected", "stuck"])
def test_what_may_never_happen_is_a_finding(told, event):
    told.op((event, {}))
    (finding,) = told.findings()
    assert event in finding


def test_an_artifact_that_vanishes_must_have_been_removed(told):
    gone = ("vanished", {"began": 0.0, "private": False})
    told.op(gone)
    assert len(told.findings()) == 1
    told.op(("remove", {"tier": "local"}), gone, worker=4)
    # The first one's was over before anybody removed anything.
    assert len(told.findings()) == 1


class Tier:
    name = "posix"

    def __init__(self, *keys):
        self.keys = keys

    def find(self, key):
        return key if key in self.keys else None

    verify = find


def test_a_created_that_nobody_removed_must_be_there(told):
    told.op(("remove", {"tier": "posix"}), name="delete")
    history = History(told.plan.journal)
    told.op(("created", {"tier": "posix", "began": history.events[-1]["t"] + 1e-9}))
    judge = Judge(told.plan, History(told.plan.journal))
    assert len(list(judge.lost([Tier()]))) == 1
    assert list(judge.lost([Tier(KEY)])) == []
    told.op(("remove", {"tier": "posix"}), name="delete")
    assert list(Judge(told.plan, History(told.plan.journal)).lost([Tier()])) == []


def test_growth_after_the_warm_up_is_a_leak(told):
    for number in range(40):
        told.op(("vitals", {"fds": 10 + 2 * number, "rss": 1, "threads": 3}))
    (finding,) = told.findings()
    assert "leaks fds" in finding


def test_leftovers_and_strangers_are_found(told, tmp_path):
    assert list(left_behind(told.plan)) == []
    (tmp_path / "outside" / "tmpfile").touch()
    (tmp_path / "posix" / ".staging" / "left").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    assert len(list(left_behind(told.plan))) == 3

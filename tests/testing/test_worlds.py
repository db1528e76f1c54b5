"""Small worlds, exhaustively: what two or three processes can do to one key, in every order."""

from __future__ import annotations

import itertools
import shutil
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from neuron_store import Publication
from neuron_store.testing import Broken, World, every_interleaving
from neuron_store.testing.worlds import KEY, act, delete, fetch, publish
from neuron_store_backends import _aside
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore

# Steps at which processes meet. Between them each works in its own staging directory, or sends
# payload to names that hold the same bytes whoever writes them.
RENAME_STOPS = (
    "publish.look publish.rename publish.renamed fetch.look fetch.copy "
    "delete.hide aside.claimed aside.move delete.free"
).split()
CONDITIONAL_STOPS = (
    "conditional.look conditional.commit conditional.committed conditional.heal "
    "conditional.replace fetch.look fetch.copy conditional.hide conditional.free"
).split()


class Renaming:
    """A rename tier that is new for each world."""

    stops = RENAME_STOPS
    exact = True

    def __init__(self, tmp_path):
        self.root = tmp_path / "tier"
        self.workspace = tmp_path / "workspace"
        self.workspace.mkdir()

    def open(self):
        return PosixStore(self.root)

    def world(self, _number=0, *, stops=()):
        shutil.rmtree(self.root, ignore_errors=True)
        return World(self.open, self.workspace, stops=stops or self.stops)

    def damage(self):
        (self.root / KEY / "two").write_bytes(b"")


class Conditional:
    """A conditional tier that is new for each world."""

    stops = CONDITIONAL_STOPS
    exact = False

    def __init__(self, tmp_path):
        self.name = uuid.uuid4().hex
        self.root = f"/neuron_store.memory/{self.name}"
        self.workspace = tmp_path / "workspace"
        self.workspace.mkdir()

    def open(self):
        return MemoryStore(self.name)

    def world(self, _number=0, *, stops=()):
        files = MemoryFileSystem(skip_instance_cache=True)
        if files.exists(self.root):
            files.rm(self.root, recursive=True)
        return World(self.open, self.workspace, stops=stops or self.stops)

    def damage(self):
        files = MemoryFileSystem(skip_instance_cache=True)
        files.pipe_file(f"{self.root}/index/{KEY}.json", b"torn")


@pytest.fixture(params=[Renaming, Conditional], ids=["rename", "conditional"])
def tier(request, tmp_path, monkeypatch):
    # Crashed repairers' claims are waited out.
    monkeypatch.setattr(_aside, "CLAIM_SECONDS", 0.1)
    return request.param(tmp_path)


PAIRS = {
    "two publishers of different bytes": {"a": publish("one"), "b": publish("two")},
    "two publishers of the same bytes": {"a": publish("one"), "b": publish("one")},
    "a publisher and a deleter": {"a": publish("one"), "d": delete()},
    "a publisher and a reader": {"a": publish("one"), "r": fetch()},
}


@pytest.mark.parametrize("what", PAIRS)
def test_in_every_order_of_two_processes_each_is_told_the_truth(tier, what):
    count = every_interleaving(PAIRS[what], tier.world)
    print(f"{type(tier).__name__}, {what}: {count} interleavings")
    assert count >= 5


def existing(tier, *, damaged=False):
    def world(number):
        new = tier.world(number)
        new.start("first", publish("first"))
        new.finish("first")
        if damaged:
            tier.damage()
            new.content = new._look()
            assert new.content == "(damaged)"
        return new

    return world


@pytest.mark.parametrize(
    "other",
    [None, fetch(), publish("one")],
    ids=["two deleters", "deleter and reader", "deleter and publisher"],
)
def test_in_every_order_around_an_artifact_that_is_there_each_is_told_the_truth(tier, other):
    one = delete(exact=tier.exact)
    acts = {"d": one, "e": other or one}
    count = every_interleaving(acts, existing(tier))
    print(f"{type(tier).__name__}, {[a.name for a in acts.values()]}: {count} interleavings")
    assert count >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_every_order_of_two_repairers_one_artifact_stays(tier):
    acts = {"a": publish("one"), "b": publish("two")}
    count = every_interleaving(acts, existing(tier, damaged=True))
    print(f"{type(tier).__name__}, two repairers: {count} interleavings")
    assert count >= 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_every_order_of_two_publishers_and_a_reader_each_is_told_the_truth(tier):
    """Pitfalls 28 and 33 in the small: the whole of one, or nothing, whoever comes when."""
    acts = {"a": publish("one"), "b": publish("two"), "r": fetch()}

    def judge(world):
        told = [world.processes[name].outcome for name in "ab"]
        assert sorted(told, key=str) == [Publication.CONFLICT, Publication.CREATED], world.moves

    count = every_interleaving(acts, tier.world, judge=judge)
    print(f"{type(tier).__name__}, two publishers and a reader: {count} interleavings")
    assert count >= 1000


def test_every_single_step_is_a_stop_when_none_are_named(tier):
    world = World(tier.open, tier.workspace)
    with world:
        world.start("a", publish("one"))
        seen = []
        while world.advance("a"):
            seen.append(world.processes["a"].at)
    assert set(tier.stops) & set(seen)
    assert len(seen) > 5


@pytest.mark.parametrize("stop_after", range(1, 5))
def test_a_process_that_crashes_is_in_nobodys_way(tier, stop_after):
    with tier.world() as world:
        world.start("a", publish("one"))
        for _ in range(stop_after):
            if "a" in world.runnable:
                world.advance("a")
        if "a" in world.runnable:
            world.crash("a")
        world.start("b", publish("two"))
        assert world.finish("b") in {Publication.CREATED, Publication.CONFLICT}
        world.start("d", delete())
        assert world.finish("d") is True


class Replaces(PosixStore):
    def publish(self, artifact, source, *, consume=False):
        if self.find(artifact.key) is not None:
            self.delete(artifact.key)
        return super().publish(artifact, source, consume=consume)


def test_a_tier_where_the_last_writer_wins_is_caught(tmp_path):
    (tmp_path / "workspace").mkdir()
    numbers = itertools.count()

    def world(_number):
        root = tmp_path / str(next(numbers))
        return World(lambda: Replaces(root), tmp_path / "workspace", stops=RENAME_STOPS)

    with pytest.raises(Broken, match="took 'one' away"):
        every_interleaving({"a": publish("one"), "b": publish("two")}, world)


class Machine(RuleBasedStateMachine):
    """Up to three processes at once; hypothesis picks who does what, who moves, and who dies."""

    tier = None
    most = 3

    def __init__(self):
        super().__init__()
        self.world = self.tier.world(stops=self.tier.stops)
        self.numbers = itertools.count()

    def begin(self, what):
        if len(self.world.runnable) < self.most:
            self.world.start(f"p{next(self.numbers)}", what)

    @rule(content=st.sampled_from(["one", "two", "three"]))
    def publishes(self, content):
        self.begin(publish(content))

    @rule()
    def fetches(self):
        self.begin(fetch())

    @rule()
    def deletes(self):
        self.begin(delete(exact=self.tier.exact))

    # A `gc` is a rule of one line: self.begin(act("gc", lambda store: store.gc(...), takes=True))
    @rule()
    def lists(self):
        self.begin(act("keys", lambda store: list(store.keys())))

    @precondition(lambda self: self.world.choices)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def moves(self, data, steps):
        name = data.draw(st.sampled_from(list(self.world.choices)))
        for _ in range(steps):
            if name in self.world.choices:
                self.world.advance(name)

    @precondition(lambda self: self.world.runnable)
    @rule(data=st.data())
    def crashes(self, data):
        self.world.crash(data.draw(st.sampled_from(list(self.world.runnable))))

    @precondition(lambda self: not self.world.runnable and self.world.content != "(nothing)")
    @rule()
    def is_damaged(self):
        """The disk loses bytes while nobody is at work; whoever publishes next repairs it."""
        self.tier.damage()
        self.world.content = self.world._look()

    @invariant()
    def nothing_is_torn(self):
        assert self.world._look() == self.world.content

    def teardown(self):
        try:
            # Whoever crashed where, the key can still be published and deleted.
            for name in list(self.world.runnable):
                self.world.crash(name)
            self.world.start("last", publish("last"))
            self.world.finish("last")
            self.world.start("gone", delete())
            assert self.world.finish("gone") is True
        finally:
            self.world.__exit__()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whatever_three_processes_do_and_wherever_they_die_no_promise_is_broken(tier):
    machine = type("Machine", (Machine,), {"tier": tier})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            # Shrinking a schedule takes longer than reading it: the moves are in the message.
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )

"""Small worlds: a few processes and one key, whose steps are taken in any order that is asked for.

    world = World(lambda: MemoryStore("w"), tmp_path)
    world.start("a", publish("one"))
    world.start("b", publish("two"))
    world.advance("a")            # to its next step
    world.crash("a")              # it never runs again
    world.finish("b")

Each process is a thread that stops at every `neuron_store.steps.step`, and only one runs at a time,
so a run is decided by the order alone. After every move the tier is looked at by a client of its
own, and what changed is held against a model of one register:

* nothing but a running publish may put content there, its own, and only where none was;
* nothing but a running delete (or another operation that says so) may take it away;
* CREATED goes to the publisher whose move put the content there, and to nobody else; PRESENT,
  CONFLICT, True, False, what a fetch returns and a miss must each have been so at some moment
  between the operation's start and its end;
* nobody ever finds something torn.

`every_interleaving` runs all orders of a set of operations.
"""

from __future__ import annotations

import functools
import shutil
import threading
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store import steps
from neuron_store.abc import Publication
from neuron_store.errors import ArtifactCorrupt, ArtifactNotFound
from neuron_store.testing.samples import make_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from neuron_store.abc import ArtifactStore

__all__ = ["Act", "Broken", "World", "act", "delete", "every_interleaving", "fetch", "publish"]

KEY = "5ca1ab1e" * 4
MISSING, DAMAGED = "(nothing)", "(damaged)"
# A step that waits for another process: to take it again at once would change nothing.
WAITING = "wait"
_PATIENCE = 60.0


class Broken(AssertionError):
    """A promise was broken; the message holds the moves that led there."""


class _Abandoned(BaseException):
    """Ends the thread of a crashed process, when nobody looks any more."""


@attrs.frozen
class Act:
    """What a process does, and what it may change."""

    name: str
    run: Callable[[ArtifactStore, World], object]
    puts: str | None = None
    """The content that it may put there."""
    takes: bool = False
    """Whether it may take content away."""
    exact: bool = True
    """Of several deleters only the one whose move took it is told True. An object store's delete
    has no condition: there it only says that something was there."""


def publish(content: str) -> Act:
    """Publish an artifact made of `content`."""

    def run(store: ArtifactStore, world: World) -> object:
        return store.publish(*world.source(content))

    return Act(f"publish {content}", run, puts=content)


def delete(*, exact: bool = True) -> Act:
    """Delete the artifact; `exact` as in `Act`."""
    return Act("delete", lambda store, _world: store.delete(KEY), takes=True, exact=exact)


def fetch() -> Act:
    """Fetch the artifact, and tell its content."""

    def run(store: ArtifactStore, world: World) -> object:
        return world.fetched(store)

    return Act("fetch", run)


def act(name: str, run: Callable[[ArtifactStore], object], *, takes: bool = False) -> Act:
    """Any other operation (`gc`, a scrub); `takes`: it may take an artifact away."""
    return Act(name, lambda store, _world: run(store), takes=takes)


class _Process:
    """A thread that runs only when it is told to, up to its next step."""

    def __init__(self, world: World, name: str, what: Act) -> None:
        self.name, self.what = name, what
        self.at = "start"
        self.done = self.crashed = False
        self.outcome: object = None
        self.seen: set[str] = set()
        """What was there at some moment since it started."""
        self.put = self.took = False
        """Whether one of its moves put content there, or took some away."""
        self._world = world
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, name=f"world-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._go.acquire()
        try:
            if not self.crashed:
                with self._world.open() as store:
                    self.outcome = self.what.run(store, self._world)
        except _Abandoned:
            return
        except Exception as error:  # noqa: BLE001  (judged by the world)
            self.outcome = error
        finally:
            self.done = True
            self._stopped.release()

    def stop_at(self, step: str) -> None:
        """Called in the process's own thread."""
        self.at = step
        self._stopped.release()
        self._go.acquire()
        if self.crashed:
            raise _Abandoned

    def move(self) -> None:
        self._go.release()
        if not self._stopped.acquire(timeout=_PATIENCE):
            raise Broken(f"{self.name} got stuck after {self.at}")

    def abandon(self) -> None:
        self.crashed = True
        self._go.release()
        self._thread.join(_PATIENCE)

    def owns(self, thread: threading.Thread) -> bool:
        return thread is self._thread


class World:
    """See the module's docstring. A context manager.

    Args:
        open_: opens the tier; each process and the observer open their own.
        workspace: an empty directory for sources and fetches.
        stops: the steps at which processes stop; None: all of them.
    """

    def __init__(
        self,
        open_: Callable[[], ArtifactStore],
        workspace: Path,
        *,
        stops: Iterable[str] | None = None,
    ) -> None:
        self.open = open_
        self.moves: list[str] = []
        self.processes: dict[str, _Process] = {}
        self._workspace = workspace
        self._stops = None if stops is None else frozenset(stops)
        self._fetches = 0
        steps.set_hook(self._step)
        self.content = self._look()

    def __enter__(self) -> World:  # noqa: PYI034  (nobody subclasses it)
        return self

    def __exit__(self, *_: object) -> None:
        steps.set_hook(None)
        for process in self.processes.values():
            if not process.done:
                process.abandon()

    # -- moves ----------------------------------------------------------------------------------

    def start(self, name: str, what: Act) -> None:
        """A new process that stands before the first instruction of `what`."""
        self.moves.append(f"{name} starts {what.name}")
        process = self.processes[name] = _Process(self, name, what)
        process.seen.add(self.content)

    def advance(self, name: str) -> bool:
        """Let a process run to its next step; False when it ended."""
        process = self.processes[name]
        self.moves.append(f"{name} goes on from {process.at}")
        process.move()
        self._account(process)
        if process.done:
            self._settle(process)
        return not process.done

    def finish(self, name: str) -> object:
        """Let a process run to its end; what it returned or raised."""
        while name in self.runnable:
            self.advance(name)
        return self.processes[name].outcome

    def crash(self, name: str) -> None:
        """The process never runs again; what it did stays as it is."""
        self.moves.append(f"{name} crashes at {self.processes[name].at}")
        self.processes[name].crashed = True

    @property
    def runnable(self) -> Sequence[str]:
        """Processes that have not ended nor crashed, in the order of their start."""
        return [n for n, p in self.processes.items() if not p.done and not p.crashed]

    @property
    def choices(self) -> Sequence[str]:
        """The runnable ones, without those that only wait for another."""
        free = [n for n in self.runnable if WAITING not in self.processes[n].at]
        return free or self.runnable

    # -- content --------------------------------------------------------------------------------

    def source(self, content: str) -> tuple[Any, Path]:
        """An artifact of `content` and the directory with its files."""
        return _source(self._workspace, content)

    def fetched(self, store: ArtifactStore) -> str:
        """The content that a fetch brings; both files must tell the same."""
        self._fetches += 1
        into = self._workspace / f"into{self._fetches}"
        into.mkdir()
        try:
            store.fetch(KEY, into)
            one, two = (into / "one").read_text(), (into / "two").read_text()
        except ArtifactNotFound:
            return MISSING
        finally:
            shutil.rmtree(into)
        if two != one * _LENGTH:
            self._broken(f"torn: {one!r} with {two[:40]!r}")
        return one

    def _look(self) -> str:
        hook, steps_off = self._step, steps.set_hook
        steps_off(None)
        try:
            with self.open() as store:
                found = store.find(KEY)
                listed = KEY in set(store.keys())
                if (found is not None) != listed:
                    self._broken(f"found: {found is not None}, listed: {listed}")
                return MISSING if found is None else self.fetched(store)
        except ArtifactCorrupt:
            return DAMAGED
        finally:
            steps_off(hook)

    # -- the model ------------------------------------------------------------------------------

    def _step(self, name: str) -> None:
        thread = threading.current_thread()
        if self._stops is not None and name not in self._stops and WAITING not in name:
            return
        # Found first: while it is stopped, others are started.
        mine = [process for process in self.processes.values() if process.owns(thread)]
        if mine:
            mine[0].stop_at(name)

    def _account(self, mover: _Process) -> None:
        before, now = self.content, self._look()
        self.content = now
        for process in self.processes.values():
            if not process.done or process is mover:
                process.seen.add(now)
        if now == before:
            return
        if now == DAMAGED:
            self._broken("something damaged became visible")
        if now == MISSING:
            # Whoever finds damage may take it away.
            if before != DAMAGED and not mover.what.takes:
                self._broken(f"{mover.name} took {before!r} away")
            mover.took = mover.took or before != DAMAGED
            return
        if before not in {MISSING, DAMAGED} or now != mover.what.puts or mover.put:
            self._broken(f"{mover.name} turned {before!r} into {now!r}")
        mover.put = True

    def _settle(self, process: _Process) -> None:
        """What an operation said must be so."""
        said, seen, mine = process.outcome, process.seen, process.what.puts
        others = seen - {mine, MISSING, DAMAGED}
        wrong = ""
        if isinstance(said, Exception):
            wrong = f"raised {said!r}"
        elif isinstance(said, Publication):
            fine = {
                Publication.CREATED: process.put,
                Publication.REPAIRED: process.put or DAMAGED in seen or MISSING in seen,
                Publication.PRESENT: not process.put and mine in seen,
                Publication.CONFLICT: not process.put and bool(others),
            }
            wrong = "" if fine[said] else f"was told {said.name}, having seen {sorted(seen)}"
        elif process.what.takes and isinstance(said, bool):
            there = process.took or (not process.what.exact and seen != {MISSING})
            there = there or DAMAGED in seen
            so = there if said else MISSING in seen or DAMAGED in seen
            wrong = "" if so else f"was told {said}, having seen {sorted(seen)}"
        elif process.what.name == "fetch" and said not in seen:
            wrong = f"fetched {said!r}, having seen {sorted(seen)}"
        if wrong:
            self._broken(f"{process.name} ({process.what.name}) {wrong}")

    def _broken(self, what: str) -> None:
        raise Broken("\n  ".join([what, *self.moves]))


_LENGTH = 1999  # the second file does not travel in an object store's record


@functools.cache
def _source(workspace: Path, content: str) -> tuple[Any, Path]:
    files = {"one": content.encode(), "two": content.encode() * _LENGTH}
    return make_source(workspace / f"source-{content}", KEY, files)


def every_interleaving(
    acts: Mapping[str, Act],
    new_world: Callable[[int], World],
    *,
    judge: Callable[[World], None] = lambda _world: None,
    limit: int = 1_000_000,
) -> int:
    """Run every order in which the processes can take their steps; how many there were.

    The orders are found by running: after each run the last move that had an alternative not yet
    tried is changed, and all before it repeated. Complete, for what stops at steps.

    Args:
        acts: the operations, by process.
        new_world: a world with a tier of its own, given the number of the run.
        judge: looks at the world when all have ended.
        limit: more runs than this are an error, not a silent cut.
    """
    schedule: list[str] = []
    for number in range(1, limit + 1):
        options: list[Sequence[str]] = []
        taken: list[str] = []
        with new_world(number) as world:
            for name, what in acts.items():
                world.start(name, what)
            while world.runnable:
                choices = world.choices
                place = len(taken)
                name = schedule[place] if place < len(schedule) else choices[0]
                if name not in choices:
                    raise Broken(f"the same moves led elsewhere: {taken}; is the tier a new one?")
                options.append(choices)
                taken.append(name)
                world.advance(name)
            judge(world)
        while taken and taken[-1] == options[-1][-1]:
            taken.pop()
            options.pop()
        if not taken:
            return number
        last = options[-1]
        schedule = [*taken[:-1], last[list(last).index(taken[-1]) + 1]]
    raise Broken(f"more than {limit} interleavings")

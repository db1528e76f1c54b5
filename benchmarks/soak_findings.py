"""What a soak may not have done, judged by its journal and by what it left behind."""

from __future__ import annotations

import collections
import hashlib
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.soak_worker import Plan, digests_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.soak_journal import History, Operation

# A request that its client sent before it was killed may still be on its way.
_ON_THE_WAY = 10.0
WARM_UP = 0.35
MORE_FDS, MORE_RSS, MORE_THREADS = 24, 64 << 20, 24
_WORDS_OF_LOSS = ("lease", "not promoted", "promote given up", "no answer within")


class Judge:
    def __init__(self, plan: Plan, history: History) -> None:
        self.plan = plan
        self.history = history
        self._removals = self._find_removals()

    def findings(self) -> Iterator[str]:
        yield from self._plain()
        yield from self._compiles_on_nodes()
        yield from self._compiles_in_the_fleet()
        yield from self._leaks()

    def _plain(self) -> Iterator[str]:
        for event in self.history.of("wrong", "conflict", "unexpected", "stuck"):
            what = {k: v for k, v in event.items() if k not in {"t", "event"}}
            yield f"{event['event']}: {what}"
        for event in self.history.of("vanished"):
            place = self._where("local", event["node"])
            if event["private"] or not self.removed(
                place, event["key"], event["began"], event["t"]
            ):
                yield f"given, then gone, and nobody removed it: {event}"
        damaged = {(e["tier"], e["key"]) for e in self.history.of("damage")}
        for event in self.history.of("corrupt"):
            # S3 is read through a proxy that corrupts some answers.
            if event["tier"] != "s3" and (event["tier"], event["key"]) not in damaged:
                yield f"corrupt, and nobody damaged it: {event}"

    # -- removals -------------------------------------------------------------------------------

    @staticmethod
    def _where(tier: str, node: int) -> str:
        return f"node{node}" if tier == "local" else tier

    def _find_removals(self) -> dict[tuple[str, str], list[tuple[float, float]]]:
        """(place, key) to when each removal began and was over."""
        ops = collections.defaultdict(list)
        for op in self.history.operations:
            ops[op.worker, op.life].append(op)
        found = collections.defaultdict(list)
        nothing = {
            (
                e["worker"],
                e["life"],
                e["tier"],
                e["key"],
                _at(ops[e["worker"], e["life"]], e["t"]).begin,
            )
            for e in self.history.of("kept")
        }
        for event in self.history.of("remove"):
            place = self._where(event["tier"], event["node"])
            who = event["worker"], event["life"]
            op = _at(ops[who], event["t"])
            if (*who, event["tier"], event["key"], op.begin) in nothing:
                continue
            found[place, event["key"]].append((event["t"], self._over(op)))
        for op in self.history.operations:
            if op.name == "scrub" and op.outcome == "killed":
                for place in ("posix", "s3", f"node{op.node}"):
                    found[place, op.key or ""].append((op.begin, self._over(op)))
        return found

    def _over(self, op: Operation) -> float:
        if op.end != float("inf"):
            return op.end
        for event in self.history.of("kill"):
            if (event["target"], event["target_life"]) == (op.worker, op.life):
                return float(event["t"]) + _ON_THE_WAY
        return op.end

    def removed(self, place: str, key: str, begin: float, end: float = float("inf")) -> bool:
        """Whether a removal was at work between the two moments."""
        return any(t <= end and over >= begin for t, over in self._removals[place, key])

    # -- compiles -------------------------------------------------------------------------------

    def _compiles_on_nodes(self) -> Iterator[str]:
        """C <= 1 + removals from the node's tier + compiles that failed + processes killed or
        stopped at the key there: a node that has an artifact does not compile it.
        """
        compiled = self.history.count("compile", "node", "key")
        failed = self.history.count("failed", "node", "key")
        disturbed = collections.Counter((op.node, op.key) for op in self.history.disturbed())
        for (node, key), count in compiled.items():
            removed = len(self._removals[f"node{node}", key])
            allowed = 1 + removed + failed[node, key] + disturbed[node, key]
            if count > allowed:
                yield f"{key} was compiled {count} times on node {node}, explained: {allowed}"

    def _compiles_in_the_fleet(self) -> Iterator[str]:
        """For keys with leases, over all nodes: C <= 1 + removals from the first shared tier +
        compiles that failed + processes killed or stopped at the key + leases or tiers that the
        library itself said it had lost.
        """
        compiled = self.history.count("compile", "key")
        failed = self.history.count("failed", "key")
        disturbed = collections.Counter(op.key for op in self.history.disturbed())
        lost = collections.Counter(
            e["key"]
            for e in self.history.of("warning")
            if any(word in e["text"] for word in _WORDS_OF_LOSS)
        )
        lost.update(e["key"] for e in self.history.of("unpromoted") if e["tier"] == "posix")
        for (key,), count in compiled.items():
            removed = len(self._removals["posix", key])
            allowed = 1 + removed + failed[key,] + disturbed[key] + lost[key]
            if self.plan.leased(key) and count > allowed:
                yield f"{key}, with a lease, was compiled {count} times, explained: {allowed}"

    def lost(self, tiers: Any) -> Iterator[str]:
        """CREATED that nobody removed since, and that is not there."""
        created: dict[tuple[str, str], float] = {}
        for event in self.history.of("created"):
            created[event["tier"], event["key"]] = event["began"]
        for tier in tiers:
            for (name, key), began in created.items():
                if name == tier.name and not self.removed(name, key, began):
                    artifact = tier.verify(key) if tier.find(key) is not None else None
                    if artifact is None:
                        yield f"{key} was created in {name}, removed by nobody, and is lost"

    # -- leaks ----------------------------------------------------------------------------------

    def _leaks(self) -> Iterator[str]:
        for who, (warm, end) in self.vitals().items():
            for what, more in (("fds", MORE_FDS), ("rss", MORE_RSS), ("threads", MORE_THREADS)):
                if end[what] > warm[what] + more:
                    grew = f"{warm[what]:.0f} after the warm-up, {end[what]:.0f} at the end"
                    yield f"worker {who} leaks {what}: {grew}"

    def vitals(self) -> dict[int, tuple[dict[str, float], dict[str, float]]]:
        """Of each process that lived all the time: medians after the warm-up, and at the end."""
        samples = collections.defaultdict(list)
        for event in self.history.of("vitals"):
            if event["life"] == 0:
                samples[event["worker"]].append(event)
        killed = {event["target"] for event in self.history.of("kill")}
        return {
            who: (_medians(each, WARM_UP, WARM_UP + 0.15), _medians(each, 0.85, 1.0))
            for who, each in samples.items()
            if who not in killed and len(each) >= 6
        }


def _at(operations: list[Operation], moment: float) -> Operation:
    return next(op for op in operations if op.begin <= moment <= op.end)


def _medians(samples: list[Any], begin: float, end: float) -> dict[str, float]:
    first, last = int(len(samples) * begin), int(len(samples) * end)
    part = samples[first : max(last, first + 1)]
    return {what: statistics.median(s[what] for s in part) for what in ("fds", "rss", "threads")}


def left_behind(plan: Plan) -> Iterator[str]:
    """On the disk, after the last sweep."""
    known = {"journal", "outside", "posix", "server", "stacks", "work"}
    for path in Path(plan.folder).iterdir():
        if path.name not in known and path.name not in {f"node{n}" for n in range(plan.nodes)}:
            yield f"outside the roots: {path}"
    for path in Path(plan.folder, "outside").rglob("*"):
        yield f"outside the roots: {path}"
    for root in [Path(plan.folder, "posix"), *Path(plan.folder).glob("node*")]:
        for folder in (".staging", ".quarantine", ".failed"):
            for path in Path(root, folder).glob("*"):
                yield f"left behind: {path}"
        for path in root.iterdir():
            if not path.name.startswith(".") and path.name not in plan.keys:
                yield f"a strange entry: {path}"


def right(plan: Plan, key: str, path: Path) -> bool:
    """Whether the directory holds what the compiler makes of the key."""
    wanted = digests_of(plan.seed, key)
    return all(hashlib.sha256((path / n).read_bytes()).hexdigest() == d for n, d in wanted.items())

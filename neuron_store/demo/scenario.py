"""Node A compiles and promotes; node B fetches from S3 and runs; S3 dies; node C fetches from disk.

Everything is counted, and every claim is checked by what was counted.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs

from neuron_store.demo.processes import Child, clean_environment, gather
from neuron_store.demo.s3_server import BUCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["GRAPHS", "RANKS", "STEPS", "Claim", "Report", "Step", "play"]

GRAPHS = ("prefill", "decode")
RANKS = 4
STEPS = 9
"""How often `play` tells what it does."""
_PATIENCE = 180.0
_PROMOTED = frozenset({"created"})


@attrs.frozen
class Step:
    """A line of the table. None where a column says nothing about the step."""

    name: str
    compiled: int | None = None
    waited: int | None = None
    hits: int | None = None
    fetched: int | None = None
    bytes: int | None = None
    """Promoted or fetched."""
    seconds: float = 0.0
    """Of the slowest rank, from the start signal on."""
    detail: str = ""


@attrs.frozen
class Claim:
    """Something that the demo shows, and whether it was so."""

    text: str
    holds: bool
    detail: str = ""


@attrs.define
class Report:
    """What happened. `claims` all hold, or the demo has failed."""

    steps: list[Step] = attrs.field(factory=list)
    claims: list[Claim] = attrs.field(factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything was as it should be."""
        return bool(self.claims) and all(claim.holds for claim in self.claims)

    def claim(self, text: str, holds: bool, detail: str = "") -> None:
        """Note one."""
        self.claims.append(Claim(text, holds, detail))


def play(tree: Path, tell: Callable[[str], None]) -> Report:
    """Run the scenario in the empty directory `tree`.

    Args:
        tree: gets a directory for each node's local tier, the shared directory, and logs.
        tell: called with each step when it begins.

    Raises:
        DemoFailed: a process died, or did not answer.
    """
    began = time.monotonic()
    report = Report()
    (tree / "logs").mkdir()
    env = clean_environment(tree)
    with contextlib.ExitStack() as stack:
        tell("starting an S3 server")
        server = stack.enter_context(
            Child("the S3 server", "neuron_store.demo.s3_server", env, tree / "logs" / "s3.log")
        )
        port = int(gather([server], _PATIENCE)[0]["ready"])
        env["NEURON_STORE_TIERS"] = (
            f"s3://{BUCKET}/cache?endpoint_url=http://127.0.0.1:{port}&name=s3 "
            f"posix://{quote(str(tree / 'shared'))}?name=posix"
        )
        tell(f"starting node A: {RANKS} ranks")
        with _node(tree, env, "a") as ranks:
            tell("node A compiles")
            keys = _compile(report, ranks)
            tell("node A promotes to S3 and to a shared directory")
            _promote(report, ranks[0])
        tell(f"starting node B: {RANKS} ranks, an empty local tier")
        with _node(tree, env, "b") as ranks:
            tell("node B fetches and runs")
            _fetch(report, "B", ranks, keys, source="s3")
        tell("stopping the S3 server")
        server.stop()
        report.claim("the S3 server is gone", not _listens(port), f"127.0.0.1:{port}")
        tell(f"starting node C: {RANKS} ranks, an empty local tier")
        with _node(tree, env, "c") as ranks:
            tell("node C fetches without S3, and runs")
            _fetch(report, "C", ranks, keys, source="posix")
    report.seconds = time.monotonic() - began
    return report


@contextlib.contextmanager
def _node(tree: Path, env: Mapping[str, str], letter: str) -> Iterator[Sequence[Child]]:
    """A node's ranks, ready. What makes it a node is that its local tier is nobody else's."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Child(
                    f"rank {number} of node {letter.upper()}",
                    "neuron_store.demo.rank",
                    {
                        **env,
                        "VLLM_CACHE_ROOT": str(tree / f"node-{letter}"),
                        "RANK": str(number),
                        "LOCAL_RANK": str(number),
                        "WORLD_SIZE": str(RANKS),
                    },
                    tree / "logs" / f"node-{letter}-rank-{number}.log",
                )
            )
            for number in range(RANKS)
        ]
        gather(ranks, _PATIENCE)
        yield ranks


def _get(ranks: Sequence[Child]) -> list[dict[str, Any]]:
    """All ranks at once, every second one in the other order: then both graphs compile at once."""
    for number, rank in enumerate(ranks):
        rank.send({"do": "get", "graphs": GRAPHS[:: -1 if number % 2 else 1]})
    return gather(ranks, _PATIENCE)


def _ask(ranks: Sequence[Child], request: Mapping[str, Any]) -> list[dict[str, Any]]:
    for rank in ranks:
        rank.send(request)
    return gather(ranks, _PATIENCE)


def _total(answers: Sequence[Mapping[str, Any]], count: str) -> int:
    return sum(answer["counts"].get(count, 0) for answer in answers)


def _of_tier(answers: Sequence[Mapping[str, Any]], tier: str, count: str) -> int:
    return sum(answer["tiers"][tier][count] for answer in answers)


def _counted(name: str, answers: Sequence[Mapping[str, Any]], **more: Any) -> Step:
    return Step(
        name,
        compiled=_total(answers, "compiled"),
        waited=_total(answers, "waited"),
        hits=_total(answers, "hits"),
        fetched=_total(answers, "fetched"),
        seconds=max(answer["seconds"] for answer in answers),
        **more,
    )


def _compile(report: Report, ranks: Sequence[Child]) -> Mapping[str, str]:
    answers = _get(ranks)
    step = _counted(f"node A: {RANKS} ranks, {len(GRAPHS)} graphs", answers)
    report.steps.append(step)
    keys: Mapping[str, str] = answers[0]["keys"]
    report.claim(
        f"node A compiled each of {len(GRAPHS)} graphs once",
        step.compiled == len(GRAPHS) and _total(answers, "failed") == 0,
        f"{step.compiled} compiles by {RANKS} ranks",
    )
    reused = (step.waited or 0) + (step.hits or 0)
    report.claim(
        "the other ranks waited and reused them",
        reused == len(GRAPHS) * (RANKS - 1) and all(a["keys"] == keys for a in answers),
        f"{step.waited} waited, {step.hits} found them there",
    )
    return keys


def _promote(report: Report, rank: Child) -> None:
    for tier in ("s3", "posix"):
        answer = _ask([rank], {"do": "promote", "graphs": GRAPHS, "to": tier})[0]
        report.steps.append(
            Step(f"node A promotes to {tier}", bytes=answer["bytes"], seconds=answer["seconds"])
        )
        report.claim(
            f"node A promoted both to {tier}",
            len(answer["answers"]) == len(GRAPHS) and _PROMOTED.issuperset(answer["answers"]),
            ", ".join(answer["answers"]),
        )


def _fetch(
    report: Report, node: str, ranks: Sequence[Child], keys: Mapping[str, str], *, source: str
) -> None:
    answers = _get(ranks)
    size = _of_tier(answers, source, "bytes")
    step = _counted(f"node {node}: {RANKS} ranks, empty", answers, bytes=size)
    report.steps.append(attrs.evolve(step, detail=f"from {source}"))
    report.claim(
        f"node {node} compiled nothing",
        step.compiled == 0
        and _total(answers, "failed") == 0
        and all(a["keys"] == keys for a in answers),
        f"{step.compiled} compiles",
    )
    found = {tier: _of_tier(answers, tier, "hits") for tier in ("s3", "posix")}
    report.claim(
        f"node {node} fetched both from {source}, once for all its ranks",
        step.fetched == len(GRAPHS) and found == {"s3": 0, "posix": 0, source: len(GRAPHS)},
        f"{found['s3']} from s3, {found['posix']} from posix",
    )
    ran = _ask(ranks, {"do": "run", "graphs": GRAPHS})
    differences = [answer["difference"] for answer in ran]
    worst = "other shapes, or not a number"
    if None not in differences:
        worst = f"at most {max(differences):.1e} from the reference"
    report.steps.append(
        Step(
            f"node {node} runs them",
            seconds=max(answer["seconds"] for answer in ran),
            detail=worst,
        )
    )
    report.claim(
        f"node {node} ran both, and the results are the reference's",
        all(answer["agrees"] for answer in ran),
        worst,
    )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex(("127.0.0.1", port)) == 0

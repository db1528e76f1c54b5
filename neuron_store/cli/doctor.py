"""`neuron-store doctor`: measures every tier, and says whether it may be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import click

from neuron_store.cli.exits import NO, exit_status
from neuron_store.cli.output import Column
from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from neuron_store.abc import TierReport
    from neuron_store.cli.session import Session
    from neuron_store.diagnosis import Finding
    from neuron_store.tier_url import TierURL

__all__ = ["doctor"]

_COLUMNS = (
    Column("tier"),
    Column("check"),
    Column("outcome", "outcome"),
    Column("latency", "seconds"),
    Column("detail"),
)


@attrs.frozen
class _Examined:
    location: str
    report: TierReport | None
    refused: str | None
    status: int = NO
    """The exit status where it is refused."""
    findings: tuple[Finding, ...] = ()
    """How fast it is, and what to do where that is slow."""


@click.command()
@json_option
@pass_session
@click.pass_context
def doctor(context: click.Context, session: Session) -> None:
    """Measure every tier: whether it is there, writable, keeps its promises, and how fast it is.

    Writes inside each tier's own prefix only, and leaves nothing behind. Exit status 1 when a tier
    must not be used, 2 when its URL or an extra that it needs is at fault.
    """
    found = list(_examine(session))
    good = all(each.refused is None for each in found)
    out = session.out
    if out.json:
        out.document(ok=good, tiers=[_plain(each) for each in found])
    else:
        for each in found:
            rows: list[tuple[object, ...]] = []
            latency = each.report.latency if each.report is not None else None
            verdict = "fit" if each.refused is None else "refused"
            rows.append((each.location, "in all", verdict, latency, each.refused))
            for check in each.report.checks if each.report is not None else ():
                outcome = "ok" if check.passed else "failed" if check.required else "warning"
                rows.append((each.location, check.name, outcome, None, check.detail))
            for finding in each.findings:
                outcome = "slow" if finding.remedy else "ok"
                detail = (each.location, finding.name, outcome, finding.seconds, finding.detail)
                rows.append(detail)
            if out.terminal:
                # A location in each row would leave no room for what was found there, and where
                # there is a latency, the look-up's row tells it.
                shown = [(check, outcome, detail) for _, check, outcome, _, detail in rows]
                out.table([_COLUMNS[i] for i in (1, 2, 4)], shown, title=each.location)
            else:
                out.table(_COLUMNS, rows)
    for each in found:
        _advise(session, each)
    if not good:
        context.exit(max(each.status for each in found if each.refused is not None))


def _advise(session: Session, each: _Examined) -> None:
    """In words: what is wrong, what that means, and what to do."""
    out = session.out
    for check in each.report.checks if each.report is not None else ():
        if not check.passed and check.remedy:
            word = "failed" if check.required else "warning"
            out.say(f"{word}: {each.location}: {check.name}: {check.detail}; {check.remedy}")
    for finding in each.findings:
        if finding.remedy:
            out.say(f"slow: {each.location}: {finding.name}: {finding.detail}; {finding.remedy}")
    if each.refused is not None:
        out.say(f"error: {each.location} must not be used: {each.refused}")


def _examine(session: Session) -> Iterator[_Examined]:
    from neuron_store.tier_url import TierURL  # noqa: PLC0415  (`--help` needs none)

    urls = [TierURL("local", str(session.local_root())), *session.tier_urls()]
    seconds = session.settings().tier_deadline
    with session.out.progress("probing", len(urls)) as bar:
        for url in urls:
            bar.begin(url.location)
            yield _examine_one(url, seconds)


def _examine_one(url: TierURL, seconds: float) -> _Examined:
    from neuron_store.asking import Trouble, ask  # noqa: PLC0415  (`--help` needs none)
    from neuron_store.diagnosis import diagnose  # noqa: PLC0415
    from neuron_store.errors import ConfigError  # noqa: PLC0415
    from neuron_store.mounted import require_mounted  # noqa: PLC0415
    from neuron_store.registry import open_tier  # noqa: PLC0415

    try:
        tier = open_tier(url)
    except ConfigError as error:
        # The other tiers' state is still worth knowing.
        return _Examined(url.location, None, str(error), exit_status(error))

    def probe() -> TierReport:
        if url.scheme != "local":
            # Measuring would make it: on this node's own disk, where a mount is missing.
            require_mounted(tier.location)
        return tier.probe()

    with tier:
        report = ask(tier.location, probe, seconds=seconds)
    if isinstance(report, Trouble):
        return _Examined(url.location, None, report.detail)
    findings = tuple(diagnose(report, local=url.scheme == "local"))
    return _Examined(url.location, report, report.refused, findings=findings)


def _plain(each: _Examined) -> dict[str, object]:
    report = each.report
    speed = report.speed if report is not None else None
    return {
        "location": each.location,
        "fit": each.refused is None,
        "refused": each.refused,
        "latency_seconds": report.latency if report is not None else None,
        "speed": None if speed is None else attrs.asdict(speed),
        "findings": [attrs.asdict(finding) for finding in each.findings],
        "checks": [attrs.asdict(check) for check in report.checks] if report is not None else [],
    }

"""What a tier's measured speed means for whoever runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from neuron_store.byte_sizes import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from neuron_store.abc import TierReport

__all__ = ["Finding", "diagnose"]

_ARTIFACT = 512 << 20


@attrs.frozen
class _Bounds:
    """Beyond these somebody should know."""

    latency: float
    """Seconds for a look-up."""
    rate: float
    """Bytes a second, one file at a time."""


_LOCAL = _Bounds(0.005, 50 << 20)
_SHARED = _Bounds(0.3, 20 << 20)


@attrs.frozen
class Finding:
    """One measured figure, in words."""

    name: str
    """`look-up`, `write` or `read`."""
    seconds: float
    detail: str
    """The figure."""
    remedy: str = ""
    """What it means and what to do, where it is slow; else empty."""


def diagnose(report: TierReport, *, local: bool) -> Iterator[Finding]:
    """The measured figures of a tier, with what to do about those that are out of bounds.

    Args:
        report: of the tier's probe.
        local: it is the node's own tier, on which every hit waits.
    """
    bounds = _LOCAL if local else _SHARED
    if report.latency is not None:
        slow = report.latency > bounds.latency
        yield Finding(
            "look-up",
            report.latency,
            f"{report.latency * 1000:.2g} ms, the median of a few",
            (_local_latency() if local else _shared_latency(report.latency)) if slow else "",
        )
    if report.speed is None:
        return
    for name, seconds in (
        ("write", report.speed.write_seconds),
        ("read", report.speed.read_seconds),
    ):
        rate = report.speed.size / max(seconds, 1e-9)
        yield Finding(
            name,
            seconds,
            f"{human_bytes(int(rate))}/s ({human_bytes(report.speed.size)}, one file)",
            _rate(name, rate, local=local) if rate < bounds.rate else "",
        )


def _local_latency() -> str:
    return (
        "every hit waits for this; the local tier belongs on a local disk: point VLLM_CACHE_ROOT "
        "(or --local) at one"
    )


def _shared_latency(seconds: float) -> str:
    return (
        f"each miss on the way to the next tier costs {seconds:.1f} s; use an endpoint in this "
        "region or on this network, or put the tier last in NEURON_STORE_TIERS"
    )


def _rate(name: str, rate: float, *, local: bool) -> str:
    what = "promote" if name == "write" else "fetch"
    cost = f"an artifact of {human_bytes(_ARTIFACT)} takes about {_ARTIFACT / rate:.0f} s to {what}"
    if local:
        return f"{cost}, and compiles publish here; use a faster disk, or free this one"
    return f"{cost}; look at the network between here and the tier, its region and its load"

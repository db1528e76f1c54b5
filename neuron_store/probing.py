"""Measuring whether a tier can keep its promises, for `neuron-store doctor`."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_store.abc import Check, Publication, Speed, TierReport, measure_latency
from neuron_store.artifact import Artifact, ArtifactFile
from neuron_store.errors import NeuronStoreError

if TYPE_CHECKING:
    from neuron_store.abc import ArtifactStore

__all__ = ["probe_reading", "probe_store"]

_SPEED_BYTES = 4 << 20
_SKIPPED = "until that is mended callers go on to the next tier, and compile what none has"
_READ_ONLY = "mend that, or set read_only=1 if it is only read from here"


def probe_reading(store: ArtifactStore) -> TierReport:
    """Ask for a key that is not there, and time it."""
    try:
        latency = measure_latency(store)
    except NeuronStoreError as error:
        refused = Check("readable", passed=False, detail=str(error), remedy=_SKIPPED)
        return TierReport(store.location, (refused,))
    return TierReport(store.location, (Check("readable", passed=True),), latency)


def probe_store(store: ArtifactStore) -> TierReport:
    """Publish two different artifacts under one fresh key, read back, and remove it again.

    Works on any tier through its public methods alone; tiers that can measure more override
    `ArtifactStore.probe`.
    """
    report = probe_reading(store)
    if report.refused is not None:
        return report
    key = f"probe-{uuid.uuid4().hex}"
    checks, speed = list(report.checks), None
    try:
        with tempfile.TemporaryDirectory(prefix="neuron_store-probe-") as folder:
            first = _probe_artifact(Path(folder, "a"), key, b"first")
            second = _probe_artifact(Path(folder, "b"), key, b"other")
            answer = store.publish(first, Path(folder, "a"))
            checks.append(
                Check("writable", passed=answer is Publication.CREATED, detail=answer.name)
            )
            answer = store.publish(second, Path(folder, "b"))
            checks.append(
                Check(
                    "create-if-absent",
                    passed=answer is Publication.CONFLICT,
                    detail=f"a second, different publish was answered {answer.name}",
                )
            )
            into = Path(folder, "c")
            into.mkdir()
            store.fetch(key, into)
            same = (into / "probe.bin").read_bytes() == b"first"
            checks.append(Check("read-after-write", passed=same, detail="" if same else "differs"))
            speed = _speed(store, Path(folder), f"{key}-speed")
    except NeuronStoreError as error:
        checks.append(Check("writable", passed=False, detail=str(error), remedy=_READ_ONLY))
    finally:
        try:
            store.delete(key)
            store.delete(f"{key}-speed")
        except NeuronStoreError as error:
            checks.append(Check("deletable", passed=False, detail=str(error), required=False))
    return TierReport(store.location, tuple(checks), report.latency, speed)


def _speed(store: ArtifactStore, folder: Path, key: str) -> Speed:
    artifact = _probe_artifact(folder / "speed", key, os.urandom(_SPEED_BYTES))
    (folder / "speed-back").mkdir()
    began = time.perf_counter()
    store.publish(artifact, folder / "speed")
    written = time.perf_counter()
    store.fetch(key, folder / "speed-back")
    return Speed(_SPEED_BYTES, written - began, time.perf_counter() - written)


def _probe_artifact(folder: Path, key: str, data: bytes) -> Artifact:
    folder.mkdir()
    (folder / "probe.bin").write_bytes(data)
    return Artifact(key=key, files=(ArtifactFile("probe.bin", len(data)),))

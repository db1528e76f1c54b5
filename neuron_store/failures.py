"""Word of failed compiles, for the processes that wait for them and for nobody else.

A caller notes which failures are known when it arrives; only later ones are its own wave's. So
those who waited share a failure, and whoever comes afterwards tries afresh.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.abc import KeyLock

__all__ = ["Failure", "forget_failures", "note_failure", "read_failures"]

_KEPT = 16
_TAIL = 16 << 10


@attrs.frozen
class Failure:
    """One failed compile."""

    id: str
    """Random."""
    error: CompileError


def read_failures(lock: KeyLock, key: str) -> Sequence[Failure]:
    """The failures noted for a key, oldest first; garbage counts as none."""
    data = lock.read_failures()
    if not data:
        return []
    try:
        return [_structure(entry, key) for entry in json.loads(data)["failures"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def note_failure(lock: KeyLock, key: str, error: CompileError) -> Failure:
    """Add one, under the key's lock."""
    failure = Failure(uuid.uuid4().hex, _trimmed(error))
    known = [*read_failures(lock, key), failure][-_KEPT:]
    record = {"version": 1, "failures": [_unstructure(f) for f in known]}
    lock.write_failures(json.dumps(record).encode())
    return failure


def forget_failures(lock: KeyLock) -> None:
    """After a success, under the key's lock."""
    if lock.read_failures():
        lock.write_failures(b"")


def _trimmed(error: CompileError) -> CompileError:
    return CompileError(
        error.key,
        error.reason,
        compiler=error.compiler,
        status=error.status,
        log_tail=error.log_tail[-_TAIL:],
        permanent=error.permanent,
    )


def _unstructure(failure: Failure) -> dict[str, Any]:
    error = failure.error
    return {
        "id": failure.id,
        "time": time.time(),
        "reason": error.reason,
        "compiler": error.compiler,
        "status": error.status,
        "log_tail": error.log_tail,
        "permanent": error.permanent,
    }


def _structure(raw: dict[str, Any], key: str) -> Failure:
    status = raw["status"]
    return Failure(
        str(raw["id"]),
        CompileError(
            key,
            str(raw["reason"]),
            compiler=None if raw["compiler"] is None else str(raw["compiler"]),
            status=status if isinstance(status, int) else None,
            log_tail=str(raw["log_tail"]),
            permanent=raw["permanent"] is True,
        ),
    )

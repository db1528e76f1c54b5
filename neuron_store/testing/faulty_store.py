"""A tier that misbehaves on purpose: for testing what stands on top of one.

    store = FaultyStore(inner, [Fault("raise", operation="publish", at=2)])
    store = FaultyStore(inner, rate=0.2, seed=7)      # at random, and the same every time

It breaks what a tier's network and server may break: answers that come late, never, or stale, and
bytes that arrive torn. `inner` is never harmed.
"""

from __future__ import annotations

import errno
import io
import random
import threading
import time
from typing import TYPE_CHECKING, BinaryIO

import attrs

from neuron_store.abc import ArtifactStore, Publication
from neuron_store.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from neuron_store.abc import KeyLock, Lease, TierReport
    from neuron_store.artifact import Artifact

__all__ = ["KINDS", "Fault", "FaultyStore"]

KINDS = {
    "raise": ("find", "open_file", "publish", "keys", "delete"),
    "delay": ("find", "open_file", "publish", "keys", "delete"),
    "lose reply": ("publish", "delete"),
    "tear": ("publish",),
    "hide": ("publish",),
    "stale": ("keys",),
}
"""Each kind of fault, and the operations it can befall."""


@attrs.frozen
class Fault:
    """What goes wrong with one call."""

    kind: str = attrs.field()
    """`raise`: a `TierError`, nothing done. `delay`: `seconds` late. `lose reply`: done, and a
    `TierError` all the same. `tear`: the write says it worked, and what is read of it from then on
    is cut short, until the key is published again. `hide`: what was written is found and listed
    only after `calls` more look-ups. `stale`: the listing is the one before."""
    operation: str = attrs.field(default="*")
    """`find`, `open_file`, `publish`, `keys` or `delete`; `*`: any that the kind can befall."""
    at: int = attrs.field(default=1)
    """At which call of the operation, from 1 (with `*`: of all)."""
    lasting: bool = False
    """At every later call too: the tier is down, and stays so."""
    seconds: float = 0.05
    calls: int = 3

    @kind.validator
    def _is_known(self, _attribute: object, value: str) -> None:
        if value not in KINDS:
            raise ValueError(f"no fault of kind {value!r}; one of {', '.join(KINDS)}")

    @at.validator
    def _can_come(self, _attribute: object, value: int) -> None:
        if value < 1:
            raise ValueError(f"at={value}: calls are counted from 1, so it would never come")

    @operation.validator
    def _can_befall(self, _attribute: object, value: str) -> None:
        if value != "*" and value not in KINDS[self.kind]:
            raise ValueError(
                f"{self.kind!r} does not befall {value!r}; one of {', '.join(KINDS[self.kind])}"
            )


class FaultyStore(ArtifactStore):
    """Passes everything to `inner`, but for what goes wrong.

    Args:
        inner: the tier.
        faults: what goes wrong, and when.
        rate: besides, the share of calls that get a random fault of `kinds`.
        seed: of the randomness.
        kinds: for `rate`.
    """

    def __init__(
        self,
        inner: ArtifactStore,
        faults: Sequence[Fault] = (),
        *,
        rate: float = 0.0,
        seed: int = 0,
        kinds: Sequence[str] = tuple(KINDS),
    ) -> None:
        self.inner = inner
        self.faults = list(faults)
        self.calls: list[str] = []
        """The operations so far."""
        self.injected: list[str] = []
        """What went wrong so far: kind and operation."""
        self._rate, self._kinds = rate, tuple(Fault(kind).kind for kind in kinds)
        self._random = random.Random(seed)  # noqa: S311  (repeatable on purpose)
        self._guard = threading.Lock()
        self._torn: set[str] = set()
        self._hidden: dict[str, int] = {}
        self._listed: list[str] = []

    @property
    def location(self) -> str:
        return self.inner.location

    @property
    def name(self) -> str:
        return self.inner.name

    # -- reading --------------------------------------------------------------------------------

    def find(self, key: str) -> Artifact | None:
        self._call("find", key)
        found = self.inner.find(key)
        return None if self._is_hidden(key) else found

    def open_file(self, key: str, name: str) -> BinaryIO:
        self._call("open_file", key)
        stream = self.inner.open_file(key, name)
        if key not in self._torn:
            return stream
        with stream:
            data = stream.read()
        return io.BytesIO(data[: len(data) // 2])

    def keys(self) -> Iterator[str]:
        stale = self._call("keys", None) == "stale"
        fresh = [key for key in self.inner.keys() if not self._is_hidden(key)]  # noqa: SIM118  (a store is no dict)
        listed, self._listed = self._listed, fresh
        return iter(listed if stale else fresh)

    def damaged(self) -> Iterator[str]:
        return self.inner.damaged()

    def path_of(self, key: str) -> Path | None:
        # A path would let the caller read around the faults.
        return super().path_of(key)

    # -- writing --------------------------------------------------------------------------------

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        key = artifact.key
        kind = self._call("publish", key)
        answer = self.inner.publish(artifact, source, consume=consume)
        if key in self._torn:
            self._torn.discard(key)
            if answer is Publication.PRESENT:
                answer = Publication.REPAIRED
        if kind == "tear":
            self._torn.add(key)
        elif kind == "hide":
            self._hidden[key] = self._fault_of("hide").calls
        elif kind == "lose reply":
            raise self._error("publish", key, "the reply was lost (injected)")
        return answer

    def delete(self, key: str) -> bool:
        kind = self._call("delete", key)
        gone = self.inner.delete(key)
        self._torn.discard(key)
        if kind == "lose reply":
            raise self._error("delete", key, "the reply was lost (injected)")
        return gone

    # -- the rest passes ------------------------------------------------------------------------

    def lock(self, key: str, timeout: float) -> KeyLock:
        return self.inner.lock(key, timeout)

    def scratch(self, key: str) -> Path:
        return self.inner.scratch(key)

    def lease(self, key: str, ttl: float) -> Lease:
        return self.inner.lease(key, ttl)

    def probe(self) -> TierReport:
        return self.inner.probe()

    def close(self) -> None:
        self.inner.close()

    # -- faults ---------------------------------------------------------------------------------

    def _call(self, operation: str, key: str | None) -> str | None:
        """Count the call; raise or wait where that is the fault; else the fault's kind."""
        with self._guard:
            self.calls.append(operation)
            fault = self._due(operation)
            if fault is None:
                return None
            self.injected.append(f"{fault.kind} {operation}")
        if fault.kind == "raise":
            raise self._error(operation, key, "injected")
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        return fault.kind

    def _due(self, operation: str) -> Fault | None:
        def counts(fault: Fault) -> Callable[[str], bool]:
            mine = KINDS[fault.kind] if fault.operation == "*" else (fault.operation,)
            return mine.__contains__

        for fault in self.faults:
            count = counts(fault)
            if not count(operation):
                continue
            number = sum(map(count, self.calls))
            if number == fault.at or (fault.lasting and number > fault.at):
                return fault
        if self._rate and self._random.random() < self._rate:
            fitting = [kind for kind in self._kinds if operation in KINDS[kind]]
            if fitting:
                return Fault(self._random.choice(fitting), operation)
        return None

    def _fault_of(self, kind: str) -> Fault:
        return next((f for f in self.faults if f.kind == kind), Fault(kind))

    def _is_hidden(self, key: str) -> bool:
        with self._guard:
            left = self._hidden.get(key, 0)
            if left <= 1:
                self._hidden.pop(key, None)
            else:
                self._hidden[key] = left - 1
            return left > 0

    def _error(self, operation: str, key: str | None, reason: str) -> TierError:
        return TierError(self.location, operation, reason, key=key, code=errno.EIO)

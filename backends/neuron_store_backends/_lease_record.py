"""What a lease says: who holds it, and how often it was renewed.

The token and the counter together make each renewal a new version, which is all that those who
wait look at; the rest is for messages. Nothing here is trusted: what does not read as a lease is
one that nobody renews.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid

import attrs

from neuron_store.abc import MAX_LEASE_TTL, MIN_LEASE_TTL
from neuron_store.errors import LeaseHeld

__all__ = [
    "ABANDONED",
    "MAX_LEASE_BYTES",
    "LeaseRecord",
    "dump_lease",
    "lease_held",
    "lease_name",
    "load_lease",
    "read_name",
]

ABANDONED = 4 * MAX_LEASE_TTL
"""Seconds, by the store's or file system's clock, after which a lease that was not written again
may be removed by `gc`: a live holder writes at least every `MAX_LEASE_TTL` / 3. A mistake would
cost a double compile."""
MAX_LEASE_BYTES = 4096
"""Of more than that only the beginning is read; it is no lease."""
LEASE_VERSION = 1

_TOKEN = re.compile(r"[0-9a-f]{32}\Z")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_NAME = re.compile(
    r"1,([0-9a-f]{32}),([0-9]{1,15}),([0-9]{1,4}(?:\.[0-9]{1,3})?),([0-9]{1,10}),"
    r"([A-Za-z0-9._-]{1,64})\Z"
)
_MAX_COUNTER = 10**15


@attrs.frozen
class LeaseRecord:
    """One version of a lease."""

    token: str
    """Random; the holder knows its own lease by it, after a lost reply too."""
    counter: int
    """Goes up with each renewal."""
    ttl: float
    """Seconds; the holder renews three times in it."""
    pid: int
    host: str
    released: bool = False
    """Given back by a holder that may write and not delete: anybody may take it over at once."""

    @classmethod
    def new(cls, ttl: float) -> LeaseRecord:
        """The first version of a lease of this process."""
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "unknown"
        # As its name spells it, so that both forms read back equal.
        return cls(uuid.uuid4().hex, 1, round(ttl, 3), os.getpid(), host)

    def renewed(self) -> LeaseRecord:
        """The version after this one."""
        return attrs.evolve(self, counter=self.counter + 1)


def lease_held(key: str, location: str, theirs: LeaseRecord | None, *, renewed: bool) -> LeaseHeld:
    """The error for whoever finds a lease taken; None: its record cannot be read, or is gone."""
    if theirs is None:
        return LeaseHeld(key, location, "an unknown process", renewed=renewed)
    pid, host, ttl = f"pid {theirs.pid}", theirs.host, theirs.ttl
    return LeaseHeld(key, location, pid, host=host, renewed=renewed, ttl=ttl)


def dump_lease(record: LeaseRecord) -> bytes:
    """A lease as the content of an object."""
    return json.dumps({"version": LEASE_VERSION, **attrs.asdict(record)}).encode()


def load_lease(data: bytes) -> LeaseRecord | None:
    """The lease that an object holds; None for anything that is none, or of a newer release."""
    if len(data) > MAX_LEASE_BYTES:
        return None
    try:
        raw = json.loads(data)
        facts = [raw[name] for name in ("token", "counter", "ttl", "pid", "host", "released")]
        known = raw["version"] == LEASE_VERSION
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    record = LeaseRecord(*facts)
    return record if known and _is_lease(record) else None


def _is_lease(record: LeaseRecord) -> bool:
    ttl: object = record.ttl
    return (
        _is_text(record.token, _TOKEN)
        and _is_count(record.counter, _MAX_COUNTER)
        and type(ttl) in {int, float}
        and MIN_LEASE_TTL <= record.ttl <= MAX_LEASE_TTL
        and _is_count(record.pid, 10**10)
        and _is_text(record.host, _HOST)
        and isinstance(record.released, bool)
    )


def _is_text(value: object, form: re.Pattern[str]) -> bool:
    return isinstance(value, str) and form.match(value) is not None


def _is_count(value: object, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < below


def lease_name(record: LeaseRecord) -> str:
    """A lease as the name of a file, which a rename changes at one stroke."""
    ttl = f"{record.ttl:.3f}".rstrip("0").rstrip(".")
    return f"1,{record.token},{record.counter},{ttl},{record.pid},{record.host}"


def read_name(name: str) -> LeaseRecord | None:
    """The lease that a file's name spells; None for anything that is none."""
    found = _NAME.match(name)
    if found is None:
        return None
    token, counter, ttl, pid, host = found.groups()
    if not MIN_LEASE_TTL <= float(ttl) <= MAX_LEASE_TTL:
        return None
    return LeaseRecord(token, int(counter), float(ttl), int(pid), host)

"""Measures whether an object store keeps the promises that publishing rests on.

Four of seven S3 servers that were tried answer 200 to a condition that they ignored. So each tier
is measured before the first publish of a process, by writing twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from neuron_store.abc import Check, Speed, TierReport, measure_latency
from neuron_store.errors import TierError, TierUnfit
from neuron_store_backends._objects import PIECE
from neuron_store_backends._trouble import Changed, Exists, Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from neuron_store_backends._objects import Objects
    from neuron_store_backends.conditional import ConditionalStore

__all__ = ["probe", "replace_fault", "require_create", "require_replace", "requiring_create"]

# Measurements after one that found a fault; more than one, since behind a load balancer not every
# server may have it.
_AGAIN = 3

# By identity of the place. Only what passed is kept: a server may be mended.
_honest_create: set[str] = set()
_honest_replace: set[str] = set()

_IGNORED = (
    "it ignores the condition of a create (a second create of the same object was answered with "
    "success), so that two publishers would overwrite each other; use a server that honours "
    "If-None-Match, or a posix tier"
)

_OTHER_STORE = (
    "two publishers would overwrite each other here, so publishing is refused; use a store that "
    "honours conditional writes (docs/object-stores.md names some), or a posix tier"
)


def require_create(objects: Objects) -> None:
    """Measure, once in a process and place, that create-if-absent is exclusive.

    Raises:
        TierUnfit: it is not.
        TierError: the tier cannot be written.
    """
    if objects.identity in _honest_create:
        return
    reason = _create_fault(objects, b"")
    if reason is not None:
        raise TierUnfit(objects.location, "publish", reason)
    _honest_create.add(objects.identity)


@contextlib.contextmanager
def requiring_create(objects: Objects) -> Iterator[None]:
    """As `require_create`, while the block does what need not wait for the verdict.

    However the block ends, the measurement has ended, too: nothing is written later. What the
    block raises comes first. Where the verdict is known already there is no thread.
    """
    if objects.identity in _honest_create:
        yield
        return
    trouble: list[BaseException] = []

    def measure() -> None:
        try:
            require_create(objects)
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            trouble.append(error)

    # A daemon: a publish that was left behind at a dead server must not keep the process.
    thread = threading.Thread(target=measure, name="neuron_store-honesty", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if trouble:
        raise trouble[0]


def require_replace(objects: Objects, key: str, *, why: str = "the entry is damaged") -> None:
    """Measure, once in a process and place, that replace-if-unchanged is honest.

    Raises:
        TierUnfit: it is not; then a damaged record stays where it is. To overwrite it without a
            condition, or to remove it and create another, could displace the record that another
            repairer was just told is there to stay.
    """
    reason = replace_fault(objects)
    if reason is not None:
        raise TierUnfit(
            objects.location,
            "repair",
            f"{why}, and the store cannot replace it safely: {reason}; stop all "
            "publishers of the key, delete the entry, and promote it again",
            key=key,
        )


def replace_fault(objects: Objects) -> str | None:
    """Why replace-if-unchanged is not honest, or None when it is; a good answer is kept.

    Raises:
        TierError: the tier cannot be written.
    """
    if objects.identity in _honest_replace:
        return None
    reason = _seen_again(lambda: _replace_twice(objects))
    if reason is None:
        _honest_replace.add(objects.identity)
    return reason


def _scratch(objects: Objects) -> str:
    return f"{objects.root}/probe/{uuid.uuid4().hex}"


def _discard(objects: Objects, path: str) -> None:
    try:
        objects.remove(path)
    except TierError:
        # Credentials that may write and not delete are a good choice; a few bytes stay.
        pass


def _seen_again(measure: Callable[[], str | None]) -> str | None:
    """What is wrong, or None when nothing is, or when it does not show again.

    Who removes a scratch object meanwhile (an operator that empties the prefix, a collector while
    this process was suspended) makes an honest store look as if it ignored conditions.
    """
    if measure() is None:
        return None
    return next((fault for _ in range(_AGAIN) if (fault := measure()) is not None), None)


def _create_fault(objects: Objects, data: bytes) -> str | None:
    """Why create-if-absent is not exclusive, or None when it is."""
    return _seen_again(lambda: _create_twice(objects, data))


def _create_twice(objects: Objects, data: bytes) -> str | None:
    path = _scratch(objects)
    try:
        try:
            objects.create(path, data)
        except Exists:
            # The name is random: our own, the first reply being lost.
            pass
        try:
            objects.create(path, data + b"2")
        except Exists:
            return None
        return _IGNORED
    finally:
        _discard(objects, path)


def _race(objects: Objects) -> str | None:
    """Why eight concurrent creates have not exactly one winner, or None when they have."""
    path = _scratch(objects)
    objects.handle()

    def attempt(number: int) -> int | None:
        try:
            objects.create(path, b"%d" % number)
        except Exists:
            return None
        return number

    try:
        with ThreadPoolExecutor(8) as pool:
            winners = {n for n in pool.map(attempt, range(8)) if n is not None}
        blob = objects.read(path, 16)
        # A winner whose reply was lost counts itself among the losers.
        winners |= {int(blob.data)} if blob is not None else set()
        return None if len(winners) == 1 else f"{len(winners)} of 8 concurrent creates won"
    finally:
        _discard(objects, path)


def _replace_twice(objects: Objects) -> str | None:
    path = _scratch(objects)
    try:
        try:
            objects.create(path, b"1")
        except Exists:
            pass
        first = objects.read(path, 16)
        if first is None:
            return "an object just written cannot be read"
        try:
            objects.replace(path, b"2", first.version)
        except TierError as error:
            if error.errno != errno.ENOTSUP:
                raise
            return "the store has no replace-if-unchanged"
        except Changed:
            second = objects.read(path, 16)
            # With `2` there it was our own, the reply being lost.
            if second is None or second.data != b"2":
                return "a replace on the right version is refused"
        try:
            objects.replace(path, b"3", first.version)
        except Changed:
            return None
        return "a replace on a version that is gone is accepted (If-Match is ignored)"
    finally:
        _discard(objects, path)


def _read_after_write(objects: Objects) -> str | None:
    path = _scratch(objects)
    try:
        if objects.read(path, 16) is not None:
            return "an object is there that nobody wrote"
        try:
            objects.create(path, b"here")
        except Exists:
            pass
        blob = objects.read(path, 16)
        if blob is None or blob.data != b"here":
            return "an object just written is not read back"
        if path not in objects.listing(f"{objects.root}/probe"):
            return "an object just written is not listed"
        objects.remove(path)
        return None if objects.read(path, 16) is None else "a removed object is still read"
    finally:
        _discard(objects, path)


def probe(store: ConditionalStore) -> TierReport:
    """Measure everything that the tier's promises rest on, inside `<prefix>/probe/` only."""
    objects, checks = store.objects, list[Check]()
    latency: float | None = None
    speed: Speed | None = None

    def check(
        name: str,
        measure: Callable[[], str | None],
        good: str,
        *,
        required: bool = True,
        remedy: str = "",
    ) -> bool:
        began = time.perf_counter()
        try:
            reason = measure()
        except TierError as error:
            reason = error.reason
        spent = time.perf_counter() - began
        detail = f"{good} ({spent * 1000:.0f} ms)" if reason is None else reason
        checks.append(
            Check(name, reason is None, detail, required, "" if reason is None else remedy)
        )
        return reason is None

    def reachable() -> None:
        nonlocal latency
        latency = measure_latency(store)

    def writable() -> None:
        path = _scratch(objects)
        try:
            objects.create(path, b"1")
        except Exists:
            pass
        finally:
            _discard(objects, path)

    # What cannot be reached cannot be written either; more time-outs would say nothing new.
    if check("readable", reachable, "answers") and check("writable", writable, "yes"):
        for size, told in ((0, "0 B"), (1, "1 B"), (6 << 20, "6 MiB")):
            check(
                f"create-if-absent, {told}",
                lambda data=bytes(size): _create_fault(objects, data),  # type: ignore[misc]  # a default binds the loop's value
                "the second create is refused",
                remedy=_OTHER_STORE,
            )
        check(
            "create-if-absent, race",
            lambda: _race(objects),
            "one winner of 8",
            remedy=_OTHER_STORE,
        )
        check(
            "read after write",
            lambda: _read_after_write(objects),
            "at once",
            remedy="a cache between here and the store answers; set endpoint_url to the store",
        )
        check(
            "replace-if-unchanged",
            lambda: _seen_again(lambda: _replace_twice(objects)),
            "honoured: damaged records are replaced, leases work",
            required=False,
            remedy="only a damaged record of other bytes needs it: delete such an entry by hand, "
            "and promote it again; leases do not work here",
        )
        check("delete", lambda: _deletable(objects), "allowed: gc works", required=False)
        speed = _speed(objects)
    if store.compress is not None:
        worth = "each file that shrinks below 0.8 of its size"
        checks.append(Check("compress", True, f"{store.compress}: {worth}", required=False))
    return TierReport(store.location, tuple(checks), latency, speed)


def _deletable(objects: Objects) -> str | None:
    """Why nothing can be removed, or None; what was measured before may lie there then."""
    path = _scratch(objects)
    try:
        objects.create(path, b"")
    except Exists:
        pass
    try:
        objects.remove(path)
    except TierError as error:
        return f"{error.reason}; publishing works, delete and gc do not"
    return None


def _speed(objects: Objects) -> Speed | None:
    """Write and read back one object; None when the store is in trouble."""
    try:
        small = _time_object(objects, 1 << 20)
        # Where that was slow already, more would only keep people waiting.
        slow = small.write_seconds + small.read_seconds > 1.0
        return small if slow else _time_object(objects, PIECE)
    except (TierError, Missing):
        return None


def _time_object(objects: Objects, size: int) -> Speed:
    path, data = _scratch(objects), os.urandom(size)
    try:
        began = time.perf_counter()
        try:
            objects.create(path, data)
        except Exists:
            pass
        written = time.perf_counter()
        with objects.open(path, size, key="probe") as stream:
            while stream.read(PIECE):
                pass
        return Speed(size, written - began, time.perf_counter() - written)
    finally:
        _discard(objects, path)

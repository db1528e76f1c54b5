"""What an object store's answer means, in one vocabulary for all clouds.

Each backend translates its client's errors into a `Trouble`; what to do about each kind is decided
here, once. The tables are in docs/object-stores.md.
"""

from __future__ import annotations

import enum
import errno
import random

import attrs

from neuron_store.errors import TierError

__all__ = [
    "GARBLED",
    "Changed",
    "Exists",
    "Kind",
    "Missing",
    "Trouble",
    "Vanished",
    "backoff",
    "chain",
    "network_trouble",
    "refusal",
]


class Kind(enum.Enum):
    """What an error means for the one who asked."""

    MISSING = "missing"
    """The object is not there. Never a missing bucket."""
    PRECONDITION = "precondition"
    """The condition did not hold: it exists (a create), or it changed (a replace)."""
    CONFLICT = "conflict"
    """Another writer is at work on the same name; says nothing about what is there."""
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    """The connection broke, a body was cut short, the server stumbled."""
    UNREACHABLE = "unreachable"
    EXPIRED = "expired"
    """The credentials were good once; a new client may find fresh ones."""
    DENIED = "denied"
    FATAL = "fatal"
    """Trying again cannot help; `reason` carries the remedy."""
    BEYOND = "beyond"
    """A range that starts where the object has ended."""


_RETRIES = {
    # 409 comes and goes with the other writer, whose own request takes a round trip.
    Kind.CONFLICT: 12,
    Kind.THROTTLED: 8,
    Kind.TRANSIENT: 5,
    # Each try at an address that drops packets costs a whole connect time-out.
    Kind.UNREACHABLE: 2,
}


@attrs.frozen
class Trouble:
    """One error, classified."""

    kind: Kind
    reason: str
    """In words for an operator, with the remedy; never the server's own text, which may quote
    the request."""
    code: int = errno.EIO

    @property
    def retries(self) -> int:
        """How often the same request may be sent again."""
        return _RETRIES.get(self.kind, 0)


GARBLED = Trouble(
    Kind.FATAL,
    "the answer is none of an object store's; check the endpoint, and what lies before it",
)
"""What a client cannot make sense of: a captive portal's page, half an answer."""


class Missing(Exception):
    """The object is not there. Internal: becomes a miss or `ArtifactCorrupt`, never escapes."""


class Exists(Exception):
    """A create found something. Internal: judged by reading back, never escapes."""


class Changed(Exception):
    """A replace found another version. Internal: judged by reading back, never escapes."""


class Vanished(TierError):
    """An object was removed between two pieces of it."""


def backoff(attempt: int) -> float:
    """Seconds to wait before try `attempt` (1, 2, ...): exponential, with full jitter."""
    # Jitter down to zero would let all the losers of one round meet again at once.
    ceiling: float = min(0.1 * 2.0**attempt, 4.0)
    return random.uniform(0.2, 1.0) * ceiling  # noqa: S311  (spreads retries; nothing secret)


def chain(error: BaseException) -> list[BaseException]:
    """The error and what it came from, outermost first."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found


def network_trouble(error: BaseException) -> Trouble | None:
    """Trouble that all clients have in common: sockets, name service, TLS, time-outs."""
    import asyncio  # noqa: PLC0415  (by the time something fails, the client has loaded it)
    import socket  # noqa: PLC0415
    import ssl  # noqa: PLC0415

    for each in chain(error):
        # aiohttp's, by name: this module is read where no client is installed.
        if any(base.__name__ == "ConnectionTimeoutError" for base in type(each).__mro__):
            return Trouble(
                Kind.UNREACHABLE,
                "no connection in time; check the endpoint and the network",
                errno.ETIMEDOUT,
            )
        if isinstance(each, ssl.SSLError) and not isinstance(each, ssl.SSLEOFError):
            return tls_trouble()
        if isinstance(each, socket.gaierror):
            return Trouble(
                Kind.UNREACHABLE,
                "the endpoint's host name does not resolve; check the endpoint and the region",
                errno.EHOSTUNREACH,
            )
    for each in chain(error):
        if isinstance(each, ConnectionRefusedError):
            return Trouble(
                Kind.UNREACHABLE,
                "connection refused; check the endpoint, and that the server runs",
                errno.ECONNREFUSED,
            )
        if isinstance(each, OSError) and each.errno in {
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ENETDOWN,
        }:
            return Trouble(Kind.UNREACHABLE, "no route to the endpoint", each.errno or errno.EIO)
        if isinstance(each, (ConnectionError, ssl.SSLEOFError, EOFError)):
            return Trouble(Kind.TRANSIENT, "the connection broke", errno.ECONNRESET)
        if isinstance(each, (TimeoutError, asyncio.TimeoutError)):
            return slow_trouble()
    return None


def slow_trouble() -> Trouble:
    """A time-out after the connection was made."""
    return Trouble(Kind.TRANSIENT, "no answer in time, or bytes came too slowly", errno.ETIMEDOUT)


def tls_trouble() -> Trouble:
    """A certificate or handshake that cannot be accepted."""
    return Trouble(
        Kind.FATAL,
        "TLS failed: the certificate is not trusted, or the endpoint does not speak TLS; "
        "check http/https in the endpoint, and the CA bundle",
        errno.EPROTO,
    )


def refusal(
    trouble: Trouble, location: str, operation: str, *, key: str | None, tries: int
) -> TierError:
    """The error that ends an operation."""
    times = f" (tried {tries} times)" if tries > 1 else ""
    return TierError(location, operation, trouble.reason + times, key=key, code=trouble.code)

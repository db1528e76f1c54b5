"""What goes to S3 and what comes back, apart from how: bodies, answers, refusals, signatures."""

from __future__ import annotations

import email.utils
import hmac
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
import botocore.auth

if TYPE_CHECKING:
    from collections.abc import Mapping
    from mmap import mmap
    from types import TracebackType

    from neuron_store_backends._s3_wire import Reply

__all__ = ["Answer", "Body", "Request", "S3Refusal", "in_time", "sign"]

_UNSIGNED_HEADERS = frozenset(botocore.auth.SIGNED_HEADERS_BLACKLIST)
_CHUNK = 256 << 10
_B = TypeVar("_B", bytes, memoryview)


class S3Refusal(Exception):
    """An answer that is no success, as botocore's errors tell it; never the server's own text."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class Body:
    """Bytes on their way out, a chunk at a time, so that a time-out is one of silence."""

    def __init__(self, data: bytes | mmap, end: float | None) -> None:
        self._view = memoryview(data)
        self._end = end

    def read(self, _size: int = -1) -> memoryview:
        """The next chunk; empty after the last."""
        in_time(self._end)
        chunk = self._view[:_CHUNK]
        self._view = self._view[_CHUNK:]
        return chunk


class Answer:
    """The answer to a GET. Close it: only when it was read to its end is its connection kept."""

    def __init__(self, reply: Reply, end: float | None) -> None:
        self._reply = reply
        self._end = end
        self._got = 0
        self.status = reply.status
        headers = reply.headers
        self.version = str(headers.get("ETag", ""))
        self._told = headers.get("Last-Modified")
        told = headers.get("Content-Length")
        self.length = int(told) if told is not None else None
        """Of the body, in bytes; None where it is not told."""

    @property
    def modified(self) -> float | None:
        """Unix seconds by the store's clock; None where it is not told."""
        try:
            return email.utils.parsedate_to_datetime(str(self._told)).timestamp()
        except (ValueError, OverflowError):
            return None

    def read(self) -> bytes:
        """What has come, at most 256 KiB; empty at the end.

        Raises:
            ConnectionError: it ended early.
            TimeoutError: the deadline is over.
        """
        left = self._left(_CHUNK)
        return self._counted(self._reply.read1(left)) if left else b""

    def read_into(self, target: memoryview) -> int:
        """As `read`, into memory that is there; bytes read, 0 at the end.

        Raises:
            ConnectionError, TimeoutError: as `read`.
        """
        left = self._left(len(target))
        if not left:
            return 0
        count = self._reply.readinto1(target[:left])
        self._counted(target[:count])
        return count

    def _left(self, most: int) -> int:
        in_time(self._end)
        return most if self.length is None else min(most, self.length - self._got)

    def _counted(self, data: _B) -> _B:
        self._got += len(data)
        if not data and self.length is not None:
            raise ConnectionError("a body was cut short")
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._got == self.length:
            self._reply.finished()
        else:
            self._reply.close()


@attrs.define
class Request:
    """As much of botocore's `AWSRequest` as its signer looks at."""

    method: str
    url: str
    headers: dict[str, str] = attrs.field(repr=False)
    context: dict[str, Any] = attrs.field(factory=dict)
    params: Mapping[str, str] = attrs.field(factory=dict)


class _Signer(botocore.auth.S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Takes the digest that is known instead of digesting the body once more.

    And it takes headers that are plain, each there once, as such: through an `email` message it
    spends twice the time.
    """

    def headers_to_sign(self, request: Request) -> dict[str, str]:
        # Asked twice for each signature, and nothing changes in between.
        found: dict[str, str] | None = request.context.get("headers_to_sign")
        if found is None:
            found = {name.lower(): value for name, value in request.headers.items()}
            for name in found.keys() & _UNSIGNED_HEADERS:
                del found[name]
            request.context["headers_to_sign"] = found
        return found

    def canonical_headers(self, headers_to_sign: dict[str, str]) -> str:
        return "\n".join(
            f"{name}:{' '.join(headers_to_sign[name].split())}" for name in sorted(headers_to_sign)
        )

    def payload(self, request: Request) -> str:
        return str(request.context["payload"])

    def signature(self, string_to_sign: str, request: Request) -> str:
        # As the signer's own, by calls that make no object for each of the five digests.
        key = f"AWS4{self.credentials.secret_key}".encode()
        day = request.context["timestamp"][:8]
        for part in (day, self._region_name, self._service_name, "aws4_request", string_to_sign):
            key = hmac.digest(key, part.encode(), "sha256")
        return key.hex()


def sign(request: Request, credentials: Any, region: str, payload: str) -> None:
    """Add the signature's headers.

    Args:
        request: to sign.
        credentials: frozen: a renewal between two of their fields would tear them apart.
        region: of the bucket.
        payload: digest of the body, or S3's word for none.
    """
    request.context["payload"] = payload
    _Signer(credentials, "s3", region).add_auth(request)


def in_time(end: float | None) -> None:
    """Raise `TimeoutError` when `end`, of the monotonic clock, is over."""
    if end is not None and time.monotonic() > end:
        raise TimeoutError

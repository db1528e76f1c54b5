"""One process's way to S3: botocore, and short cuts for the requests that carry bytes.

botocore's client spends 4 to 5 ms of CPU on a request, most of it on looking up what the request
looks like (docs/performance.md). Where the bucket is, whose credentials and which proxies and
certificates are hard questions, and stay botocore's. A plain GET or PUT is an easy one: the client
is asked once how it would address an object, and after that such requests are signed by botocore's
signer and sent by `_s3_wire`. Where the client would sign in another way (S3 Express, multi-Region
access points), everything goes through the client.
"""

from __future__ import annotations

import email.utils
import functools
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import attrs
import botocore.auth
import botocore.awsrequest
import botocore.config
import botocore.httpsession
import botocore.loaders
import botocore.session
import botocore.utils
from botocore import UNSIGNED

from neuron_store_backends._s3_wire import Direct, Pooled, Session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from mmap import mmap
    from types import TracebackType

    from neuron_store_backends._options import Times
    from neuron_store_backends._s3_wire import Reply, Wire

_B = TypeVar("_B", bytes, memoryview)
__all__ = ["Answer", "Body", "S3Client", "S3Options", "S3Refusal"]

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d{8}/([A-Za-z0-9-]+)/s3/aws4_request,")
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,60})\s*</Code>")
_REGION = re.compile(r"[a-z0-9-]{4,40}")
_UNSIGNED_HEADERS = frozenset(botocore.auth.SIGNED_HEADERS_BLACKLIST)
_UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
_MOST_TOLD = 64 << 10
_CHUNK = 256 << 10


@attrs.frozen
class S3Options:
    """What a tier's URL says of the place."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anon: bool = False
    addressing_style: str = "auto"


class S3Refusal(Exception):
    """An answer that is no success, as botocore's errors tell it; never the server's own text."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class _Seen(Exception):
    """Ends a request that is only to be looked at."""


@attrs.frozen
class _Address:
    """How plain requests to one bucket are made."""

    url: str
    """Of the bucket, with a slash at its end."""
    region: str | None
    """Of the signature; None: unsigned."""
    host: str = attrs.field(init=False)

    @host.default
    def _host(self) -> str:
        # As the signer derives it, three times as fast.
        parts = urlsplit(self.url)
        usual = ":443" if parts.scheme == "https" else ":80"
        return parts.netloc.rpartition("@")[2].lower().removesuffix(usual)


@attrs.define
class _Request:
    """As much of botocore's `AWSRequest` as its signer looks at."""

    method: str
    url: str
    headers: dict[str, str]
    context: dict[str, Any] = attrs.field(factory=dict)
    params: Mapping[str, str] = attrs.field(factory=dict)


class _Signer(botocore.auth.S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Takes the digest that is known instead of digesting the body once more.

    And it takes headers that are plain, each there once, as such: through an `email` message it
    spends twice the time.
    """

    def headers_to_sign(self, request: _Request) -> dict[str, str]:
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

    def payload(self, request: _Request) -> str:
        return str(request.context["payload"])


class Body:
    """Bytes on their way out, a chunk at a time, so that a time-out is one of silence."""

    def __init__(self, data: bytes | mmap, end: float | None) -> None:
        self._view = memoryview(data)
        self._end = end

    def read(self, _size: int = -1) -> memoryview:
        """The next chunk; empty after the last."""
        _in_time(self._end)
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
        _in_time(self._end)
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


@functools.cache
def _data(path: str | None) -> Any:
    """The models that botocore reads, once for all tiers and for the children of a fork."""
    return botocore.loaders.create_loader(path)


@functools.cache
def preload() -> None:
    """Have read what takes a process's first request half a second: botocore's models."""
    session = botocore.session.Session()
    session.register_component("data_loader", _data(session.get_config_variable("data_path")))
    # Any credentials, so that none are looked for: that may ask a server of the cloud.
    session.create_client(
        "s3",
        "us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",  # noqa: S106  (no secret)
    )
    # Python's own, imported at the first look-up of a host.
    "localhost".encode("idna")


class S3Client:
    """Connections, credentials and the client, for one process. Thread-safe."""

    def __init__(self, options: S3Options, times: Times) -> None:
        self._options = options
        self._times = times
        self._session = botocore.session.Session(profile=options.profile)
        data = _data(self._session.get_config_variable("data_path"))
        self._session.register_component("data_loader", data)
        self.api = self._make(options.region)
        """botocore's own, for everything that is neither GET nor PUT."""
        self._credentials = None if options.anon else self._session.get_credentials()
        self._agent = self._session.user_agent()
        self._wire: Wire | None = None
        self._addresses: dict[str, _Address | None] = {}
        self._guard = threading.Lock()

    def _make(self, region: str | None) -> Any:
        config: dict[str, Any] = {
            "connect_timeout": self._times.connect_timeout,
            "read_timeout": self._times.read_timeout,
            "max_pool_connections": 32,
            # Deadlines and back-off are `Objects.tries`'s; below it they would multiply.
            "retries": {"total_max_attempts": 1},
            "s3": {"addressing_style": self._options.addressing_style},
        }
        if self._options.anon:
            config["signature_version"] = UNSIGNED
        if self._options.endpoint_url:
            # Many servers do not know the checksums that botocore adds by default; digests of our
            # own are checked end to end.
            config["request_checksum_calculation"] = "when_required"
            config["response_checksum_validation"] = "when_required"
        return self._session.create_client(
            "s3",
            region_name=region,
            endpoint_url=self._options.endpoint_url,
            config=botocore.config.Config(**config),
        )

    def get(self, path: str, *, end: float | None, span: tuple[int, int] | None = None) -> Answer:
        """An object, or its bytes [start, stop) of `span`.

        Raises:
            S3Refusal: any other answer.
        """
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        answer = self._plain("GET", path, headers, end=end)
        if answer is None:
            bucket, _, name = path.partition("/")
            ranged = {"Range": headers["Range"]} if headers else {}
            told = self.api.get_object(Bucket=bucket, Key=name, **ranged)
            facts = told["ResponseMetadata"]
            answer = Answer(
                Pooled(
                    told["Body"]._raw_stream,  # noqa: SLF001  (its own reads have no deadline)
                    facts["HTTPStatusCode"],
                    botocore.awsrequest.HeadersDict(facts["HTTPHeaders"]),
                ),
                end,
            )
        return answer

    def put(
        self,
        path: str,
        data: bytes | mmap,
        *,
        end: float | None,
        sha256: str | None = None,
        part: tuple[str, int] | None = None,
        condition: tuple[str, str] | None = None,
    ) -> str:
        """Write an object, or a part of an upload; its ETag.

        Args:
            path: bucket and name.
            data: the body.
            end: deadline, by the monotonic clock.
            sha256: of the body (hex), which the store then checks; None: TLS alone guards it.
            part: id of the upload and number of the part.
            condition: `IfMatch` or `IfNoneMatch`, and its value.

        Raises:
            S3Refusal: any answer that is no success.
        """
        headers = {"Content-Length": str(len(data))}
        if condition is not None:
            headers[{"IfMatch": "If-Match", "IfNoneMatch": "If-None-Match"}[condition[0]]] = (
                condition[1]
            )
        query = f"?partNumber={part[1]}&uploadId={quote(part[0], safe='')}" if part else ""
        answer = self._plain(
            "PUT",
            path,
            headers,
            query=query,
            body=Body(data, end),
            payload=sha256 or _UNSIGNED_PAYLOAD,
            end=end,
        )
        if answer is not None:
            with answer:
                while answer.read():
                    pass
            return answer.version
        bucket, _, name = path.partition("/")
        where: dict[str, Any] = {"Bucket": bucket, "Key": name, "Body": data}
        if part is not None:
            told = self.api.upload_part(UploadId=part[0], PartNumber=part[1], **where)
        else:
            told = self.api.put_object(**where, **(dict([condition]) if condition else {}))
        return str(told["ETag"])

    # -- plain requests -------------------------------------------------------------------------

    def _plain(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        end: float | None,
        query: str = "",
        body: Body | None = None,
        payload: str = botocore.auth.EMPTY_SHA256_HASH,
    ) -> Answer | None:
        """The answer if it is a success; None where plain requests cannot be made."""
        bucket, _, name = path.partition("/")
        address = self._address(bucket)
        if address is None:
            return None
        _in_time(end)
        request = _Request(
            method,
            f"{address.url}{quote(name, safe='/~')}{query}",
            {
                "Host": address.host,
                "User-Agent": self._agent,
                "Accept-Encoding": "identity",
                **headers,
            },
        )
        if address.region is not None and self._credentials is not None:
            request.context["payload"] = payload
            # Frozen: a renewal between two of its fields would tear them apart.
            frozen = self._credentials.get_frozen_credentials()
            _Signer(frozen, "s3", address.region).add_auth(request)
        assert self._wire is not None
        reply = self._wire.send(method, request.url, request.headers, body)
        answer = Answer(reply, end)
        if 200 <= answer.status < 300:
            return answer
        with answer:
            data = b""
            while len(data) < _MOST_TOLD and (chunk := answer.read()):
                data += chunk
        region = reply.headers.get("x-amz-bucket-region")
        if region and answer.status in {301, 400} and self._moved(address, region):
            raise S3Refusal(answer.status, "TemporaryRedirect")
        found = _CODE.search(data)
        raise S3Refusal(answer.status, found.group(1).decode() if found else "")

    def _moved(self, address: _Address, region: str) -> bool:
        """Turn to the region where S3 says that the bucket is; whether that is another one."""
        chosen = self._options.endpoint_url or self._options.region
        if chosen or not address.region or not _REGION.fullmatch(region):
            return False
        with self._guard:
            if region == address.region:
                return False
            self.api = self._make(region)
            self._addresses.clear()
            return True

    def _address(self, bucket: str) -> _Address | None:
        if bucket not in self._addresses:
            with self._guard:
                if bucket not in self._addresses:
                    self._addresses[bucket] = self._ask_for_address(bucket)
        return self._addresses[bucket]

    def _ask_for_address(self, bucket: str) -> _Address | None:
        """What botocore's client would do, without doing it."""
        seen: list[Any] = []

        def stop(request: Any, **_: Any) -> None:
            seen.append(request)
            raise _Seen

        events = self.api.meta.events
        events.register_first("before-send.s3.GetObject", stop)
        try:
            self.api.get_object(Bucket=bucket, Key="x")
        except _Seen:
            pass
        finally:
            events.unregister("before-send.s3.GetObject", stop)
        request = seen[0]
        if self._wire is None:
            named = self._session.get_config_variable("ca_bundle")
            named = named or os.environ.get("REQUESTS_CA_BUNDLE") or True
            bundle = botocore.httpsession.get_cert_path(named)
            proxies = botocore.utils.get_environ_proxies(request.url)
            direct = not proxies.get(urlsplit(request.url).scheme)
            self._wire = (
                Direct(self._times, bundle) if direct else Session(self._times, bundle, proxies)
            )
        if not request.url.endswith("/x"):
            return None
        url = request.url.removesuffix("x")
        signed = request.headers.get("Authorization")
        if signed is None:
            return _Address(url, None)
        scope = _SCOPE.match(signed.decode() if isinstance(signed, bytes) else str(signed))
        if scope is None or "x-amz-s3session-token" in request.headers:
            return None
        return _Address(url, scope.group(1))


def _in_time(end: float | None) -> None:
    if end is not None and time.monotonic() > end:
        raise TimeoutError

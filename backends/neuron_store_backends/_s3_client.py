"""One process's way to S3: botocore, and short cuts for the requests that carry bytes.

botocore's client spends 4 to 5 ms of CPU on a request, most of it on looking up what the request
looks like (docs/performance.md). Where the bucket is, whose credentials and which proxies and
certificates are hard questions, and stay botocore's. A plain GET or PUT is an easy one: the client
is asked once how it would address an object, and after that such requests are signed by botocore's
signer and sent by `_s3_wire`. Where the client would sign in another way (S3 Express, multi-Region
access points), everything goes through the client.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from typing import TYPE_CHECKING, Any
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

from neuron_store_backends._s3_messages import Answer, Body, Request, S3Refusal, in_time, sign
from neuron_store_backends._s3_wire import Direct, Pooled, Session

if TYPE_CHECKING:
    from mmap import mmap

    from neuron_store_backends._options import Times
    from neuron_store_backends._s3_wire import Wire

__all__ = ["Known", "S3Client", "S3Options"]

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d{8}/([A-Za-z0-9-]+)/s3/aws4_request,")
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,60})\s*</Code>")
_REGION = re.compile(r"[a-z0-9-]{4,40}")
_UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
_MOST_TOLD = 64 << 10


@attrs.frozen
class S3Options:
    """What a tier's URL says of the place."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anon: bool = False
    addressing_style: str = "auto"


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


@functools.cache
def _data(path: str | None) -> Any:
    """The models that botocore reads, once for all tiers and for the children of a fork."""
    return botocore.loaders.create_loader(path)


@attrs.frozen
class Known:
    """What settings and environment say, found out once for a process and its children."""

    agent: str
    region: str | None
    wire: Wire
    addresses: dict[str, _Address | None]
    credentials: Any = attrs.field(repr=False)
    """botocore's, where they are fixed; None: to be looked for."""


class S3Client:
    """Connections, credentials and the client, for one process. Thread-safe."""

    def __init__(self, options: S3Options, times: Times, known: Known | None = None) -> None:
        """Args: options; times; known, what the client of a process that this one was forked from
        had found out, which takes 40 ms.
        """
        self._options = options
        self._times = times
        self._guard = threading.RLock()
        self._session: Any = None
        self._api: Any = None
        self._region = known.region if known else options.region
        self._wire: Wire | None = known.wire.anew() if known else None
        self._addresses: dict[str, _Address | None] = known.addresses if known else {}
        self._credentials: Any = known.credentials if known else None
        self._agent: str = known.agent if known else self._own_session().user_agent()
        if known is None:
            self._api = self._make()
        if self._credentials is None and not options.anon:
            self._credentials = self._own_session().get_credentials()

    def known(self) -> Known | None:
        """What a forked child may take over; None before anything is known."""
        if self._wire is None:
            return None
        # No others: those that are renewed have connections of their own to do so.
        fixed = type(self._credentials) is botocore.credentials.Credentials
        credentials = self._credentials if fixed else None
        return Known(self._agent, self._region, self._wire, dict(self._addresses), credentials)

    def learn(self, bucket: str) -> None:
        """Find out where a bucket is, as the first request to it would; nothing is sent there."""
        self._address(bucket)
        # Python's own, which is imported at the first look-up of a host.
        "localhost".encode("idna")

    @property
    def api(self) -> Any:
        """Botocore's own client, for everything that is neither GET nor PUT."""
        with self._guard:
            if self._api is None:
                self._api = self._make()
            return self._api

    def _own_session(self) -> Any:
        if self._session is None:
            self._session = botocore.session.Session(profile=self._options.profile)
            data = _data(self._session.get_config_variable("data_path"))
            self._session.register_component("data_loader", data)
        return self._session

    def _make(self) -> Any:
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
        return self._own_session().create_client(
            "s3",
            region_name=self._region,
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
        in_time(end)
        request = Request(
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
            sign(request, self._credentials.get_frozen_credentials(), address.region, payload)
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
            self._region = region
            self._api = self._make()
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
            named = self._own_session().get_config_variable("ca_bundle")
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

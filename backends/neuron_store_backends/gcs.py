"""`gs://bucket/prefix`: Google Cloud Storage, through gcsfs's session and credentials.

The requests are the JSON API's own (https://cloud.google.com/storage/docs/json_api): gcsfs tries
each six times with seconds between, tells most refusals by their text alone, and its simple upload
has a fixed MIME boundary that a payload may contain.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import io
import json
import os
import re
import uuid
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from neuron_store.errors import ConfigError
from neuron_store.tier_url import parse_bool
from neuron_store_backends._async_objects import AsyncObjects
from neuron_store_backends._objects import Blob
from neuron_store_backends._options import TIMES, Times, check_root, compression, require_module
from neuron_store_backends._options import times as read_times
from neuron_store_backends._trouble import GARBLED, Kind, Trouble, chain, network_trouble
from neuron_store_backends.conditional import ConditionalStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from neuron_store.tier_url import TierURL
    from neuron_store_backends._objects import Stored
    from neuron_store_backends._pieces import Pieces

__all__ = ["GCSStore"]

_OPTIONS = ("anon", "compress", "endpoint_url", "project", *TIMES)

_BUCKET = "the bucket does not exist; check its name, or make it"
_CREDENTIALS = (
    "no usable credentials; give them by Google's chain (gcloud auth application-default login, "
    "GOOGLE_APPLICATION_CREDENTIALS, a service account), or set anon=1"
)
_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_DENIED = (
    "access denied; the account needs the role Storage Object User (to read: Object Viewer) "
    "on the bucket"
)
_EXPIRED = "the credentials have expired or are not accepted; renew them (gcloud auth ... login)"
_BUSY = Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY)
_BROKEN = Trouble(Kind.TRANSIENT, "the connection broke, or a body was cut short", errno.ECONNRESET)
_BY_STATUS = {
    401: Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    403: Trouble(Kind.DENIED, _DENIED, errno.EACCES),
    404: Trouble(Kind.MISSING, "not there", errno.ENOENT),
    408: Trouble(Kind.TRANSIENT, "the store waited too long for us", errno.ETIMEDOUT),
    409: Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    410: Trouble(Kind.MISSING, "gone", errno.ENOENT),
    412: Trouble(Kind.PRECONDITION, "the condition did not hold"),
    416: Trouble(Kind.BEYOND, "the object ends before the range"),
    429: _BUSY,
    503: _BUSY,
}
# A session that ended well, its reply being lost, is told as one that never was.
_LOST = Trouble(Kind.FATAL, "the upload session was lost")
_AGAIN = Trouble(Kind.TRANSIENT, "the upload session was lost")
_SLOW_DOWN = re.compile(rb'"(userR|r)ateLimitExceeded"')
# 308 here means "go on", and is no redirect.
_RESUME = 308


def _unusable() -> str:
    """What to do about credentials that Google's library did not take. Never their content."""
    path = os.environ.get(_FILE)
    if not path:
        return _CREDENTIALS
    what = "is no credentials file" if os.path.isfile(path) else "does not exist or cannot be read"
    return f"{_FILE}={path} {what}; name a service account's key file, or unset it"


class _Refused(Exception):
    """An answer that is no success."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble
        super().__init__(trouble.reason)


class GCSObjects(AsyncObjects):
    """Objects in a bucket."""

    options: dict[str, Any]
    _bucket_seen = False

    def _preload(self) -> None:
        import gcsfs.core  # noqa: F401, PLC0415  (the extra; it takes a second)

    def _connect(self) -> Any:
        from gcsfs.core import GCSFileSystem  # noqa: PLC0415  (the extra; it takes a second)

        # Not `gcsfs.GCSFileSystem`: its experimental subclass asks an emulator for a minute.
        return GCSFileSystem(use_listings_cache=False, skip_instance_cache=True, **self.options)

    def classify(self, error: BaseException) -> Trouble:
        found = chain(error)
        for each in found:
            if isinstance(each, _Refused):
                return each.trouble
        names = {base.__name__ for each in found for base in type(each).__mro__}
        if "DefaultCredentialsError" in names:
            return Trouble(Kind.DENIED, _unusable(), errno.EACCES)
        trouble = network_trouble(error)
        if trouble is not None:
            return trouble
        if names & {"RefreshError", "GoogleAuthError"}:
            return Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES)
        if "ClientConnectorError" in names:
            return Trouble(Kind.UNREACHABLE, "cannot connect; check the endpoint and the network")
        if "ClientError" in names:
            return _BROKEN
        if isinstance(error, ValueError):
            return GARBLED
        return Trouble(Kind.FATAL, f"unexpected {type(error).__name__}")

    async def _send(
        self,
        fs: Any,
        method: str,
        url: str,
        *,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One request; raises `_Refused` for any answer but success and `_RESUME`."""
        import aiohttp  # noqa: PLC0415  (with the extra)

        await fs._set_session()  # noqa: SLF001  (its session and its credentials)
        # Refreshing a token is a blocking request of its own.
        signed = await asyncio.to_thread(fs._get_headers, dict(headers or {}))  # noqa: SLF001
        timeout = aiohttp.ClientTimeout(
            sock_connect=self.times.connect_timeout, sock_read=self.times.read_timeout
        )
        async with fs.session.request(
            method,
            url,
            params=dict(parameters or {}),
            headers={"Accept-Encoding": "identity", **signed},
            # As a stream: aiohttp warns of large bytes, since it writes them in one go.
            data=io.BytesIO(body) if body is not None else None,
            timeout=timeout,
            allow_redirects=False,
        ) as answer:
            data = bytearray()
            async for part in answer.content.iter_chunked(1 << 20):
                data += part
                if limit is not None and len(data) > limit:
                    break
            status: int = answer.status
            if 200 <= status < 300 or status == _RESUME:
                return status, answer.headers, bytes(data)
        raise _Refused(_answered(status, bytes(data[:4000])))

    def _object(self, fs: Any, path: str) -> str:
        bucket, name = path.split("/", 1)
        return f"{fs.base}b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"

    async def _get(self, fs: Any, path: str, limit: int) -> Blob:
        try:
            _, headers, data = await self._send(
                fs, "GET", self._object(fs, path), parameters={"alt": "media"}, limit=limit
            )
        except _Refused as error:
            if error.trouble.kind is Kind.MISSING and not self._bucket_seen:
                # GCS says 404 for both. Listing answers it, once for each store.
                await self._list_page(fs, self.root, {"maxResults": "1"})
            raise
        self._bucket_seen = True
        return Blob(
            data[: limit + 1],
            headers.get("X-Goog-Generation", ""),
            _moment(headers.get("Last-Modified")),
        )

    async def _create(self, fs: Any, path: str, data: bytes) -> None:
        await self._simple(fs, path, data, {"ifGenerationMatch": "0"})

    async def _replace(self, fs: Any, path: str, data: bytes, version: str) -> None:
        await self._simple(fs, path, data, {"ifGenerationMatch": version})

    def _uploads(self, fs: Any, path: str) -> tuple[str, bytes]:
        bucket, name = path.split("/", 1)
        url = f"{fs._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"  # noqa: SLF001
        return url, json.dumps({"name": name}).encode()

    async def _simple(
        self, fs: Any, path: str, data: bytes, condition: Mapping[str, str] | None = None
    ) -> None:
        # `multipart`: some servers ignore the condition of `media`.
        url, metadata = self._uploads(fs, path)
        boundary = uuid.uuid4().hex.encode()
        body = b"".join(
            (
                b"--%b\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n" % boundary,
                metadata,
                b"\r\n--%b\r\nContent-Type: application/octet-stream\r\n\r\n" % boundary,
                data,
                b"\r\n--%b--\r\n" % boundary,
            )
        )
        await self._send(
            fs,
            "POST",
            url,
            parameters={"uploadType": "multipart", **(condition or {})},
            headers={"Content-Type": f"multipart/related; boundary={boundary.decode()}"},
            body=body,
        )

    async def _upload(self, fs: Any, path: str, pieces: Pieces) -> None:
        if pieces.size <= pieces.length:
            data = await pieces.whole()
            await self.attempt(
                "upload",
                lambda now: self._simple(now, path, data),
                seconds=self.times.stall_timeout,
            )
            return
        url, metadata = self._uploads(fs, path)
        async with asyncio.timeout(self.times.stall_timeout):
            _, headers, _ = await self._send(
                fs,
                "POST",
                url,
                parameters={"uploadType": "resumable"},
                headers={"Content-Type": "application/json; charset=UTF-8"},
                body=metadata,
            )
        session, sum_, told = headers["Location"], hashlib.md5(usedforsecurity=False), b""

        async def send(number: int, piece: bytes) -> None:
            start, tried = number * pieces.length, 0
            await asyncio.to_thread(sum_.update, piece)

            async def once(now: Any) -> None:
                nonlocal tried, told
                tried += 1
                kept = start
                if tried > 1:
                    # After a lost reply only the server knows how far it got.
                    kept, told = await self._in_session(
                        now, session, f"bytes */{pieces.size}", b"", pieces.size
                    )
                last = start + len(piece) - 1
                while kept <= last:
                    if kept < start:
                        raise _Refused(_LOST)
                    content = f"bytes {kept}-{last}/{pieces.size}"
                    kept, told = await self._in_session(
                        now, session, content, piece[kept - start :], pieces.size
                    )

            await self.attempt("upload", once, seconds=self.times.stall_timeout)

        try:
            # A session takes its pieces one after another.
            await pieces.each(send, width=1)
        except BaseException as error:
            lost = [e for e in chain(error) if isinstance(e, _Refused) and e.trouble is _LOST]
            if lost and await self.is_there(fs, path, pieces.size):
                return
            await asyncio.shield(self._abort(fs, session))
            if lost:
                # Begun again from the start, once.
                raise _Refused(_AGAIN) from error
            raise
        async with asyncio.timeout(self.times.stall_timeout):
            await self._check(fs, path, told, pieces.size, sum_.digest())

    async def _in_session(
        self, fs: Any, session: str, content: str, piece: bytes, size: int
    ) -> tuple[int, bytes]:
        """Send a piece of a resumable upload, or ask how far it got.

        Gives the bytes that the server has of the whole, and its word on the object at the end.
        """
        try:
            status, headers, data = await self._send(
                fs, "PUT", session, headers={"Content-Range": content}, body=piece
            )
        except _Refused as error:
            if error.trouble.kind in {Kind.MISSING, Kind.BEYOND, Kind.FATAL}:
                raise _Refused(_LOST) from error
            raise
        if status != _RESUME:
            return size, data
        kept = headers.get("Range", "")
        return (int(kept.rsplit("-", 1)[1]) + 1 if "-" in kept else 0), b""

    async def _check(self, fs: Any, path: str, told: bytes, size: int, md5: bytes) -> None:
        """A session resumed wrongly would put wrong bytes at a name that promises others."""
        said = json.loads(told or b"{}")
        if int(said.get("size", size)) == size and said.get("md5Hash") in {
            None,
            base64.b64encode(md5).decode(),
        }:
            return
        generation = {"ifGenerationMatch": str(said["generation"])} if "generation" in said else {}
        try:
            await self._send(fs, "DELETE", self._object(fs, path), parameters=generation)
        except _Refused as error:
            if error.trouble.kind not in {Kind.MISSING, Kind.PRECONDITION}:
                raise
        raise _Refused(_AGAIN)

    async def _abort(self, fs: Any, session: str) -> None:
        try:
            async with asyncio.timeout(10):
                await self._send(fs, "DELETE", session)
        except Exception:  # noqa: BLE001, S110  (the first error is the one to tell; it expires in a week)
            pass

    async def _range(self, fs: Any, path: str, start: int, end: int) -> bytes:
        _, _, data = await self._send(
            fs,
            "GET",
            self._object(fs, path),
            parameters={"alt": "media"},
            headers={"Range": f"bytes={start}-{end - 1}"},
            limit=end - start,
        )
        return data

    async def _list_page(
        self, fs: Any, prefix: str, parameters: Mapping[str, str]
    ) -> Mapping[str, Any]:
        bucket, _, name = prefix.partition("/")
        try:
            _, _, data = await self._send(
                fs,
                "GET",
                f"{fs.base}b/{quote(bucket, safe='')}/o",
                parameters={"prefix": name + "/" if name else "", **parameters},
            )
        except _Refused as error:
            if error.trouble.kind is Kind.MISSING:
                raise _Refused(Trouble(Kind.FATAL, _BUCKET, errno.ENOENT)) from None
            raise
        self._bucket_seen = True
        page: Mapping[str, Any] = json.loads(data)
        return page

    async def _list(self, fs: Any, prefix: str) -> Mapping[str, Stored]:
        bucket = prefix.split("/", 1)[0]
        found: dict[str, Mapping[str, Any]] = {}
        more: dict[str, str] = {"fields": "items(name,size,updated),nextPageToken"}
        while True:
            page = await self._list_page(fs, prefix, more)
            for item in page.get("items", []):
                found[f"{bucket}/{item['name']}"] = {**item, "type": "file"}
            if not page.get("nextPageToken"):
                return self.sizes(prefix, found)
            more["pageToken"] = page["nextPageToken"]

    async def _remove(self, fs: Any, path: str) -> None:
        await self._send(fs, "DELETE", self._object(fs, path))


def _moment(text: str | None) -> float | None:
    """Unix seconds of an HTTP date."""
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None


def _answered(status: int, body: bytes) -> Trouble:
    if status == 404 and b"bucket does not exist" in body:
        return Trouble(Kind.FATAL, _BUCKET, errno.ENOENT)
    if status == 403 and _SLOW_DOWN.search(body):
        return _BUSY
    found = _BY_STATUS.get(status)
    if found is not None:
        return found
    if status >= 500:
        return Trouble(Kind.TRANSIENT, f"the store stumbled ({status})")
    return Trouble(Kind.FATAL, f"the store refused the request ({status})")


class GCSStore(ConditionalStore):
    """Artifacts in a bucket of Google Cloud Storage.

    Args:
        address: `bucket/prefix`.
        endpoint_url: of an emulator; else STORAGE_EMULATOR_HOST, else Google's.
        project: for requester-pays accounting only; else the credentials' own.
        anon: send unsigned requests.
        times: deadlines.
        name: short name for tables.
        read_only: leave no word of damage behind.
        compress: `zstd` stores each file compressed that shrinks by it.
    """

    def __init__(
        self,
        address: str,
        *,
        endpoint_url: str | None = None,
        project: str | None = None,
        anon: bool = False,
        times: Times | None = None,
        name: str | None = None,
        read_only: bool = False,
        compress: str | None = None,
    ) -> None:
        location = f"gs://{address.strip('/')}"
        require_module("gcsfs", "gcs", location)
        objects = GCSObjects(location, check_root(address, location), times)
        objects.identity = f"{location} {endpoint_url}"
        objects.options = {"token": "anon" if anon else "google_default"}
        if endpoint_url:
            objects.options["endpoint_url"] = endpoint_url.rstrip("/")
        if project or anon:
            # Without one gcsfs warns at each instance; only making buckets needs it.
            objects.options["project"] = project or "none"
        super().__init__(objects, name=name, read_only=read_only, compress=compress)

    @classmethod
    def from_url(cls, url: TierURL) -> GCSStore:
        """Open the tier of a URL.

        Raises:
            ConfigError: an option is unknown or cannot be used.
            MissingExtra: gcsfs is not installed.
        """
        options = url.checked_options(_OPTIONS)
        where = f"tier {url.location}"
        endpoint = options.get("endpoint_url")
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"{where}: endpoint_url={endpoint!r} is not an http(s) URL")
        return cls(
            url.address,
            endpoint_url=endpoint,
            project=options.get("project"),
            anon=parse_bool(options.get("anon", "0"), what=f"{where}: anon"),
            times=read_times(options, where),
            name=url.name,
            read_only=url.read_only,
            compress=compression(options, where),
        )

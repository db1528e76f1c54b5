"""`s3://bucket/prefix`: Amazon S3 and servers that speak its language, through s3fs."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any

from neuron_store.errors import ConfigError, TierError
from neuron_store.tier_url import parse_bool
from neuron_store_backends._objects import PIECE, Blob, Objects, Unfinished
from neuron_store_backends._options import TIMES, Times, check_root, require_module
from neuron_store_backends._options import times as read_times
from neuron_store_backends._trouble import Kind, Trouble, chain, network_trouble, tls_trouble
from neuron_store_backends.conditional import ConditionalStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.tier_url import TierURL
    from neuron_store_backends._objects import Pieces, Stored

__all__ = ["S3Store"]

_OPTIONS = (
    "addressing_style",
    "anon",
    "endpoint_url",
    "path_style",
    "profile",
    "region",
    *TIMES,
)

_BUCKET = "the bucket does not exist there; check its name, the region and the endpoint, or make it"
_CREDENTIALS = (
    "no usable credentials; give them by the AWS chain (AWS_PROFILE, environment, role), "
    "or set anon=1 for a public bucket"
)
_DENIED = (
    "access denied; the credentials need s3:GetObject, s3:PutObject and s3:ListBucket here "
    "(without the last, S3 answers 403 for an object that is not there)"
)
_EXPIRED = "the credentials have expired; renew them (aws sso login, a new session token)"
_CLOCK = "this machine's clock is off by more than S3 accepts; set it"
_KEYS = "the access key is not known there, or does not match its secret; check the credentials"
_NO_S3 = (
    "the server answers 404 and not S3's NoSuchKey; is this an S3 endpoint? "
    "check endpoint_url in the tier's URL"
)
_NO_UPLOAD = "the upload was aborted by somebody else (a life-cycle rule?)"
_REGION = "the bucket is in another region; set region=... in the tier's URL"

# By the error code of the answer; what is not here goes by the HTTP status.
_BY_CODE = {
    "NoSuchKey": Trouble(Kind.MISSING, "not there", errno.ENOENT),
    "NoSuchBucket": Trouble(Kind.FATAL, _BUCKET, errno.ENOENT),
    "NoSuchUpload": Trouble(Kind.FATAL, _NO_UPLOAD),
    "PreconditionFailed": Trouble(Kind.PRECONDITION, "the condition did not hold"),
    "ConditionalRequestConflict": Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    "OperationAborted": Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    "SlowDown": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "Throttling": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "ThrottlingException": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "RequestLimitExceeded": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "RequestTimeout": Trouble(Kind.TRANSIENT, "the store waited too long for us", errno.ETIMEDOUT),
    "IncompleteBody": Trouble(Kind.TRANSIENT, "the store got a body cut short"),
    "BadDigest": Trouble(Kind.TRANSIENT, "the store got other bytes than were sent"),
    "XAmzContentSHA256Mismatch": Trouble(Kind.TRANSIENT, "the store got other bytes than sent"),
    "ExpiredToken": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "ExpiredTokenException": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "TokenRefreshRequired": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "InvalidToken": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "InvalidAccessKeyId": Trouble(Kind.DENIED, _KEYS, errno.EACCES),
    "SignatureDoesNotMatch": Trouble(Kind.DENIED, _KEYS, errno.EACCES),
    "RequestTimeTooSkewed": Trouble(Kind.DENIED, _CLOCK, errno.EACCES),
    "AuthorizationHeaderMalformed": Trouble(Kind.FATAL, _REGION, errno.EINVAL),
    "PermanentRedirect": Trouble(Kind.FATAL, _REGION, errno.EREMCHG),
    "TemporaryRedirect": Trouble(Kind.TRANSIENT, "the store redirects (a new bucket)"),
    "IllegalLocationConstraintException": Trouble(Kind.FATAL, _REGION, errno.EINVAL),
    "InvalidBucketName": Trouble(Kind.FATAL, _BUCKET, errno.EINVAL),
    "QuotaExceeded": Trouble(Kind.FATAL, "the store is full; free space", errno.ENOSPC),
}
_BY_STATUS = {
    301: Trouble(Kind.FATAL, _REGION, errno.EREMCHG),
    401: Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
    403: Trouble(Kind.DENIED, _DENIED, errno.EACCES),
    # An object that is not there has the code NoSuchKey: any web server says 404.
    404: Trouble(Kind.FATAL, _NO_S3, errno.ENOENT),
    409: Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    412: Trouble(Kind.PRECONDITION, "the condition did not hold"),
    416: Trouble(Kind.BEYOND, "the object ends before the range"),
    429: Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    503: Trouble(Kind.THROTTLED, "the store is busy (503)", errno.EBUSY),
    507: Trouble(Kind.FATAL, "the store is full; free space", errno.ENOSPC),
}
# By name of the botocore exception, so that nothing need be imported to look one up.
_BY_CLIENT = {
    "NoCredentialsError": Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
    "PartialCredentialsError": Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
    "CredentialRetrievalError": Trouble(Kind.EXPIRED, _CREDENTIALS, errno.EACCES),
    "MetadataRetrievalError": Trouble(Kind.EXPIRED, _CREDENTIALS, errno.EACCES),
    "TokenRetrievalError": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "UnauthorizedSSOTokenError": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "SSOTokenLoadError": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "ProfileNotFound": Trouble(
        Kind.FATAL, "the AWS profile does not exist; check profile=... and ~/.aws/config"
    ),
    "NoRegionError": Trouble(Kind.FATAL, "no region; set region=... in the tier's URL"),
    "InvalidRegionError": Trouble(Kind.FATAL, "no such region; check region=..."),
    "ParamValidationError": Trouble(Kind.FATAL, _BUCKET, errno.EINVAL),
    "ConnectTimeoutError": Trouble(
        Kind.UNREACHABLE, "no connection in time; check endpoint and network", errno.ETIMEDOUT
    ),
    "ReadTimeoutError": Trouble(Kind.TRANSIENT, "no answer in time", errno.ETIMEDOUT),
    "SSLError": tls_trouble(),
}
_BROKEN = Trouble(Kind.TRANSIENT, "the connection broke, or a body was cut short", errno.ECONNRESET)
_NO_ENDPOINT = Trouble(
    Kind.UNREACHABLE, "cannot connect; check the endpoint, and that the server runs"
)


class S3Objects(Objects):
    """Objects in a bucket, through s3fs."""

    options: dict[str, Any]

    def _connect(self) -> Any:
        import s3fs  # noqa: PLC0415  (the extra; it takes a second)

        fs = s3fs.S3FileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            default_block_size=PIECE,
            # One: else every whole read asks for the size first.
            max_concurrency=1,
            **self.options,
        )
        # Deadlines and back-off are `Objects.tries`'s; below it they would multiply.
        fs.retries = 1
        return fs

    def classify(self, error: BaseException) -> Trouble:
        for each in chain(error):
            response = getattr(each, "response", None)
            if isinstance(response, dict) and "Error" in response:
                return _answered(response)
        for each in chain(error):
            for base in type(each).__mro__:
                if base.__name__ in _BY_CLIENT:
                    return _BY_CLIENT[base.__name__]
        trouble = network_trouble(error)
        if trouble is not None:
            return trouble
        names = {base.__name__ for each in chain(error) for base in type(each).__mro__}
        if "EndpointConnectionError" in names:
            return _NO_ENDPOINT
        if names & {"HTTPClientError", "ClientError", "IncompleteReadError", "ResponseParserError"}:
            return _BROKEN
        return Trouble(Kind.FATAL, f"unexpected {type(error).__name__}")

    async def _get(self, fs: Any, path: str, limit: int) -> Blob:
        bucket, name, _ = fs.split_path(path)
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=name)  # noqa: SLF001  (fsspec's async side)
        data = bytearray()
        async with answer["Body"] as body:
            while len(data) <= limit and (part := await body.read(min(limit + 1, PIECE))):
                data += part
        modified = answer.get("LastModified")
        return Blob(
            bytes(data[: limit + 1]),
            answer["ETag"],
            modified.timestamp() if modified is not None else None,
        )

    async def _create(self, fs: Any, path: str, data: bytes) -> None:
        await self._put(fs, path, data, IfNoneMatch="*")

    async def _replace(self, fs: Any, path: str, data: bytes, version: str) -> None:
        await self._put(fs, path, data, IfMatch=version)

    async def _put(self, fs: Any, path: str, data: bytes, **condition: str) -> None:
        # Not `pipe_file(mode="create")`: it turns a 412 without its condition element, and every
        # 409, into errors that cannot be told from others; and above a size it sends the
        # condition with the end of a multipart upload, which some servers ignore.
        bucket, name, _ = fs.split_path(path)
        await fs._call_s3("put_object", Bucket=bucket, Key=name, Body=data, **condition)  # noqa: SLF001  (fsspec's async side)

    async def _list(self, fs: Any, prefix: str) -> Mapping[str, Stored]:
        # Not `_find`: where a listing is empty it asks twice more whether that is really so.
        bucket, name, _ = fs.split_path(prefix)
        found = fs._iterdir(bucket, delimiter="", prefix=name + "/")  # noqa: SLF001  (fsspec's async side)
        return self.sizes(prefix, {info["name"]: info async for info in found})

    async def _unfinished(self, fs: Any, prefix: str) -> Sequence[Unfinished]:
        bucket, name, _ = fs.split_path(prefix)
        found, following = [], dict[str, str]()
        while True:
            page = await fs._call_s3(  # noqa: SLF001  (fsspec's async side)
                "list_multipart_uploads", Bucket=bucket, Prefix=name + "/", **following
            )
            for upload in page.get("Uploads", ()):
                # Some servers ignore the prefix, and others' uploads are not ours to end.
                if upload["Key"].startswith(name + "/"):
                    size = await self._parts(fs, bucket, upload["Key"], upload["UploadId"])
                    found.append(
                        Unfinished(
                            f"{bucket}/{upload['Key']}",
                            upload["UploadId"],
                            upload["Initiated"].timestamp(),
                            size,
                        )
                    )
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            following = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    async def _parts(self, fs: Any, bucket: str, name: str, upload: str) -> int:
        """Bytes of the parts of an upload: of the first thousand, which is most that we make."""
        try:
            page = await fs._call_s3("list_parts", Bucket=bucket, Key=name, UploadId=upload)  # noqa: SLF001  (fsspec's async side)
        except Exception as error:
            if self.classify(error).kind in {Kind.MISSING, Kind.FATAL, Kind.DENIED}:
                return 0  # it ended meanwhile, or may not be looked at; the size is only told
            raise
        return sum(int(part["Size"]) for part in page.get("Parts", ()))

    async def _abandon(self, fs: Any, upload: Unfinished) -> None:
        bucket, name, _ = fs.split_path(upload.path)
        try:
            await fs._call_s3(  # noqa: SLF001  (fsspec's async side)
                "abort_multipart_upload", Bucket=bucket, Key=name, UploadId=upload.id
            )
        except Exception as error:
            if self.classify(error).reason != _NO_UPLOAD:
                raise

    async def _upload(self, fs: Any, path: str, pieces: Pieces) -> None:
        bucket, name, _ = fs.split_path(path)
        where = {"Bucket": bucket, "Key": name}
        if pieces.size <= pieces.length:
            body = await pieces.whole()
            await self._tried(fs, "put_object", Body=body, **where)
            return
        started = await self._tried(fs, "create_multipart_upload", **where)
        where["UploadId"] = started["UploadId"]

        async def send(number: int, piece: bytes) -> dict[str, Any]:
            part = await self._tried(fs, "upload_part", PartNumber=number + 1, Body=piece, **where)
            return {"PartNumber": number + 1, "ETag": part["ETag"]}

        try:
            parts = await pieces.each(send)
            await self._complete(fs, path, pieces.size, parts, where)
        except BaseException:
            # Parts that stay behind cost money and are seen by nobody. Shielded: an interrupt
            # cancels this task.
            await asyncio.shield(self._abort(fs, where))
            raise

    async def _complete(
        self,
        fs: Any,
        path: str,
        size: int,
        parts: list[dict[str, Any]],
        where: dict[str, str],
    ) -> None:
        try:
            await self._tried(
                fs, "complete_multipart_upload", MultipartUpload={"Parts": parts}, **where
            )
        except TierError as error:
            if not error.reason.startswith(_NO_UPLOAD):
                raise
            if not await self.is_there(fs, path, size):
                raise

    async def _abort(self, fs: Any, where: dict[str, str]) -> None:
        try:
            async with asyncio.timeout(10):
                await fs._call_s3("abort_multipart_upload", **where)  # noqa: SLF001  (fsspec's async side)
        except Exception:  # noqa: BLE001, S110  (the first error is the one to tell)
            pass

    async def _tried(self, fs: Any, method: str, **arguments: Any) -> Any:
        async def once(_fs: Any) -> Any:
            return await fs._call_s3(method, **arguments)  # noqa: SLF001  (fsspec's async side)

        return await self.tries("upload", once, seconds=self.times.stall_timeout)


def _answered(response: dict[str, Any]) -> Trouble:
    code = str(response["Error"].get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if not isinstance(status, int):
        status = int(code) if code.isdigit() else 0
    found = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if found is not None:
        return found
    if status >= 500:
        return Trouble(Kind.TRANSIENT, f"the store stumbled ({status})")
    return Trouble(Kind.FATAL, f"the store refused the request ({status} {code[:60]})")


class S3Store(ConditionalStore):
    """Artifacts in a bucket.

    Args:
        address: `bucket/prefix`.
        endpoint_url: for servers other than Amazon's.
        region: of the bucket; else the AWS chain's.
        profile: of `~/.aws/config`; else the AWS chain's.
        anon: send unsigned requests.
        addressing_style: `path`, `virtual` or `auto` (which is `path` with an endpoint_url).
        times: deadlines.
        name: short name for tables.
        read_only: leave no word of damage behind.
    """

    def __init__(
        self,
        address: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        anon: bool = False,
        addressing_style: str = "auto",
        times: Times | None = None,
        name: str | None = None,
        read_only: bool = False,
    ) -> None:
        location = f"s3://{address.strip('/')}"
        require_module("s3fs", "s3", location)
        root = check_root(address, location)
        times = times or Times()
        if addressing_style not in {"auto", "path", "virtual"}:
            raise ConfigError(
                f"tier {location}: addressing_style={addressing_style!r}; use path, virtual or auto"
            )
        if addressing_style == "auto" and endpoint_url:
            addressing_style = "path"
        config: dict[str, Any] = {
            "connect_timeout": times.connect_timeout,
            "read_timeout": times.read_timeout,
            "max_pool_connections": 32,
            "retries": {"total_max_attempts": 1},
            "s3": {"addressing_style": addressing_style},
        }
        if endpoint_url:
            # Many servers do not know the checksums that botocore adds by default; digests of our
            # own are checked end to end.
            config["request_checksum_calculation"] = "when_required"
            config["response_checksum_validation"] = "when_required"
        objects = S3Objects(location, root, times)
        objects.identity = f"{location} {endpoint_url} {region} {profile}"
        objects.options = {"anon": anon, "config_kwargs": config}
        if endpoint_url:
            objects.options["endpoint_url"] = endpoint_url
        if region:
            objects.options["client_kwargs"] = {"region_name": region}
        if profile:
            objects.options["profile"] = profile
        super().__init__(objects, name=name, read_only=read_only)

    @classmethod
    def from_url(cls, url: TierURL) -> S3Store:
        """Open the tier of a URL.

        Raises:
            ConfigError: an option is unknown or cannot be used.
            MissingExtra: s3fs is not installed.
        """
        options = url.checked_options(_OPTIONS)
        where = f"tier {url.location}"
        style = options.get("addressing_style", "auto")
        if "path_style" in options:
            path = parse_bool(options["path_style"], what=f"{where}: path_style")
            style = "path" if path else "virtual"
        endpoint = options.get("endpoint_url")
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"{where}: endpoint_url={endpoint!r} is not an http(s) URL")
        return cls(
            url.address,
            endpoint_url=endpoint,
            region=options.get("region"),
            profile=options.get("profile"),
            anon=parse_bool(options.get("anon", "0"), what=f"{where}: anon"),
            addressing_style=style,
            name=url.name,
            read_only=url.read_only,
            times=read_times(options, where),
        )

"""`az://container/prefix` and `abfs://container@account.dfs.core.windows.net/prefix`: Azure Blob
Storage, through adlfs.
"""

from __future__ import annotations

import base64
import errno
import io
import os
import uuid
from typing import TYPE_CHECKING, Any

from neuron_store.errors import ConfigError
from neuron_store.tier_url import parse_bool
from neuron_store_backends._async_objects import AsyncObjects
from neuron_store_backends._objects import Blob, Stored
from neuron_store_backends._options import TIMES, Times, check_root, compression, require_module
from neuron_store_backends._options import times as read_times
from neuron_store_backends._trouble import GARBLED, Kind, Trouble, chain, network_trouble
from neuron_store_backends.conditional import ConditionalStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from neuron_store.tier_url import TierURL
    from neuron_store_backends._pieces import Pieces

__all__ = ["AzureStore"]

_OPTIONS = ("account_name", "anon", "compress", *TIMES)

_CONTAINER = "the container does not exist in that account; check its name, or make it"
_CREDENTIALS = (
    "no usable credentials; give them by Azure's chain (az login, a managed identity, "
    "AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCOUNT_KEY), or set anon=1"
)
_MALFORMED = (
    "{} is set and cannot be used; check its value (as the portal or `az storage account "
    "show-connection-string` gives it), or unset it to use az login or a managed identity"
)
_DENIED = (
    "access denied; the identity needs the role Storage Blob Data Contributor (to read: Reader) "
    "on the container; an account key or a SAS must be that account's, and not expired"
)
_EXPIRED = (
    "not authenticated: the credentials have expired, are wrong, or this machine's clock is off; "
    "renew them (az login, a new SAS)"
)
_NO_AZURE = (
    "the server answers 404 and not Azure's BlobNotFound; is this a Blob Storage endpoint? "
    "check the account's name and the connection string"
)
_BUSY = Trouble(Kind.THROTTLED, "the account asks to slow down", errno.EBUSY)

# Larger bodies go as a block, which takes a stream: aiohttp warns of large bytes, since it writes
# them in one go.
_ONE_PUT = 1 << 20

# By the x-ms-error-code of the answer; what is not here goes by the HTTP status.
_BY_CODE = {
    "BlobNotFound": Trouble(Kind.MISSING, "not there", errno.ENOENT),
    "ResourceNotFound": Trouble(Kind.MISSING, "not there", errno.ENOENT),
    "ContainerNotFound": Trouble(Kind.FATAL, _CONTAINER, errno.ENOENT),
    "ContainerBeingDeleted": Trouble(Kind.FATAL, _CONTAINER, errno.ENOENT),
    "ContainerDisabled": Trouble(Kind.FATAL, _CONTAINER, errno.ENOENT),
    "BlobAlreadyExists": Trouble(Kind.PRECONDITION, "exists"),
    "ConditionNotMet": Trouble(Kind.PRECONDITION, "the condition did not hold"),
    "TargetConditionNotMet": Trouble(Kind.PRECONDITION, "the condition did not hold"),
    # What a credential that may create and not overwrite is told.
    "UnauthorizedBlobOverwrite": Trouble(Kind.PRECONDITION, "exists"),
    "LeaseIdMissing": Trouble(Kind.FATAL, "somebody holds an Azure lease on the blob; break it"),
    "InvalidRange": Trouble(Kind.BEYOND, "the blob ends before the range"),
    # The uncommitted blocks of a blob go when anybody commits it.
    "InvalidBlockList": Trouble(Kind.TRANSIENT, "another upload of the same blob came between"),
    "InvalidBlobOrBlock": Trouble(Kind.TRANSIENT, "another upload of the same blob came between"),
    "Md5Mismatch": Trouble(Kind.TRANSIENT, "the store got other bytes than were sent"),
    "ServerBusy": _BUSY,
    "OperationTimedOut": _BUSY,
    "AuthenticationFailed": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "InvalidAuthenticationInfo": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "NoAuthenticationInformation": Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
    "PublicAccessNotPermitted": Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
}
_BY_STATUS = {
    401: Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    403: Trouble(Kind.DENIED, _DENIED, errno.EACCES),
    # A blob that is not there has the code BlobNotFound: any web server says 404.
    404: Trouble(Kind.FATAL, _NO_AZURE, errno.ENOENT),
    409: Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    412: Trouble(Kind.PRECONDITION, "the condition did not hold"),
    416: Trouble(Kind.BEYOND, "the blob ends before the range"),
    429: _BUSY,
    503: _BUSY,
}
_BROKEN = Trouble(Kind.TRANSIENT, "the connection broke, or a body was cut short", errno.ECONNRESET)
_NO_ENDPOINT = Trouble(
    Kind.UNREACHABLE, "cannot connect; check the account's name, the endpoint and the network"
)


def _unusable() -> str:
    """What to do about credentials that the client cannot even read. Never their value."""
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY"):
        if os.environ.get(name):
            return _MALFORMED.format(name)
    return _CREDENTIALS


class _Unusable(Exception):
    """adlfs refuses the connection string or the account."""


class AzureObjects(AsyncObjects):
    """Objects in a container, through adlfs."""

    options: dict[str, Any]

    def _preload(self) -> None:
        import adlfs  # noqa: F401, PLC0415  (the extra; it takes a second)

    def _connect(self) -> Any:
        import adlfs  # noqa: PLC0415  (the extra; it takes a second)

        try:
            return adlfs.AzureBlobFileSystem(
                use_listings_cache=False, skip_instance_cache=True, **self.options
            )
        except ValueError as error:
            raise _Unusable from error

    def classify(self, error: BaseException) -> Trouble:
        found = chain(error)
        for each in found:
            status = getattr(each, "status_code", None)
            if isinstance(status, int):
                return _answered(status, getattr(each, "error_code", None))
        trouble = network_trouble(error)
        if trouble is not None:
            return trouble
        names = {base.__name__ for each in found for base in type(each).__mro__}
        if names & {"CredentialUnavailableError", "ClientAuthenticationError"}:
            return Trouble(Kind.EXPIRED, _CREDENTIALS, errno.EACCES)
        if names & {"ServiceResponseError", "IncompleteReadError", "ClientPayloadError"}:
            return _BROKEN
        if "ServiceRequestError" in names:
            return _NO_ENDPOINT
        if "HttpResponseError" in names:
            return _BROKEN
        if isinstance(error, _Unusable):
            return Trouble(Kind.FATAL, _unusable(), errno.EACCES)
        if isinstance(error, ValueError):
            return GARBLED
        return Trouble(Kind.FATAL, f"unexpected {type(error).__name__}")

    @property
    def _limits(self) -> dict[str, Any]:
        """For each request: its time-outs, and no tries of the client's own (15 s apart)."""
        return {
            "connection_timeout": self.times.connect_timeout,
            "read_timeout": self.times.read_timeout,
            "retry_total": 0,
        }

    def _blob(self, fs: Any, path: str) -> Any:
        container, name = path.split("/", 1)
        return fs.service_client.get_blob_client(container, name)

    async def _get(self, fs: Any, path: str, limit: int) -> Blob:
        blob = self._blob(fs, path)
        try:
            stream = await blob.download_blob(0, limit + 1, **self._limits)
        except Exception as error:
            if self.classify(error).kind is not Kind.BEYOND:
                raise
            # No range of an empty blob can be had, not even the first.
            found = await blob.get_blob_properties(**self._limits)
            return Blob(b"", found.etag, found.last_modified.timestamp())
        found = stream.properties
        return Blob(await stream.readall(), found.etag, found.last_modified.timestamp())

    async def _put(self, fs: Any, path: str, data: bytes, **condition: Any) -> None:
        blob = self._blob(fs, path)
        if len(data) <= _ONE_PUT:
            overwrite = bool(condition.get("etag")) or not condition
            if not overwrite:
                condition = {}  # it stands for If-None-Match: *
            await blob.upload_blob(data, overwrite=overwrite, **condition, **self._limits)
            return
        name = _block_name(uuid.uuid4().hex, 0)
        await blob.stage_block(name, io.BytesIO(data), length=len(data), **self._limits)
        await blob.commit_block_list([_block(name)], **condition, **self._limits)

    async def _create(self, fs: Any, path: str, data: bytes) -> None:
        from azure.core import MatchConditions  # noqa: PLC0415  (the extra)

        await self._put(fs, path, data, match_condition=MatchConditions.IfMissing)

    async def _replace(self, fs: Any, path: str, data: bytes, version: str) -> None:
        from azure.core import MatchConditions  # noqa: PLC0415  (the extra)

        unchanged = MatchConditions.IfNotModified
        await self._put(fs, path, data, etag=version, match_condition=unchanged)

    async def _upload(self, fs: Any, path: str, pieces: Pieces) -> None:
        blob = self._blob(fs, path)
        if pieces.size <= pieces.length:
            data = await pieces.whole()
            await self.attempt(
                "upload",
                lambda now: self._put(now, path, data),
                seconds=self.times.stall_timeout,
            )
            return
        mine = uuid.uuid4().hex

        async def send(number: int, piece: bytes) -> Any:
            name = _block_name(mine, number)
            await self.attempt(
                "upload",
                lambda _fs: blob.stage_block(
                    name, io.BytesIO(piece), length=len(piece), **self._limits
                ),
                seconds=self.times.stall_timeout,
            )
            return _block(name)

        blocks = await pieces.each(send)
        try:
            await blob.commit_block_list(blocks, **self._limits)
        except Exception:
            if not await self.is_there(fs, path, pieces.size):
                raise

    async def _range(self, fs: Any, path: str, start: int, end: int) -> bytes:
        stream = await self._blob(fs, path).download_blob(start, end - start, **self._limits)
        data: bytes = await stream.readall()
        return data

    async def _list(self, fs: Any, prefix: str) -> Mapping[str, Stored]:
        container, name = prefix.split("/", 1)
        found = {}
        client = fs.service_client.get_container_client(container)
        async for blob in client.list_blobs(name_starts_with=name + "/", **self._limits):
            moment = blob.last_modified
            found[f"{container}/{blob.name}"] = Stored(
                blob.size, moment.timestamp() if moment is not None else None
            )
        return found

    async def _remove(self, fs: Any, path: str) -> None:
        await self._blob(fs, path).delete_blob(**self._limits)


def _block_name(upload: str, number: int) -> str:
    # Ids of one blob must all have the same length.
    return base64.b64encode(f"{upload}{number:08d}".encode()).decode()


def _block(name: str) -> Any:
    from azure.storage.blob import BlobBlock  # noqa: PLC0415  (the extra)

    return BlobBlock(block_id=name)


def _answered(status: int, code: Any) -> Trouble:
    # An enum that is a str, or a str that the enum does not know.
    found = _BY_CODE.get(str(getattr(code, "value", code))) or _BY_STATUS.get(status)
    if found is not None:
        return found
    if status >= 500 or status == 408:
        return Trouble(Kind.TRANSIENT, f"the store stumbled ({status})")
    shown = str(getattr(code, "value", code) or "")[:60]
    return Trouble(Kind.FATAL, f"the store refused the request ({status} {shown})")


class AzureStore(ConditionalStore):
    """Artifacts in a container of Azure Blob Storage.

    The account's key, SAS or connection string come from adlfs's environment variables, else from
    Azure's default chain.

    Args:
        address: `container/prefix`, or `container@account.dfs.core.windows.net/prefix`.
        account_name: else AZURE_STORAGE_ACCOUNT_NAME, or the connection string's.
        anon: send unsigned requests.
        times: deadlines.
        name: short name for tables.
        read_only: leave no word of damage behind.
        compress: `zstd` stores each file compressed that shrinks by it.
        scheme: for messages: `az` or `abfs`.
    """

    def __init__(
        self,
        address: str,
        *,
        account_name: str | None = None,
        anon: bool = False,
        times: Times | None = None,
        name: str | None = None,
        read_only: bool = False,
        compress: str | None = None,
        scheme: str = "az",
    ) -> None:
        location = f"{scheme}://{address.strip('/')}"
        require_module("adlfs", "azure", location)
        root = check_root(address, location)
        container, _, prefix = root.partition("/")
        if "@" in container:
            container, host = container.split("@", 1)
            account_name = account_name or host.split(".", 1)[0]
        if not container:
            raise ConfigError(f"tier {location}: no container; write az://container/prefix")
        options: dict[str, Any] = {}
        if account_name:
            options["account_name"] = account_name
        if anon:
            options["anon"] = True
        objects = AzureObjects(location, f"{container}/{prefix}".rstrip("/"), times)
        objects.identity = f"{location} {account_name}"
        objects.options = options
        super().__init__(objects, name=name, read_only=read_only, compress=compress)

    @classmethod
    def from_url(cls, url: TierURL) -> AzureStore:
        """Open the tier of a URL.

        Raises:
            ConfigError: an option is unknown or cannot be used.
            MissingExtra: adlfs is not installed.
        """
        options = url.checked_options(_OPTIONS)
        where = f"tier {url.location}"
        return cls(
            url.address,
            account_name=options.get("account_name"),
            anon=parse_bool(options.get("anon", "0"), what=f"{where}: anon"),
            times=read_times(options, where),
            name=url.name,
            read_only=url.read_only,
            compress=compression(options, where),
            scheme=url.scheme,
        )

"""Objects in a bucket, in the threads that want them."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from neuron_store.errors import TierError
from neuron_store.tier_health import Stalled, bounded
from neuron_store_backends._crew import crew
from neuron_store_backends._objects import PIECE, Blob, Objects, Parcel, Stored, Unfinished
from neuron_store_backends._parcels import read_parcel
from neuron_store_backends._s3_errors import NO_UPLOAD, classify
from neuron_store_backends._s3_receiving import Incoming, IncomingBundle, Reader
from neuron_store_backends._streaming import Outgoing
from neuron_store_backends._trouble import Missing, Trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from mmap import mmap
    from pathlib import Path

    from neuron_store.artifact import ArtifactFile
    from neuron_store_backends._options import Times
    from neuron_store_backends._s3_client import S3Client

__all__ = ["S3Objects"]

T = TypeVar("T")


class S3Objects(Objects):
    """Objects in a bucket, through botocore.

    Args:
        location, root, times: as `Objects`.
        place: the fields of `S3Options`.
    """

    def __init__(self, location: str, root: str, times: Times, **place: Any) -> None:
        super().__init__(location, root, times)
        self._place = place

    def _preload(self) -> None:
        self.handle().learn(self.root.partition("/")[0])

    def _connect(self) -> S3Client:
        from neuron_store_backends._s3_client import (  # noqa: PLC0415  (the extra; it takes time)
            S3Client,
            S3Options,
        )

        ancestor = self._inherited()
        known = None if ancestor is None else ancestor.known()
        return S3Client(S3Options(**self._place), self.times, known)

    def classify(self, error: BaseException) -> Trouble:
        return classify(error)

    # -- small requests -------------------------------------------------------------------------

    def _read(self, path: str, limit: int, key: str | None) -> Blob:
        def make(client: S3Client, end: float | None) -> Blob:
            data = bytearray()
            with client.get(path, end=end) as answer:
                while len(data) <= limit and (chunk := answer.read()):
                    data += chunk
                return Blob(bytes(data[: limit + 1]), answer.version, answer.modified)

        return self.tries("read", make, key=key, seconds=self.times.timeout)

    def _create_if_absent(self, path: str, data: bytes, key: str | None) -> None:
        self._put("create", path, data, ("IfNoneMatch", "*"), key)

    def _replace_if_same(self, path: str, data: bytes, version: str, key: str | None) -> None:
        self._put("replace", path, data, ("IfMatch", version), key)

    def _put(
        self, operation: str, path: str, data: bytes, condition: tuple[str, str], key: str | None
    ) -> None:
        digest = hashlib.sha256(data).hexdigest()

        def make(client: S3Client, end: float | None) -> None:
            client.put(path, data, end=end, sha256=digest, condition=condition)

        self.tries(operation, make, key=key, seconds=self.times.timeout)

    def _listing(self, prefix: str, key: str | None, seconds: float) -> Mapping[str, Stored]:
        bucket, _, name = prefix.partition("/")

        def make(client: S3Client, end: float | None) -> Mapping[str, Stored]:
            # Not botocore's paginator: to make one it looks through the models of all services.
            ask = partial(client.api.list_objects_v2, Bucket=bucket, Prefix=name + "/")
            listed: dict[str, Stored] = {}
            following = dict[str, str]()
            while True:
                page = self._in_time(partial(ask, **following), end)
                for found in page.get("Contents", ()):
                    path, when = f"{bucket}/{found['Key']}", found["LastModified"].timestamp()
                    listed[path] = Stored(found["Size"], when)
                if not page.get("IsTruncated"):
                    return listed
                token = page.get("NextContinuationToken")
                if not token or token == following.get("ContinuationToken"):
                    reason = "the store cuts a listing short and does not say how to go on"
                    raise TierError(self.location, "list", reason, key=key)
                following = {"ContinuationToken": token}

        return self.tries("list", make, key=key, seconds=seconds)

    def _delete(self, path: str, key: str | None) -> None:
        self._call("delete", "delete_object", key, self.times.timeout, **_where(path))

    # -- uploads that nobody ended ----------------------------------------------------------------

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        bucket, _, name = prefix.partition("/")
        found, following = [], dict[str, str]()
        while True:
            page = self._call(
                "list",
                "list_multipart_uploads",
                None,
                self.times.timeout,
                Bucket=bucket,
                Prefix=name + "/",
                **following,
            )
            for upload in page.get("Uploads", ()):
                # Some servers ignore the prefix, and others' uploads are not ours to end.
                if upload["Key"].startswith(name + "/"):
                    where = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    path, started = f"{bucket}/{upload['Key']}", upload["Initiated"].timestamp()
                    found.append(Unfinished(path, upload["UploadId"], started, self._parts(where)))
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            following = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    def _parts(self, where: Mapping[str, str]) -> int:
        """Bytes of the parts of an upload: of the first thousand, which is most that we make."""
        try:
            page = self._call("list", "list_parts", None, self.times.timeout, **where)
        except (Missing, TierError):
            return 0  # it ended meanwhile, or may not be looked at; the size is only told
        return sum(int(part["Size"]) for part in page.get("Parts", ()))

    def abandon(self, upload: Unfinished) -> None:
        try:
            self._call(
                "delete",
                "abort_multipart_upload",
                None,
                self.times.timeout,
                UploadId=upload.id,
                **_where(upload.path),
            )
        except Missing:
            pass
        except TierError as error:
            if not error.reason.startswith(NO_UPLOAD):
                raise

    def _call(
        self, operation: str, method: str, key: str | None, seconds: float, **arguments: Any
    ) -> Any:
        """A request by botocore's own client."""

        def make(client: S3Client, end: float | None) -> Any:
            return self._in_time(lambda: getattr(client.api, method)(**arguments), end)

        return self.tries(operation, make, key=key, seconds=seconds)

    def _in_time(self, call: Callable[[], T], end: float | None) -> T:
        """What a call of botocore's client gives, whose own time-out is one between two reads."""
        most = self.times.stall_timeout
        if end is not None:
            most = min(most, max(0.05, end - time.monotonic()))
        try:
            return bounded(call, most)
        except Stalled:
            raise TimeoutError from None

    # -- reading --------------------------------------------------------------------------------

    def open(self, path: str, size: int, *, key: str, start: int | None = None) -> BinaryIO:
        return cast("BinaryIO", Reader(self, path, size, key, start=start))

    def receive(self, parcels: Sequence[Parcel], into: Path, *, key: str) -> None:
        # Large ones first, so that the last to arrive is not the longest.
        order = sorted(parcels, key=lambda parcel: -parcel.size)
        files: list[Incoming | IncomingBundle] = [
            IncomingBundle(self, parcel, into, key)
            if parcel.is_bundle
            else Incoming(self, parcel.path, parcel.files[0], into, key)
            for parcel in order
        ]
        try:
            tasks = [task for file in files for task in file.tasks()]
            crew().share(tasks, max((min(p.size, PIECE) for p in parcels), default=0))
            for file in files:
                file.finish()
        finally:
            for file in files:
                file.close()

    # -- writing --------------------------------------------------------------------------------

    def send(self, parcels: Sequence[Parcel], source: Path, *, key: str) -> None:
        small = [parcel for parcel in parcels if parcel.size <= PIECE]

        def task(parcel: Parcel) -> Callable[[], None]:
            def put() -> None:
                data, digest = read_parcel(source, parcel, key)
                self._put_payload(parcel.path, data, digest, key)

            return put

        # Large ones first, so that the last to leave is not the longest.
        order = sorted(small, key=lambda parcel: -parcel.size)
        crew().share([task(p) for p in order], max((p.size for p in small), default=0))
        for parcel in parcels:
            if parcel.size > PIECE:
                self._send_in_parts(parcel.path, parcel.files[0], source, key)

    def _put_payload(
        self,
        path: str,
        data: bytes | mmap,
        sha256: str | None,
        key: str,
        part: tuple[str, int] | None = None,
    ) -> str:
        def make(client: S3Client, end: float | None) -> str:
            if not isinstance(data, bytes):
                # To botocore's client it is a file, which an earlier try has read.
                data.seek(0)
            return client.put(path, data, end=end, part=part, sha256=sha256)

        try:
            return self.tries("upload", make, key=key, seconds=self.times.stall_timeout)
        except Missing as error:
            raise self.no_place("upload", key) from error

    def _send_in_parts(self, path: str, file: ArtifactFile, source: Path, key: str) -> None:
        where, seconds = _where(path), self.times.stall_timeout
        started = self._call("upload", "create_multipart_upload", key, seconds, **where)
        where["UploadId"] = started["UploadId"]
        # S3 takes 10,000 parts at most.
        length = max(PIECE, -(-file.size // 10_000))
        tags: dict[int, str] = {}

        def task(number: int) -> Callable[[], None]:
            def send() -> None:
                data = outgoing.piece(number, length)
                tags[number] = self._put_payload(
                    path, data, None, key, part=(where["UploadId"], number + 1)
                )

            return send

        try:
            with Outgoing(source, file, key) as outgoing:
                crew().share([task(n) for n in range(-(-file.size // length))], length)
                outgoing.finish()
            parts = [{"PartNumber": n + 1, "ETag": tags[n]} for n in sorted(tags)]
            self._complete(path, file.size, parts, where, key)
        except BaseException:
            # Parts that stay behind cost money and are seen by nobody.
            self._abort(where)
            raise

    def _complete(
        self,
        path: str,
        size: int,
        parts: list[dict[str, Any]],
        where: Mapping[str, str],
        key: str,
    ) -> None:
        try:
            self._call(
                "upload",
                "complete_multipart_upload",
                key,
                self.times.stall_timeout,
                MultipartUpload={"Parts": parts},
                **where,
            )
        except TierError as error:
            # It ended well and the reply was lost; or a rival's of the same bytes did.
            if not error.reason.startswith(NO_UPLOAD):
                raise
            found = self.listing(path.rsplit("/", 1)[0], key=key)
            if path not in found or found[path].size != size:
                raise

    def _abort(self, where: Mapping[str, str]) -> None:
        try:
            self.handle().api.abort_multipart_upload(**where)
        except Exception:  # noqa: BLE001, S110  (the first error is the one to tell)
            pass


def _where(path: str) -> dict[str, str]:
    bucket, _, name = path.partition("/")
    return {"Bucket": bucket, "Key": name}

"""The few requests that the conditional tiers make of an object store.

A cloud brings its client, its precondition and its error table; deadlines, back-off and handles by
process are here. `_async_objects` is for clients that fsspec drives on its event loop, `s3` for
one that blocks its thread.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import attrs

from neuron_store.artifact import BUNDLE
from neuron_store.errors import NeuronStoreError, TierError
from neuron_store_backends._attempts import Attempts
from neuron_store_backends._options import Times
from neuron_store_backends._trouble import Changed, Exists, Missing, Trouble, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from neuron_store.artifact import ArtifactFile

T = TypeVar("T")
__all__ = ["PIECE", "Blob", "Objects", "Parcel", "Stored", "Unfinished"]

PIECE = 8 << 20
"""Bytes of one part or range. S3 demands 5 MiB; more only costs memory."""


@attrs.frozen
class Blob:
    """A small object, whole."""

    data: bytes
    version: str
    """ETag or generation, as the store's own precondition wants it."""
    modified: float | None = None
    """Unix seconds by the store's clock; None where the answer does not say."""


@attrs.frozen
class Stored:
    """What a listing says of an object."""

    size: int
    modified: float | None
    """Unix seconds by the store's clock."""


@attrs.frozen
class Parcel:
    """An object of an artifact's payload."""

    path: str
    files: tuple[ArtifactFile, ...]
    """What is in it, one after the other; more than one, or one alone of a bundle: `is_bundle`."""

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self.files[0].at_rest.size

    def span(self, file: ArtifactFile) -> tuple[int, int]:
        """Where the bytes of a file of a bundle begin and end."""
        start = sum(f.size for f in self.files[: self.files.index(file)])
        return start, start + file.size

    @property
    def is_bundle(self) -> bool:
        """Whether it holds small files together; it fits one piece then."""
        form = self.files[0].stored
        return form is not None and form.encoding == BUNDLE

    @property
    def is_encoded(self) -> bool:
        """Whether its bytes are not those of its files."""
        return self.files[0].stored is not None and not self.is_bundle


@attrs.frozen
class Unfinished:
    """An upload that was begun and neither completed nor aborted."""

    path: str
    id: str
    started: float
    """Unix seconds by the store's clock."""
    size: int
    """Bytes of the parts that are there."""


class Objects(abc.ABC):
    """An object store below one prefix.

    Args:
        location: for messages; never holds a secret.
        root: bucket (container) and prefix, as the client wants it.
        times: deadlines.

    `identity` tells places apart for what was measured of them: by default the location.
    """

    def __init__(self, location: str, root: str, times: Times | None = None) -> None:
        self.location = location
        self.root = root
        self.times = times or Times()
        self.identity = location
        self._handles: dict[int, Any] = {}
        self._forgot = False
        self._locks: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Under spawn a store travels to the child, which makes its own handles.
        return {**self.__dict__, "_handles": {}, "_locks": {}}

    # -- what a cloud brings --------------------------------------------------------------------

    @abc.abstractmethod
    def _connect(self) -> Any:
        """A new client, without any cache."""

    @abc.abstractmethod
    def classify(self, error: BaseException) -> Trouble:
        """What the client's error means."""

    @abc.abstractmethod
    def _read(self, path: str, limit: int, key: str | None) -> Blob:
        """The object, its data cut at `limit` + 1 bytes."""

    @abc.abstractmethod
    def _create_if_absent(self, path: str, data: bytes, key: str | None) -> None:
        """Write only if nothing is there."""

    @abc.abstractmethod
    def _replace_if_same(self, path: str, data: bytes, version: str, key: str | None) -> None:
        """Write only if `version` is there."""

    @abc.abstractmethod
    def _listing(self, prefix: str, key: str | None, seconds: float) -> Mapping[str, Stored]:
        """Every object below the folder `prefix`, by full path."""

    @abc.abstractmethod
    def _delete(self, path: str, key: str | None) -> None:
        """Remove an object."""

    @abc.abstractmethod
    def open(self, path: str, size: int, *, key: str, start: int | None = None) -> BinaryIO:
        """An object as a stream, which the caller closes.

        Args:
            path: its full path.
            size: bytes by the record; no more than that is asked for.
            key: for messages.
            start: a part is wanted, from there up to `size`, in bytes; None: all of it.

        Raises:
            Missing: there is no such object.
            TierError: it cannot be read; also while it is read.
        """

    @abc.abstractmethod
    def receive(self, parcels: Sequence[Parcel], into: Path, *, key: str) -> None:
        """Write each object's files below `into`, sizes and digests checked.

        Returns, or raises, once no thread writes any more.

        Raises:
            Missing: there is no such object; `path` says which.
            ArtifactCorrupt: it has other bytes.
            TierError: it cannot be read.
            OSError: the disk's own trouble.
        """

    @abc.abstractmethod
    def send(self, parcels: Sequence[Parcel], source: Path, *, key: str) -> None:
        """Upload each object, made of files of `source`, unconditionally, several at a time.

        Nothing is visible of an object before its last byte was taken and its digest was right.
        Files that were complete stay; of others nothing stays behind.

        Raises:
            ArtifactCorrupt, InvalidArtifact: the file is not what the record says.
            TierError: it cannot be read, or not be uploaded.
        """

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """Uploads below the folder `prefix` that stay until somebody aborts them.

        None where the store itself forgets them: Azure after a week, GCS too.
        """
        del prefix
        return ()

    def abandon(self, upload: Unfinished) -> None:
        """Abort one; nothing happens when it has ended meanwhile."""
        raise NotImplementedError

    def preload(self) -> None:
        """Have ready what forked children can take over; ask nobody, and raise nothing."""
        with contextlib.suppress(Exception):  # whoever connects is told
            self._preload()

    def _preload(self) -> None:  # noqa: B027  (tiers of others have none)
        """Import the client, and look for what its settings say."""

    # -- requests -------------------------------------------------------------------------------

    def read(self, path: str, limit: int, *, key: str | None = None) -> Blob | None:
        """A small object whole, None when it is not there; `TierError` when it is too large."""
        blob = self.peek(path, limit, key=key)
        if blob is not None and len(blob.data) > limit:
            raise TierError(
                self.location, "read", f"{path} is larger than {limit} bytes; not ours", key=key
            )
        return blob

    def peek(self, path: str, limit: int, *, key: str | None = None) -> Blob | None:
        """As `read`, but of an object that is too large the first `limit` + 1 bytes."""
        try:
            return self._read(path, limit, key)
        except Missing:
            return None
        except Changed as error:
            raise self.no_place("read", key) from error

    def create(self, path: str, data: bytes, *, key: str | None = None) -> None:
        """Write only if nothing is there.

        Raises:
            Exists: something is there; it may be our own, the reply to an earlier try being lost.
        """
        try:
            self._create_if_absent(path, data, key)
        except Changed as error:
            raise Exists from error
        except Missing as error:
            raise self.no_place("create", key) from error

    def replace(self, path: str, data: bytes, version: str, *, key: str | None = None) -> None:
        """Write only if `version` is there.

        Raises:
            Changed: another version is there, or none; it may be our own.
        """
        try:
            self._replace_if_same(path, data, version, key)
        except Missing as error:
            raise Changed from error

    def listing(self, prefix: str, *, key: str | None = None) -> Mapping[str, Stored]:
        """Every object below the folder `prefix`, by full path; empty when there is none."""
        # A listing of a million names is many requests; that of one key's is one.
        most = self.times.stall_timeout if key is not None else max(self.times.stall_timeout, 600.0)
        try:
            return self._listing(prefix, key, most)
        except (Missing, Changed) as error:
            raise self.no_place("list", key) from error

    def remove(self, path: str, *, key: str | None = None) -> None:
        """Remove an object; nothing happens when it is not there."""
        try:
            self._delete(path, key)
        except Missing:
            pass
        except Changed as error:
            raise self.no_place("delete", key) from error

    def no_place(self, operation: str, key: str | None) -> TierError:
        """The error for an answer that cannot be."""
        return TierError(
            self.location,
            operation,
            "the store answers with a refusal that has no meaning there (404 or 412); "
            "check that the bucket exists and that the endpoint is an object store's",
            key=key,
        )

    def tries(
        self,
        operation: str,
        make: Callable[[Any, float | None], T],
        *,
        key: str | None = None,
        seconds: float | None,
    ) -> T:
        """What `make` returns, called again and again while that can help.

        Args:
            operation: for messages.
            make: makes the request with a handle and ends it at a time of the monotonic clock.
            key: for messages.
            seconds: what all tries together may take; None: no limit of its own.

        Raises:
            Missing: the object is not there.
            Changed: the precondition did not hold.
            TierError: anything else that did not pass.
        """
        attempts = Attempts(self, operation, key=key, seconds=seconds)
        while True:
            try:
                return make(self.handle(), attempts.end)
            except (NeuronStoreError, Missing, Changed):
                raise
            except Exception as error:  # noqa: BLE001  (each cloud's own; classified there)
                pause = attempts.failed(error)
            time.sleep(pause)

    # -- handles --------------------------------------------------------------------------------

    def handle(self) -> Any:
        """The client of this process. An inherited one hangs or refuses after fork."""
        pid = os.getpid()
        found = self._handles.get(pid)
        if found is not None:
            return found
        # One lock for each process: one that another thread held at the fork stays locked.
        with self._locks.setdefault(pid, threading.Lock()):
            found = self._handles.get(pid)
            if found is None:
                try:
                    found = self._connect()
                except NeuronStoreError:
                    raise
                except Exception as error:
                    raise refusal(
                        self.classify(error), self.location, "connect", key=None, tries=1
                    ) from error
                # A parent's handle stays in the table: dropping it would close its sockets.
                self._handles[pid] = found
            return found

    def _inherited(self) -> Any:
        """The handle of the process that this one was forked from, to take over what it knows.

        None where there is none, and after `forget`: what it knows is not to be trusted then.
        """
        return None if self._forgot else next(reversed(self._handles.values()), None)

    def forget(self) -> None:
        """Give up this process's handle, and what it knew; the next request makes a new one."""
        self._forgot = True
        self.close()

    def close(self) -> None:
        """Give up this process's handle; the next request makes a new one."""
        self._handles.pop(os.getpid(), None)

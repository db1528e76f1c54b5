"""The tier: what SFTP has to say to the requests that publishing by conditional create makes.

SFTP's own exclusive create (`SSH_FXF_EXCL`) is honest, and yet no commit: it shows an empty file
first, and the bytes come later, so a reader may see half a record and a crash leaves one for ever.
Its rename refuses an existing target, but servers may look first and rename then. What is atomic
and exclusive in one is a hard link (`hardlink@openssh.com`): the record is written under a random
name, flushed, and linked to its own. Servers of OpenSSH and of asyncssh have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import stat
import uuid
from typing import TYPE_CHECKING, Any

import asyncssh
import sshfs

from neuron_store.errors import ConfigError
from neuron_store_backends.objects import (
    TIMES,
    AsyncObjects,
    Blob,
    ConditionalStore,
    Kind,
    Stored,
    Trouble,
    network_trouble,
    read_times,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from neuron_store.tier_url import TierURL
    from neuron_store_backends.objects import Pieces, Times

__all__ = ["SftpObjects", "SftpStore"]

OPTIONS = ("username", "identity", "known_hosts", *TIMES)

_LOST = (asyncssh.ConnectionLost, asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection)
_TROUBLE = (
    (asyncssh.SFTPNoSuchFile, Trouble(Kind.MISSING, "not there", errno.ENOENT)),
    (asyncssh.SFTPNoSuchPath, Trouble(Kind.MISSING, "not there", errno.ENOENT)),
    (FileExistsError, Trouble(Kind.PRECONDITION, "exists")),
    (
        asyncssh.SFTPPermissionDenied,
        Trouble(Kind.DENIED, "the SFTP user may not do that there; check its rights", errno.EACCES),
    ),
    (
        asyncssh.SFTPOpUnsupported,
        Trouble(
            Kind.FATAL,
            "the server lacks hardlink@openssh.com or posix-rename@openssh.com, without which "
            "nothing can be published safely; use OpenSSH's sftp-server",
            errno.ENOTSUP,
        ),
    ),
    (_LOST, Trouble(Kind.TRANSIENT, "the SSH connection broke", errno.ECONNRESET)),
    (
        asyncssh.PermissionDenied,
        Trouble(Kind.DENIED, "the server takes none of our keys; check identity=", errno.EACCES),
    ),
    (
        asyncssh.HostKeyNotVerifiable,
        Trouble(Kind.FATAL, "the server's host key is not in known_hosts", errno.EACCES),
    ),
    (
        asyncssh.SFTPFailure,
        Trouble(Kind.FATAL, "the server answers Failure; is its disk full?", errno.EIO),
    ),
)


class Unconditional(Exception):
    """SFTP cannot replace a file on a condition."""


class Link:
    """One SSH connection of one process, made at first use and again when it broke."""

    def __init__(self, host: str, options: Mapping[str, Any]) -> None:
        self._host = host
        self._options = options
        self._lock = asyncio.Lock()
        self._fs: Any = None
        self._sftp: Any = None

    @contextlib.asynccontextmanager
    async def sftp(self) -> AsyncIterator[Any]:
        """The SFTP client of asyncssh."""
        try:
            async with self._lock:
                if self._sftp is None:
                    # In a thread: fsspec's constructor waits for the very loop that runs this.
                    self._fs = await asyncio.to_thread(self._open)
                    self._sftp = await self._fs.client.start_sftp_client()
            yield self._sftp
        except _LOST:
            self._sftp = self._fs = None
            raise

    def _open(self) -> sshfs.SSHFileSystem:
        return sshfs.SSHFileSystem(self._host, skip_instance_cache=True, **self._options)


class SftpObjects(AsyncObjects):
    """Files below one directory of an SFTP server, taken as objects."""

    host: str
    options: Mapping[str, Any]

    def _connect(self) -> Link:
        return Link(self.host, self.options)

    def classify(self, error: BaseException) -> Trouble:
        """What an error of asyncssh means."""
        if isinstance(error, Unconditional):
            return Trouble(
                Kind.FATAL,
                "the entry is damaged, and SFTP has no replace-if-unchanged; stop all publishers "
                "of the key, delete the entry, and promote it again",
                errno.ENOTSUP,
            )
        for kinds, trouble in _TROUBLE:
            if isinstance(error, kinds):
                return trouble
        found = network_trouble(error)
        return found or Trouble(Kind.FATAL, f"unexpected {type(error).__name__}")

    async def _get(self, handle: Link, path: str, limit: int) -> Blob:
        async with handle.sftp() as sftp, sftp.open(path, "rb") as file:
            facts = await file.stat()
            data = await file.read(limit + 1, 0)
        return Blob(data, f"{facts.mtime}-{facts.size}")

    async def _create(self, handle: Link, path: str, data: bytes) -> None:
        async with handle.sftp() as sftp, self._staged(sftp, path) as staged:
            async with sftp.open(staged, "xb") as file:
                await file.write(data)
                await self._flush(file)
            try:
                await sftp.link(staged, path)
            except asyncssh.SFTPFailure:
                # Protocol 3 has one word for every failure, so what is there must be looked at.
                if await sftp.lexists(path):
                    raise FileExistsError(path) from None
                raise

    async def _replace(self, handle: Link, path: str, data: bytes, version: str) -> None:
        raise Unconditional

    async def _upload(self, handle: Link, path: str, pieces: Pieces) -> None:
        async with handle.sftp() as sftp, self._staged(sftp, path) as staged:
            async with sftp.open(staged, "xb") as file:

                async def send(number: int, piece: bytes) -> None:
                    await file.write(piece, number * pieces.length)

                await pieces.each(send)
                await self._flush(file)
            # Over whatever is there: a payload's name promises its bytes.
            await sftp.posix_rename(staged, path)

    async def _range(self, handle: Link, path: str, start: int, end: int) -> bytes:
        async with handle.sftp() as sftp, sftp.open(path, "rb") as file:
            data: bytes = await file.read(end - start, start)
        return data

    async def _list(self, handle: Link, prefix: str) -> Mapping[str, Stored]:
        found: dict[str, Stored] = {}
        folders = [prefix]
        async with handle.sftp() as sftp:
            while folders:
                folder = folders.pop()
                try:
                    entries = await sftp.readdir(folder)
                except asyncssh.SFTPNoSuchFile:
                    continue  # there is none, or it went meanwhile
                for entry in entries:
                    name, mode = entry.filename, entry.attrs.permissions or 0
                    if name in {".", ".."}:
                        continue
                    where = f"{folder}/{name}"
                    if stat.S_ISDIR(mode):
                        folders.append(where)
                    elif stat.S_ISREG(mode):
                        found[where] = Stored(entry.attrs.size, entry.attrs.mtime)
        return found

    async def _remove(self, handle: Link, path: str) -> None:
        async with handle.sftp() as sftp:
            await sftp.remove(path)

    @contextlib.asynccontextmanager
    async def _staged(self, sftp: Any, path: str) -> AsyncIterator[str]:
        """A new name beside everything that is ever listed; nothing stays there."""
        staging = f"{self.root}/staging"
        for folder in (staging, posixpath.dirname(path)):
            await sftp.makedirs(folder, exist_ok=True)
        staged = f"{staging}/{uuid.uuid4().hex}"
        try:
            yield staged
        finally:
            with contextlib.suppress(asyncssh.Error, OSError):
                await sftp.remove(staged)

    @staticmethod
    async def _flush(file: Any) -> None:
        with contextlib.suppress(asyncssh.SFTPOpUnsupported):
            await file.fsync()


class SftpStore(ConditionalStore):
    """Artifacts on an SFTP server.

    Args:
        address: `host:port/path`.
        username: at the server; else ssh's own choice.
        identity: file of the private key; else ssh's own keys and agent.
        known_hosts: file of host keys; a server that is not in it is refused.
        times: deadlines.
        name: short name for tables.
        read_only: leave no word of damage behind.
    """

    def __init__(
        self,
        address: str,
        *,
        username: str | None = None,
        identity: str | None = None,
        known_hosts: str = "~/.ssh/known_hosts",
        times: Times | None = None,
        name: str | None = None,
        read_only: bool = False,
    ) -> None:
        place, _, path = address.partition("/")
        host, _, port = place.partition(":")
        path = posixpath.normpath(f"/{path}")
        if not host or path == "/" or (port and not port.isdecimal()):
            raise ConfigError(f"tier sftp://{address}: write sftp://host:port/path")
        objects = SftpObjects(f"sftp://{place}{path}", path, times)
        options: dict[str, Any] = {"known_hosts": os.path.expanduser(known_hosts)}
        if port:
            options["port"] = int(port)
        if username:
            options["username"] = username
        if identity:
            options["client_keys"] = [os.path.expanduser(identity)]
        objects.host, objects.options = host, options
        super().__init__(objects, name=name, read_only=read_only)

    @classmethod
    def from_url(cls, url: TierURL) -> SftpStore:
        """Open the tier of a URL; raises `ConfigError` for options it does not know."""
        options = url.checked_options(OPTIONS)
        return cls(
            url.address,
            username=options.get("username"),
            identity=options.get("identity"),
            known_hosts=options.get("known_hosts", "~/.ssh/known_hosts"),
            times=read_times(options, f"tier {url.location}"),
            name=url.name,
            read_only=url.read_only,
        )

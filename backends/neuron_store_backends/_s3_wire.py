"""Connections for plain requests to S3: the standard library's, kept alive and shared by threads.

botocore's session, and urllib3 below it, spend 1.2 ms of CPU on a small request, `http.client` 0.4
(docs/performance.md); most of what they add (redirects, retries, decoding, pools by host) is not
wanted here. Where a proxy is to be used, requests go through botocore's session all the same.
"""

from __future__ import annotations

import http.client
import os
import select
import ssl
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import attrs
import botocore.exceptions
import botocore.httpsession

if TYPE_CHECKING:
    from collections.abc import Mapping

    from neuron_store_backends._options import Times

__all__ = ["Body", "Direct", "Reply", "Session", "UnreadableBundle", "Wire"]

_MOST_IDLE = 64


class UnreadableBundle(Exception):
    """There are no certificates in the file."""


class Body(Protocol):
    """What is sent: read until nothing comes."""

    def read(self, size: int = -1, /) -> memoryview:
        """The next chunk; empty after the last."""


class Reply(Protocol):
    """An answer whose body is still to come."""

    status: int
    headers: Any
    """By name, in any case; `get` gives one of them."""

    def read1(self, size: int) -> bytes:
        """What has come, at most `size` bytes; empty at the end."""

    def readinto1(self, target: memoryview) -> int:
        """As `read1`, into memory that is there."""

    def finished(self) -> None:
        """It was read to its end: the connection may serve the next request."""

    def close(self) -> None:
        """It was not; so may be the connection."""


class Wire(Protocol):
    """Sends requests. Thread-safe."""

    def send(self, method: str, url: str, headers: Mapping[str, str], body: Body | None) -> Reply:
        """The answer's head has come; an error of the network is raised as it is."""

    def anew(self) -> Wire:
        """The same way, with connections of its own."""


class Direct:
    """Without a proxy."""

    def __init__(self, times: Times, bundle: str) -> None:
        """Args: times; bundle, of certificates that sign a server's, a file or a directory."""
        self._times = times
        self._bundle = bundle
        self._context: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._guard = threading.Lock()
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def send(self, method: str, url: str, headers: Mapping[str, str], body: Body | None) -> Reply:
        parts = urlsplit(url)
        place = (parts.scheme, parts.netloc.rpartition("@")[2])
        connection = self._take(place) or self._connect(*place)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        try:
            try:
                connection.request(method, target, body, headers)  # type: ignore[arg-type]  # it reads
            except (BrokenPipeError, ConnectionResetError):
                # A server may refuse a body that it has not read, and say why.
                pass
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        return _Reply(self, place, connection, response)

    def anew(self) -> Direct:
        return Direct(self._times, self._bundle)

    def keep(self, place: tuple[str, str], connection: http.client.HTTPConnection) -> None:
        """Have the next request to the place use the connection."""
        with self._guard:
            idle = self._idle.setdefault(place, [])
            if len(idle) < _MOST_IDLE:
                idle.append(connection)
                return
        connection.close()

    def _take(self, place: tuple[str, str]) -> http.client.HTTPConnection | None:
        while True:
            with self._guard:
                idle = self._idle.get(place)
                if not idle:
                    return None
                connection = idle.pop()
            # What there is to read, before anything was asked, is its end.
            if connection.sock is not None and not _readable(connection.sock):
                return connection
            connection.close()

    def _connect(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        wait = self._times.connect_timeout
        connection: http.client.HTTPConnection
        if scheme == "https":
            connection = http.client.HTTPSConnection(netloc, timeout=wait, context=self._trust())
        else:
            connection = http.client.HTTPConnection(netloc, timeout=wait)
        try:
            connection.connect()
        except TimeoutError as error:
            connection.close()
            raise botocore.exceptions.ConnectTimeoutError(endpoint_url=netloc) from error
        except BaseException:
            connection.close()
            raise
        # From here on it is one of silence.
        connection.sock.settimeout(self._times.read_timeout)
        return connection

    def _trust(self) -> ssl.SSLContext:
        with self._guard:
            if self._context is None:
                if os.path.isdir(self._bundle):
                    self._context = ssl.create_default_context(capath=self._bundle)
                else:
                    try:
                        self._context = ssl.create_default_context(cafile=self._bundle)
                    except OSError as error:
                        raise UnreadableBundle(self._bundle) from error
            return self._context


def _close_all(idle: dict[tuple[str, str], list[http.client.HTTPConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()


def _readable(connection: Any) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class _Reply:
    """An answer of `http.client`."""

    def __init__(
        self,
        wire: Direct,
        place: tuple[str, str],
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
    ) -> None:
        self._wire = wire
        self._place = place
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = response.headers

    def read1(self, size: int) -> bytes:
        return self._response.read1(size)

    def readinto1(self, target: memoryview) -> int:
        stream = self._response.fp
        if self._response.chunked or stream is None:
            data = self._response.read1(len(target))
            target[: len(data)] = data
            return len(data)
        # The length is the caller's to watch.
        return stream.readinto1(target)

    def finished(self) -> None:
        lives = not self._response.will_close
        self._response.close()
        if lives:
            self._wire.keep(self._place, self._connection)

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@attrs.frozen
class _Ready:
    """A signed request, as botocore's session takes it."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: Body | None
    context: dict[str, Any] = attrs.field(factory=dict)
    stream_output: bool = True


class Session:
    """By botocore's own connections, which know proxies."""

    def __init__(self, times: Times, bundle: str, proxies: dict[str, str]) -> None:
        self._facts = (times, bundle, proxies)
        self._http = botocore.httpsession.URLLib3Session(
            verify=bundle,
            proxies=proxies,
            timeout=(times.connect_timeout, times.read_timeout),
            max_pool_connections=_MOST_IDLE,
        )

    def send(self, method: str, url: str, headers: Mapping[str, str], body: Body | None) -> Reply:
        told = self._http.send(_Ready(method, url, dict(headers), body))
        return Pooled(told.raw, told.status_code, told.headers)

    def anew(self) -> Session:
        return Session(*self._facts)


class Pooled:
    """An answer of urllib3, as botocore gives it."""

    def __init__(self, raw: Any, status: int, headers: Any) -> None:
        self._raw = raw
        self.status = status
        self.headers = headers

    def read1(self, size: int) -> bytes:
        data: bytes = self._raw.read1(size, decode_content=False)
        return data

    def readinto1(self, target: memoryview) -> int:
        data = self.read1(len(target))
        target[: len(data)] = data
        return len(data)

    def finished(self) -> None:
        self._raw.drain_conn()
        self._raw.release_conn()

    def close(self) -> None:
        self._raw.close()

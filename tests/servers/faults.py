"""Faults on demand: the rules, and an HTTP proxy that puts them before any server."""

from __future__ import annotations

import http.client
import http.server
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable


@attrs.define
class Fault:
    """What happens to requests that match, the next `times` times (after `skip` of them)."""

    action: str
    """`answer`, `lose_reply`, `drop`, `truncate`, `corrupt`, `trickle`, `strip`, `hold`,
    `claim` (a refusal for its condition is told as success)."""
    method: str = ""
    path: str = ""
    """Part of the path and query."""
    times: int = 1
    skip: int = 0
    status: str = "500 Internal Server Error"
    code: str = "InternalError"
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytes = b""
    """With `headers`, for the proxy's `answer`: how this cloud says it."""
    header: str = ""
    """For `strip`: a request header; its WSGI name for moto, such as HTTP_IF_NONE_MATCH."""
    parameter: str = ""
    """For the proxy's `strip`: a query parameter to rename, so that it is not understood."""
    released: threading.Event = attrs.field(factory=threading.Event)
    """For `hold`: the answer waits for it."""
    reached: threading.Event = attrs.field(factory=threading.Event)
    """Set when the fault was used."""


class Faults:
    """The rules of one server, and a log of its requests."""

    def __init__(self) -> None:
        self.rules: list[Fault] = []
        self.log: list[tuple[str, str]] = []
        self.asked: list[tuple[float, str]] = []
        """moto only: when each request came (`time.monotonic`), and whose access key signed it."""
        self.lock = threading.Lock()

    def add(self, action: str, **facts: Any) -> Fault:
        fault = Fault(action, **facts)
        with self.lock:
            self.rules.append(fault)
        return fault

    def clear(self) -> None:
        with self.lock:
            for rule in self.rules:
                rule.released.set()
            self.rules.clear()
            self.log.clear()
            self.asked.clear()

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.log.append((method, path))
            for rule in self.rules:
                if rule.times and rule.method in method and rule.path in path:
                    if rule.skip:
                        rule.skip -= 1
                        continue
                    rule.times -= 1
                    rule.reached.set()
                    return rule
        return None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that are killed in the middle are what the proxy is for.
        if not isinstance(sys.exception(), OSError | http.client.HTTPException):
            super().handle_error(request, client_address)


class FaultProxy:
    """Passes requests on to the server at `upstream`, but for those that a rule matches."""

    def __init__(self, upstream: str, faults: Faults | None = None) -> None:
        self.upstream = upstream
        self.faults = faults = Faults() if faults is None else faults
        where = urlsplit(upstream)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def log_message(self, *_: Any) -> None:
                pass

            def _handle(self) -> None:
                proxy.handle(self, faults, (where.hostname or "", where.port or 80))

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.clear()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def handle(
        self,
        request: http.server.BaseHTTPRequestHandler,
        faults: Faults,
        upstream: tuple[str, int],
    ) -> None:
        body = _body(request)
        fault = faults.take(request.command, request.path)
        action = fault.action if fault is not None else ""
        if action == "drop":
            return _hang_up(request)
        if fault is not None and action == "answer":
            status, _, reason = fault.status.partition(" ")
            return _send(request, int(status), reason, fault.headers.items(), fault.body)
        connection = http.client.HTTPConnection(*upstream, timeout=60)
        try:
            headers = {k: v for k, v in request.headers.items() if k != "Transfer-Encoding"}
            if fault is not None and action == "strip":
                headers = {k: v for k, v in headers.items() if k.lower() != fault.header.lower()}
                request.path = request.path.replace(fault.parameter or "\0", "ignored")
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            status, reason, told = answer.status, answer.reason, answer.getheaders()
        finally:
            connection.close()
        if action == "lose_reply":
            return _hang_up(request)
        if fault is not None and action == "hold":
            fault.released.wait(60)
        if action == "corrupt":
            data = bytes(b ^ 0xFF for b in data)
        if action == "claim" and status in {409, 412}:
            status, reason, data = 201, "Created", b""
        kept = [
            (k, v.replace(self.upstream, self.url))
            for k, v in told
            if k.lower() not in {"transfer-encoding", "connection", "content-length"}
        ]
        return _send(request, status, reason, kept, data, fault)


def _body(request: http.server.BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        length = int(request.headers.get("Content-Length") or 0)
        data = request.rfile.read(length)
        if len(data) < length:
            raise ConnectionAbortedError("the client ended in the middle of its request")
        return data
    parts = []
    while size := int(request.rfile.readline().split(b";")[0], 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(parts)


def _hang_up(request: http.server.BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    try:
        request.connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _send(
    request: http.server.BaseHTTPRequestHandler,
    status: int,
    reason: str,
    headers: Iterable[tuple[str, str]],
    data: bytes,
    fault: Fault | None = None,
) -> None:
    action = fault.action if fault is not None else ""
    try:
        request.send_response_only(status, reason)
        for name, value in headers:
            request.send_header(name, value)
        if status not in {204, 304}:
            request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "HEAD" or status in {204, 304}:
            return
        if action == "truncate":
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            _hang_up(request)
        elif fault is not None and action == "trickle":
            for number in range(len(data)):
                if fault.released.wait(0.05):
                    request.wfile.write(data[number:])
                    return
                request.wfile.write(data[number : number + 1])
                request.wfile.flush()
        else:
            request.wfile.write(data)
    except (BrokenPipeError, ConnectionResetError):
        request.close_connection = True  # the client gave up, as it should

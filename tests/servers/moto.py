"""moto's S3 server on a free port, with one lock around every request, and faults on demand.

moto is check-then-act: without the lock several conditional multipart completes can win. The lock
makes it exact, and the same middleware is the place for faults.
"""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.servers.faults import Fault, Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "very-secret-testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Exact:
    """The middleware: one request at a time, and faults."""

    def __init__(self, app: Callable[..., Iterable[bytes]], faults: Faults) -> None:
        self.app = app
        self.faults = faults
        self.lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        signed = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        self.faults.asked.append((time.monotonic(), signed[1] if signed else ""))
        path = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
        # The whole body first: a client that is stopped meanwhile must not hold the lock.
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        fault = self.faults.take(environ["REQUEST_METHOD"], path)
        action = fault.action if fault is not None else ""
        if fault is not None and action == "strip":
            environ.pop(fault.header, None)
        if fault is not None and action == "answer":
            text = self._answer(fault, start_response)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else text
        if action == "drop":
            self._hang_up(environ)
            return []
        answer: dict[str, Any] = {}

        def begin(status: str, headers: list[tuple[str, str]], _info: Any = None) -> Any:
            answer.update(status=status, headers=headers)
            return lambda _data: None

        with self.lock:
            data = b"".join(self.app(environ, begin))
        if action == "lose_reply":
            self._hang_up(environ)
            return []
        if fault is not None and action == "hold":
            fault.released.wait(60)
        if action == "corrupt":
            data = bytes(b ^ 0xFF for b in data)
        start_response(answer["status"], answer["headers"])
        if action == "truncate":
            return self._truncated(environ, data)
        if fault is not None and action == "trickle":
            return self._trickled(fault, data)
        return [data]

    @staticmethod
    def _answer(fault: Fault, start_response: Callable[..., Any]) -> list[bytes]:
        text = (
            f'<?xml version="1.0"?><Error><Code>{fault.code}</Code>'
            f"<Message>injected</Message></Error>"
        ).encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
        start_response(fault.status, headers)
        return [text]

    @staticmethod
    def _hang_up(environ: dict[str, Any]) -> None:
        sock = environ["werkzeug.socket"]
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        raise ConnectionAbortedError("injected")

    def _truncated(self, environ: dict[str, Any], data: bytes) -> Iterable[bytes]:
        yield data[: len(data) // 2]
        self._hang_up(environ)

    @staticmethod
    def _trickled(fault: Fault, data: bytes) -> Iterable[bytes]:
        """One byte every 50 ms: never silent for long, and never done."""
        for number in range(len(data)):
            if fault.released.wait(0.05):
                yield data[number:]
                return
            yield data[number : number + 1]


class MotoServer:
    """A server; `with` starts and stops it."""

    def __init__(self) -> None:
        self.faults = Faults()
        app = Exact(DomainDispatcherApplication(create_backend_app), self.faults)
        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
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

    def client(self) -> Any:
        """boto3's: the back door by which tests set up and look."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )

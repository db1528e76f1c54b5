"""Endpoints that are no object store: each operation tells so, in our own errors."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from neuron_store.errors import TierError
from neuron_store_backends.s3 import S3Store

if TYPE_CHECKING:
    from collections.abc import Iterator

HTML = b"<!DOCTYPE HTML><html><body><h1>Error response</h1></body></html>"
NO_SUCH_KEY = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>no</Message></Error>"


@contextlib.contextmanager
def always(status: int, body: bytes) -> Iterator[str]:
    """A web server that has one answer for everything."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815  (the base class's names)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status", [404, 412])
def test_a_listing_answered_as_only_an_object_may_be_is_an_error_of_the_tier(status):
    with always(status, NO_SUCH_KEY if status == 404 else HTML) as url:
        store = S3Store("bkt/p", endpoint_url=url, anon=True, region="us-east-1")
        with pytest.raises(TierError, match="endpoint"):
            list(store.keys())

"""Endpoints that are no object store: each operation tells so, in our own errors."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from neuron_store.errors import TierError
from neuron_store_backends.azure import AzureStore
from neuron_store_backends.gcs import GCSStore
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

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815  (the base class's names)

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


def _s3(url: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    del monkeypatch
    return S3Store("bkt/p", endpoint_url=url, anon=True, region="us-east-1")


def _gcs(url: str, monkeypatch: pytest.MonkeyPatch) -> GCSStore:
    del monkeypatch
    return GCSStore("bkt/p", endpoint_url=url, anon=True)


def _azure(url: str, monkeypatch: pytest.MonkeyPatch) -> AzureStore:
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey=aGk=;BlobEndpoint={url}/a;",
    )
    return AzureStore("bkt/p")


@pytest.mark.parametrize("make", [_s3, _gcs, _azure])
@pytest.mark.parametrize(
    "call",
    [
        lambda store, _: store.find("k"),
        lambda store, into: store.fetch("k", into),
        lambda store, _: store.open_file("k", "graph_k.neff"),
        lambda store, _: store.verify("k"),
        lambda store, _: list(store.keys()),
        lambda store, _: store.delete("k"),
    ],
    ids=["find", "fetch", "open_file", "verify", "keys", "delete"],
)
def test_a_web_servers_404_is_no_miss(make, call, monkeypatch, tmp_path):
    with (
        always(404, HTML) as url,
        make(url, monkeypatch) as store,
        pytest.raises(TierError, match="endpoint|bucket does not exist"),
    ):
        call(store, tmp_path)

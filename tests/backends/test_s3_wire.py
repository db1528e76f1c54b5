"""Connections of our own to S3: kept alive, given up, encrypted, and through a proxy."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading

import botocore.exceptions
import pytest

from neuron_store.errors import TierError
from neuron_store_backends._options import Times
from neuron_store_backends._s3_client import S3Client, S3Options
from neuron_store_backends._s3_messages import Answer, Body
from neuron_store_backends._s3_wire import Direct, Session

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@contextlib.contextmanager
def scripted(*answers, context=None):
    """A server that gives each connection those answers in turn, and then ends it.

    Yields its address and what came: for each connection the requests' heads.
    """
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection, heads):
            with contextlib.suppress(OSError), connection:
                if context is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                with connection, connection.makefile("rb") as stream:
                    for answer in answers:
                        head = b""
                        while not head.endswith(b"\r\n\r\n"):
                            line = stream.readline()
                            if not line:
                                return
                            head += line
                        heads.append(head.decode())
                        connection.sendall(answer)

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                seen.append([])
                threading.Thread(target=serve, args=(connection, seen[-1]), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", seen
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def whole(reply, *, into=False):
    answer, data = Answer(reply, None), bytearray()
    with answer:
        target = memoryview(bytearray(3))
        while chunk := (target[: answer.read_into(target)] if into else answer.read()):
            data += chunk
    return bytes(data)


@pytest.fixture
def wire():
    return Direct(Times(connect_timeout=2, read_timeout=2), "")


@pytest.mark.parametrize("into", [False, True])
def test_a_connection_serves_one_request_after_the_other(wire, into):
    with scripted(OK, OK, OK) as (place, seen):
        for name in "abc":
            assert (
                whole(wire.send("GET", f"http://{place}/{name}", {}, None), into=into) == b"hello"
            )
    assert [[head.split(" ")[1] for head in heads] for heads in seen] == [["/a", "/b", "/c"]]


def test_a_connection_whose_answer_was_not_read_to_its_end_is_not_used_again(wire):
    with scripted(OK, OK) as (place, seen):
        with (
            pytest.raises(ZeroDivisionError),
            Answer(wire.send("GET", f"http://{place}/a", {}, None), None),
        ):
            raise ZeroDivisionError
        assert whole(wire.send("GET", f"http://{place}/b", {}, None)) == b"hello"
    assert len(seen) == 2


def test_a_connection_that_the_server_has_ended_meanwhile_is_not_used_again(wire):
    with scripted(OK) as (place, seen):
        whole(wire.send("GET", f"http://{place}/a", {}, None))
        (idle,) = wire._idle["http", place]
        # It ends after its only answer; the end is there once it can be read.
        idle.sock.settimeout(5)
        assert idle.sock.recv(1, socket.MSG_PEEK) == b""
        assert whole(wire.send("GET", f"http://{place}/b", {}, None)) == b"hello"
    assert len(seen) == 2


@pytest.mark.parametrize("into", [False, True])
def test_a_body_in_chunks_and_one_that_ends_with_its_connection_are_read(wire, into):
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhell\r\n1\r\no\r\n0\r\n\r\n"
    )
    ending = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
    for answer in (chunked, ending):
        with scripted(answer) as (place, _):
            assert whole(wire.send("GET", f"http://{place}/", {}, None), into=into) == b"hello"


@pytest.mark.parametrize("into", [False, True])
def test_a_body_that_is_cut_short_is_told(wire, into):
    with scripted(OK[:-2]) as (place, _), pytest.raises(ConnectionError, match="cut short"):
        whole(wire.send("GET", f"http://{place}/", {}, None), into=into)


def test_no_more_is_read_than_the_answer_says(wire):
    with scripted(OK + b" and more") as (place, _):
        assert whole(wire.send("GET", f"http://{place}/", {}, None), into=True) == b"hello"


def test_a_refusal_of_a_body_that_was_not_read_is_heard(wire):
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    # More than the sockets hold, so that sending it meets the end.
    body = Body(bytes(64 << 20), None)
    with scripted(refusal) as (place, _):
        reply = wire.send("PUT", f"http://{place}/", {"Content-Length": str(64 << 20)}, body)
        assert reply.status == 403
        reply.close()


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n"]
)
def test_what_is_no_answer_is_trouble_that_may_pass(wire, answer):
    from neuron_store_backends._s3_errors import classify
    from neuron_store_backends._trouble import Kind

    with scripted(answer) as (place, _):
        with pytest.raises(Exception) as caught:  # noqa: PT011  (classified below)
            wire.send("GET", f"http://{place}/", {}, None)
        assert classify(caught.value).kind is Kind.TRANSIENT


def test_silence_while_connecting_is_told_from_silence_afterwards():
    wire = Direct(Times(connect_timeout=0.2, read_timeout=0.2), "")
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            wire.send("GET", f"http://{place}/", {}, None)
        with contextlib.ExitStack() as full:
            for _ in range(4):
                waiting = full.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            with pytest.raises(botocore.exceptions.ConnectTimeoutError):
                wire.send("GET", f"http://{place}/", {}, None)


# -- encrypted --------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path):
    """A context of 127.0.0.1, and the file that says it may be trusted."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    bundle, secret = tmp_path / "bundle.pem", tmp_path / "key.pem"
    bundle.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(bundle, secret)
    return context, bundle


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
def test_a_certificate_of_the_bundle_is_trusted_and_its_connection_kept(
    aws, monkeypatch, certificate, variable
):
    context, bundle = certificate
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with scripted(OK, OK, context=context) as (place, seen):
        monkeypatch.setenv(variable, str(bundle))
        client = S3Client(
            S3Options(endpoint_url=f"https://{place}", addressing_style="path"), Times()
        )
        for _ in range(2):
            with client.get("bench/x", end=None) as answer:
                assert answer.read() == b"hello"
    assert [len(heads) for heads in seen] == [2]


def test_a_certificate_that_nobody_trusts_is_told_at_once(aws, certificate):
    from neuron_store_backends.s3 import S3Store

    context, _ = certificate
    with scripted(OK, context=context) as (place, seen):
        store = S3Store("bench/p", endpoint_url=f"https://{place}", addressing_style="path")
        with pytest.raises(TierError, match="certificate"):
            store.find("k")
        assert [len(heads) for heads in seen] == [0]


def test_a_certificate_of_another_host_is_refused(certificate):
    context, bundle = certificate
    with scripted(OK, context=context) as (place, _):
        wire = Direct(Times(connect_timeout=2, read_timeout=2), str(bundle))
        with pytest.raises(ssl.SSLCertVerificationError):
            wire.send("GET", f"https://localhost:{place.split(':')[1]}/", {}, None)


def test_a_bundle_that_is_not_there_is_named(aws, monkeypatch, tmp_path):
    from neuron_store_backends.s3 import S3Store

    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    store = S3Store("bench/p", endpoint_url="https://127.0.0.1:9", addressing_style="path")
    with pytest.raises(TierError, match="CA certificates cannot be read"):
        store.find("k")


# -- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("https://S3.Example.com:443", "s3.example.com"),
        ("http://Example.com:80", "example.com"),
        ("http://example.com:9000", "example.com:9000"),
        ("http://[::1]:9000", "[::1]:9000"),
        ("https://example.com:80", "example.com:80"),
    ],
)
def test_the_host_that_is_sent_is_the_one_that_was_signed(aws, endpoint, host):
    import botocore.auth

    client = S3Client(S3Options(endpoint_url=endpoint, addressing_style="path"), Times())
    address = client._address("bench")
    assert address is not None
    assert address.host == host == botocore.auth._host_from_url(address.url)


def test_a_proxy_of_the_environment_is_used_and_one_that_is_not_meant_is_not(aws, monkeypatch):
    with scripted(OK) as (place, seen):
        options = S3Options(endpoint_url="http://s3.invalid", addressing_style="path")
        monkeypatch.setenv("HTTP_PROXY", f"http://{place}")
        client = S3Client(options, Times())
        with client.get("bench/x", end=None) as answer:
            assert answer.read() == b"hello"
        assert isinstance(client._wire, Session)
        assert seen[0][0].startswith("GET http://s3.invalid/bench/x ")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        options = S3Options(endpoint_url=f"http://{place}", addressing_style="path")
        client = S3Client(options, Times())
        with client.get("bench/x", end=None) as answer:
            assert answer.read() == b"hello"
        assert isinstance(client._wire, Direct)
        assert seen[1][0].startswith("GET /bench/x ")

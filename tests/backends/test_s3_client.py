"""Requests that are made without botocore's client, and where it is left to it."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import subprocess
import sys

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest

from neuron_store.abc import Publication
from neuron_store.errors import TierError
from neuron_store_backends._options import Times
from neuron_store_backends._s3_client import S3Client, S3Options
from neuron_store_backends._s3_messages import Body, Request, sign
from tests.backends.cases import CONTENTS, contents_of, fill
from tests.servers.faults import FaultProxy


def in_child(call):
    """What `call` gives in a forked child."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(call()))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()
        here.close()


@pytest.fixture
def large(source):
    return fill(source, {"graph_k.neff": os.urandom(1000) * 20_000, "empty": b""}, "k")


def test_what_is_signed_by_the_signer_is_taken_by_a_server_that_checks_it(
    seaweed_url, aws, artifact, source, into
):
    from tests.backends.places import S3Place
    from tests.servers.seaweed import client

    place = S3Place(client(seaweed_url), seaweed_url, bucket="warm-up")
    for number, part in enumerate(("plain", "with space", "ä+&=?#%", "~tilde'()*")):
        place.prefix = f"{place.top}{part}"
        assert place.store().publish(artifact, source) is Publication.CREATED
        (into / str(number)).mkdir()
        place.store().fetch("k", into / str(number))
        assert contents_of(into / str(number)) == CONTENTS
        assert "index/k.json" in place.paths()


def test_a_wrong_secret_is_told_by_a_server_that_checks_it(seaweed_url, aws, monkeypatch):
    from neuron_store_backends.s3 import S3Store

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(TierError, match="does not match its secret"):
        S3Store("warm-up/p", endpoint_url=seaweed_url).find("k")


def test_where_plain_requests_cannot_be_made_the_client_makes_them(
    s3_place, monkeypatch, large, source, into
):
    monkeypatch.setattr(S3Client, "_ask_for_address", lambda *_: None)
    assert s3_place.store().publish(large, source) is Publication.CREATED
    assert s3_place.store().publish(large, source) is Publication.PRESENT
    s3_place.store().fetch("k", into)
    assert contents_of(into) == contents_of(source)
    assert s3_place.store().find("none") is None
    with s3_place.store().open_file("k", "graph_k.neff") as stream:
        assert stream.read() == (source / "graph_k.neff").read_bytes()


def test_no_request_is_sent_to_learn_how_to_address_an_object(s3_place, moto):
    moto.faults.log.clear()
    s3_place.store().find("k")
    assert len(moto.faults.log) == 1


def test_a_bucket_in_another_region_is_found_there(s3_place, monkeypatch, artifact, source):
    s3_place.store().publish(artifact, source)
    with FaultProxy(s3_place.url) as proxy:
        # Not the URL's option: what the user chose is not overruled.
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        proxy.faults.add(
            "answer",
            status="301 Moved Permanently",
            headers={"x-amz-bucket-region": "eu-north-1"},
            body=b"<Error><Code>PermanentRedirect</Code></Error>",
        )
        store = s3_place.store()
        store = type(store)(store.objects.root, addressing_style="path")
        assert store.find("k") is not None
        client = store.objects.handle()
        assert client.api.meta.region_name == "eu-north-1"
        assert client._addresses[s3_place.bucket].region == "eu-north-1"


@pytest.mark.parametrize("options", [{"region": "us-east-1"}, {}])
def test_a_region_or_an_endpoint_that_was_chosen_is_not_overruled(s3_place, monkeypatch, options):
    with FaultProxy(s3_place.url) as proxy:
        if options:
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        else:
            options = {"endpoint_url": proxy.url}
        proxy.faults.add(
            "answer",
            times=99,
            status="301 Moved Permanently",
            headers={"x-amz-bucket-region": "eu-north-1"},
            body=b"<Error><Code>PermanentRedirect</Code></Error>",
        )
        store = type(s3_place.store())(f"{s3_place.bucket}/p", addressing_style="path", **options)
        with pytest.raises(TierError, match="another region"):
            store.find("k")


def test_a_region_that_is_no_name_is_not_turned_to(s3_place, monkeypatch):
    with FaultProxy(s3_place.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        proxy.faults.add(
            "answer",
            times=99,
            status="301 Moved Permanently",
            headers={"x-amz-bucket-region": "evil.example/x#"},
            body=b"<Error><Code>PermanentRedirect</Code></Error>",
        )
        store = type(s3_place.store())(f"{s3_place.bucket}/p", addressing_style="path")
        with pytest.raises(TierError, match="another region"):
            store.find("k")


def test_a_broken_range_is_asked_for_again_and_the_rest_is_not(s3_place, moto, large, source, into):
    s3_place.store().publish(large, source)
    rule = moto.faults.add("truncate", method="GET", path="/payload/", skip=1)
    moto.faults.log.clear()
    s3_place.store().fetch("k", into)
    assert rule.times == 0
    assert contents_of(into) == contents_of(source)
    # The record; three ranges of 8 MiB, one of them twice.
    assert [method for method, _ in moto.faults.log] == ["GET"] * 5


def test_a_stream_is_taken_up_where_it_broke(s3_place, moto, large, source):
    s3_place.store().publish(large, source)
    rule = moto.faults.add("truncate", method="GET", path="/payload/")
    with s3_place.store().open_file("k", "graph_k.neff") as stream:
        assert stream.read() == (source / "graph_k.neff").read_bytes()
    assert rule.times == 0


def test_an_upload_is_in_parts_and_each_broken_one_is_sent_again(
    s3_place, moto, large, source, into
):
    rule = moto.faults.add("drop", method="PUT", path="partNumber=2")
    s3_place.store().publish(large, source)
    assert rule.times == 0
    assert s3_place.dangling() == []
    s3_place.store().fetch("k", into)
    assert contents_of(into) == contents_of(source)


def test_a_trickling_upload_is_bounded_by_silence_and_not_by_its_length(s3_place):
    body = Body(bytes(1 << 20), end=None)
    sizes = []
    while chunk := body.read(16):
        sizes.append(len(chunk))
    assert sizes == [256 << 10] * 4


def test_a_deadline_that_is_over_ends_a_body():
    with pytest.raises(TimeoutError):
        Body(b"x", end=0.0).read()


def test_the_options_show_no_credentials(aws):
    client = S3Client(S3Options(), Times())
    assert "testing" not in f"{client!r}{client.__dict__['_options']!r}"


def test_preloading_finds_out_what_children_take_over_and_asks_nobody(s3_place, moto, tmp_path):
    moto.faults.log.clear()
    script = f"""
import os, sys
from neuron_store import open_store
from neuron_store.registry import open_tier
tier = open_tier("s3://{s3_place.bucket}/p?endpoint_url={moto.url}&read_only=1")
with open_store([tier, open_tier("memory://p")], local={str(tmp_path / "local")!r}) as store:
    assert "botocore" not in sys.modules
    store.preload()
    assert "botocore" in sys.modules
    if not os.fork():
        import botocore.session
        botocore.session.Session = None  # whoever looks for settings once more fails
        os._exit(0 if tier.find("k") is None else 1)
    assert os.wait()[1] == 0
# What is missing is told to whoever uses it.
open_tier("s3://bench/p?profile=none").preload()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert [method for method, _ in moto.faults.log] == ["GET"]


def test_a_child_has_its_parents_findings_and_connections_of_its_own(s3_place, artifact, source):
    store = s3_place.store()
    store.publish(artifact, source)
    parents = store.objects.handle()
    child = in_child(lambda: _facts(store, parents))
    assert child == {"address": True, "wire": False, "session": False, "found": True}


def _facts(store, parents):
    found = store.find("k") is not None
    mine = store.objects.handle()
    return {
        "address": mine._addresses == parents._addresses,
        "wire": mine._wire is parents._wire,
        "session": mine._session is not None,
        "found": found,
    }


def test_credentials_that_are_renewed_are_no_childs(s3_place, monkeypatch):
    store = s3_place.store()
    store.find("k")
    client = store.objects.handle()
    assert client.known().credentials is not None
    # As those of an instance's role, whose renewal keeps a connection.
    renewed = botocore.credentials.RefreshableCredentials(
        "testing", "testing", "token", dt.datetime.now(dt.UTC) + dt.timedelta(days=1), dict, "iam"
    )
    monkeypatch.setattr(client, "_credentials", renewed)
    assert client.known().credentials is None
    child = in_child(lambda: _facts(store, client))
    assert child == {"address": True, "wire": False, "session": True, "found": False}


def test_after_expired_credentials_nothing_is_taken_over(s3_place, moto):
    store = s3_place.store()
    store.find("k")
    parents = store.objects.handle()

    def look():
        store.objects.forget()
        return _facts(store, parents)["session"]

    assert in_child(look) is True


@pytest.mark.parametrize("path", ["bench/x", "bench/a b/ä~'()*", "bench/k?x=1"])
@pytest.mark.parametrize("token", [None, "session/token=="])
def test_the_signature_is_botocores_own(monkeypatch, path, token):
    from urllib.parse import quote

    now = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now)
    credentials = botocore.credentials.Credentials("key", "secret", token)
    url = f"https://s3.example.com:9000/{quote(path, safe='/~?=')}"
    headers = {
        "Host": "s3.example.com:9000",
        "User-Agent": "agent  with   spaces",
        "Accept-Encoding": "identity",
        "If-None-Match": "*",
        "Range": "bytes=0-  99",
        "Expect": "100-continue",
    }
    ours = Request("PUT", url, dict(headers))
    sign(ours, credentials.get_frozen_credentials(), "eu-north-1", "0" * 64)
    monkeypatch.setattr(botocore.auth.S3SigV4Auth, "payload", lambda *_: "0" * 64)
    theirs = botocore.awsrequest.AWSRequest("PUT", url, headers)
    botocore.auth.S3SigV4Auth(credentials, "s3", "eu-north-1").add_auth(theirs)
    assert ours.headers == dict(theirs.headers.items())

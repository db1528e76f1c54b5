from __future__ import annotations

import errno
import os
import socket
import sys
import time

import pytest
from attrs import evolve

from neuron_store import Publication
from neuron_store.errors import (
    ArtifactCorrupt,
    ConfigError,
    MissingExtra,
    NeuronStoreError,
    TierError,
    TiersUnavailable,
)
from neuron_store.tier_url import parse_tier_url
from neuron_store.tiered import TieredStore
from neuron_store_backends._options import Times
from neuron_store_backends.local import LocalStore
from neuron_store_backends.s3 import S3Store
from tests.backends.cases import CONTENTS, ConditionalCases, fill, flip
from tests.servers.moto import CREDENTIALS
from tests.servers.processes import black_hole


class TestMoto(ConditionalCases):
    @pytest.fixture
    def place(self, s3_place):
        return s3_place


def test_a_miss_costs_one_request(s3_place, moto):
    store = s3_place.store()
    moto.faults.log.clear()
    assert store.find("nothing") is None
    assert len(moto.faults.log) == 1


def test_a_small_hit_costs_two_requests(s3_place, moto, source, tmp_path):
    artifact = fill(source, {"graph_k.neff": os.urandom(200_000), "m.json": b"{}"}, "k")
    s3_place.store().publish(artifact, source)
    moto.faults.log.clear()
    (tmp_path / "into").mkdir()
    s3_place.store().fetch("k", tmp_path / "into")
    assert [method for method, _ in moto.faults.log] == ["GET", "GET"]


def test_the_commit_is_one_conditional_put(s3_place, moto, artifact, source):
    s3_place.store().publish(artifact, source)
    commits = [m for m, path in moto.faults.log if "/index/k.json" in path]
    assert commits == ["GET", "PUT"]


def test_what_is_published_is_never_written_again(s3_place, moto, artifact, source, other):
    """Pitfall 23: neither by the same bytes, nor by others, nor by who reads it."""
    store = s3_place.store()
    assert store.publish(artifact, source) is Publication.CREATED
    written = {path: s3_place.read(path) for path in s3_place.paths()}
    moto.faults.log.clear()
    assert s3_place.store().publish(artifact, source) is Publication.PRESENT
    theirs = fill(other, {**CONTENTS, "graph.hlo": b"other" * 2000}, "k")
    assert s3_place.store().publish(theirs, other) is Publication.CONFLICT
    store.verify("k")
    assert {path: s3_place.read(path) for path in s3_place.paths()} == written
    changes = [(m, p) for m, p in moto.faults.log if m not in {"GET", "HEAD"}]
    assert [each for each in changes if "/probe/" not in each[1]] == []


def test_a_wrong_bucket_is_an_error_that_names_it_and_not_a_miss(s3_place, artifact, source):
    store = S3Store("no-such-bucket-here/p", endpoint_url=s3_place.url)
    for call in (
        lambda: store.find("k"),
        lambda: list(store.keys()),
        lambda: store.publish(artifact, source),
        lambda: store.delete("k"),
    ):
        with pytest.raises(TierError, match=r"no-such-bucket-here.*bucket does not exist"):
            call()


def test_missing_credentials_are_an_error_with_the_remedy(s3_place, monkeypatch):
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    with pytest.raises(TierError, match="AWS_PROFILE"):
        s3_place.store().find("k")


def test_an_unknown_profile_is_named_as_the_trouble(s3_place):
    with pytest.raises(TierError, match="profile does not exist"):
        s3_place.store(profile="nobody").find("k")


def test_nobody_listening_is_an_error_soon(s3_place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = S3Store("b-x/p", endpoint_url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(TierError, match="cannot connect|refused"):
            store.find("k")


def test_a_host_that_does_not_resolve_is_an_error(s3_place):
    store = S3Store("bucket/p", endpoint_url="http://no-such-host.invalid:9")
    with pytest.raises(TierError, match="resolve|cannot connect"):
        store.find("k")


def test_a_server_without_tls_is_told_as_such(s3_place):
    store = S3Store(f"{s3_place.bucket}/p", endpoint_url=s3_place.url.replace("http:", "https:"))
    with pytest.raises(TierError, match="TLS"):
        store.find("k")


def test_a_peer_that_accepts_and_never_answers_ends_in_its_deadline(aws):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = S3Store(
            "bucket/p",
            endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}",
            times=Times(timeout=2, read_timeout=1),
        )
        with pytest.raises(TierError, match="in time"):
            store.find("k")


def test_dropped_packets_end_in_a_few_connect_timeouts(aws):
    times = Times(connect_timeout=0.5)
    with black_hole() as url:
        began = time.monotonic()
        with pytest.raises(TierError, match="no connection in time"):
            S3Store("bucket/p", endpoint_url=url, times=times).find("k")
        assert time.monotonic() - began < 15


def test_no_error_repeats_a_credential(s3_place, moto, artifact, source):
    secrets = [CREDENTIALS["AWS_SECRET_ACCESS_KEY"], CREDENTIALS["AWS_ACCESS_KEY_ID"]]
    moto.faults.add("answer", status="403 Forbidden", code="SignatureDoesNotMatch", times=99)
    with pytest.raises(TierError) as caught:
        s3_place.store().publish(artifact, source)
    error: BaseException | None = caught.value
    while error is not None:
        assert not any(secret in f"{error!r} {error}" for secret in secrets)
        error = error.__cause__


def test_an_index_object_too_large_to_be_a_record_is_not_read(s3_place):
    """Damaged, so that `verify --repair` and a publisher put a good one in its place."""
    s3_place.put("index/k.json", bytes(17 << 20))
    with pytest.raises(ArtifactCorrupt, match="at most 16777216 are read"):
        s3_place.store().find("k")


def test_no_upload_dangles_when_the_source_is_wrong(s3_place, source):
    artifact = fill(source, {"big": os.urandom(1000) * 20_000}, "k")
    flip(source / "big", 0)
    with pytest.raises(ArtifactCorrupt):
        s3_place.store().publish(artifact, source)
    assert s3_place.dangling() == []


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3://bucket/../other",
        "s3://bucket//x",
        "s3://bucket/p?unknown=1",
        "s3://bucket/p?anon=maybe",
        "s3://bucket/p?timeout=soon",
        "s3://bucket/p?timeout=-1",
        "s3://bucket/p?endpoint_url=localhost:9000",
        "s3://bucket/p?addressing_style=odd",
    ],
)
def test_an_unusable_url_is_refused(url):
    with pytest.raises(ConfigError):
        S3Store.from_url(parse_tier_url(url))


def test_a_url_with_every_option_is_understood(s3_place, artifact, source):
    url = parse_tier_url(
        f"s3://{s3_place.bucket}/{s3_place.prefix}?endpoint_url={s3_place.url}&region=us-east-1"
        "&path_style=1&anon=0&connect_timeout=3&read_timeout=9&timeout=20&stall_timeout=30&name=moto"
    )
    store = S3Store.from_url(url)
    assert store.name == "moto"
    assert store.location == f"s3://{s3_place.bucket}/{s3_place.prefix}"
    assert store.publish(artifact, source).name == "CREATED"
    assert "index/k.json" in s3_place.paths()


def test_without_the_extra_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(MissingExtra, match=r"neuron-store\[s3\]"):
        S3Store("bucket/p")


def test_a_reader_of_a_read_only_tier_writes_nothing(s3_place, artifact, source, tmp_path):
    s3_place.store().publish(artifact, source)
    neff = artifact.file("graph_k.neff")
    s3_place.put(f"payload/k/{neff.sha256}/graph_k.neff", bytes(neff.size))
    before = s3_place.paths()
    (tmp_path / "into").mkdir()
    with pytest.raises(ArtifactCorrupt):
        s3_place.store(read_only=True).fetch("k", tmp_path / "into")
    assert s3_place.paths() == before


def test_errors_are_all_of_ours():
    assert issubclass(TierError, NeuronStoreError)


def test_a_dead_endpoint_is_not_promoted_to_again_and_again(tmp_path, aws):
    """`NEURON_STORE_PROMOTE=auto`: what a dead tier may cost, it may cost in all."""
    from neuron_store import CompileCoordinator, TieredStore
    from neuron_store.policy import CompilePolicy
    from neuron_store_backends.local import LocalStore
    from tests.fakes import FakeCompile

    published = []

    class Counted(S3Store):
        def publish(self, artifact, source, *, consume=False):
            published.append(artifact.key)
            return super().publish(artifact, source, consume=consume)

    times = Times(connect_timeout=0.2, timeout=0.5, stall_timeout=0.5)
    with black_hole() as url:
        shared = Counted("bucket/p", endpoint_url=url, times=times)
        with TieredStore([LocalStore(tmp_path / "root"), shared], deadline=0.6) as store:
            coordinator = CompileCoordinator(store, CompilePolicy(promote=True))
            for number in range(6):
                compile_ = FakeCompile(f"k{number}", str(tmp_path / "log"))
                assert coordinator.get_or_compile(compile_.job()).is_dir()
    # The first look-up or the first promotion finds it dead; then it is left alone.
    assert len(published) <= 1


@pytest.mark.parametrize("ask", ["publish", "keys", "delete"])
def test_a_listing_that_trickles_ends_in_its_deadline(s3_place, moto, artifact, source, ask):
    """A byte every 50 ms: an answer of half a KiB would take half a minute, and be complete."""
    store = s3_place.store(times=Times(stall_timeout=1.0, timeout=1.0))
    if ask != "publish":
        store.publish(artifact, source)
    moto.faults.add("trickle", method="GET", path="list-type=2", times=10**6)
    with pytest.raises(TierError, match="too slowly"):
        {
            "publish": lambda: store.publish(artifact, source),
            "keys": lambda: list(store.keys()),
            "delete": lambda: store.delete("k"),
        }[ask]()


def test_a_listing_of_many_pages_is_whole(s3_place, artifact, source):
    store = s3_place.store()
    keys = [f"k{n}+{n}=" for n in range(7)]
    for key in keys:
        store.publish(evolve(artifact, key=key), source)
    _on_listing(store, "before-parameter-build", lambda params, **_: params.update(MaxKeys=3))
    assert sorted(store.keys()) == keys


@pytest.mark.parametrize("token", [None, "again"])
def test_a_listing_that_does_not_say_how_it_goes_on_is_no_whole_one(
    s3_place, artifact, source, token
):
    """Else `gc` would take what it does not see for what is not there."""
    store = s3_place.store()
    store.publish(artifact, source)

    def cut(parsed, **_):
        parsed.pop("NextContinuationToken", None)
        parsed.update({"IsTruncated": True} | ({"NextContinuationToken": token} if token else {}))

    _on_listing(store, "after-call", cut)
    # moto knows no such token.
    _on_listing(
        store, "before-parameter-build", lambda params, **_: params.pop("ContinuationToken", None)
    )
    with pytest.raises(TierError, match="cuts a listing short"):
        list(store.keys())


def _on_listing(store, event, handler):
    store.objects.handle().api.meta.events.register(f"{event}.s3.ListObjectsV2", handler)


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3:///bucket/prefix", "s3://b//x"])
def test_an_address_without_a_bucket_is_refused(url):
    with pytest.raises(ConfigError, match=r"write s3://bucket"):
        S3Store.from_url(parse_tier_url(url))


def test_a_full_disk_on_this_side_is_said_and_not_blamed_on_the_store(
    s3_place, source, tmp_path, monkeypatch
):
    tier = s3_place.store()
    artifact = fill(source, {"graph_k.neff": os.urandom(200_000), "m.json": b"{}"}, "k")
    tier.publish(artifact, source)
    store = TieredStore([LocalStore(tmp_path / "local"), tier])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(TiersUnavailable) as caught:
                store.get("k")
        (_, said) = caught.value.answers
        assert (said.location, said.outcome) == (str(tmp_path / "local"), "error")
        assert "the disk is full; free space" in said.detail
    assert store.counters()[tier.name].errors == 0
    assert (store.get("k") / "graph_k.neff").stat().st_size == 200_000

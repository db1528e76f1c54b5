"""Signatures: what they stand for, whose count, and what becomes of artifacts without them."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys

import attrs
import pytest

from neuron_store import (
    ArtifactNotFound,
    ArtifactUntrusted,
    CompileCoordinator,
    ConfigError,
    PromoteError,
    Publication,
    TieredStore,
    open_store,
    save_cache,
)
from neuron_store.artifact import RECORD_NAME, Signature, dump_record, load_record
from neuron_store.errors import MissingExtra
from neuron_store.policy import CompilePolicy
from neuron_store.settings import load_settings
from neuron_store.signing import SCHEME, PublicKey, Signer, create_key, statement
from neuron_store.testing import make_source
from neuron_store.testing.killing import run_killed_at
from neuron_store.trust import TrustPolicy
from neuron_store.variables import Sources
from neuron_store_backends.local import LocalStore
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import FakeCompile, starts

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
FILES = {"graph.bin": b"payload" * 2000, "small": b"s"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Three key pairs, by name."""
    place = tmp_path_factory.mktemp("keys")
    for name in ("build", "next", "stranger"):
        create_key(place / name)
    return {n: Signer.load(place / n, what="--key") for n in ("build", "next", "stranger")}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("NEURON_", "VLLM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def memory(request):
    return MemoryStore(f"trust-{request.node.name}-{os.getpid()}")


@pytest.fixture(params=["posix", "memory"])
def shared(request, tmp_path, memory):
    """A tier of each way to publish."""
    return PosixStore(tmp_path / "shared") if request.param == "posix" else memory


def node(tmp_path, name, *shared, trusted=(), required=True, signer=None):
    policy = TrustPolicy([s.public for s in trusted], required=required) if trusted else None
    return TieredStore([LocalStore(tmp_path / name), *shared], trust=policy, signer=signer)


def compiled(tmp_path, name="build", key=KEY, files=FILES, **facts):
    """A node that has just compiled the artifact."""
    facts = {"components": {"target": "trn2", "n": 1.5, "é": [None, True]}, **facts}
    artifact, source = make_source(tmp_path / f"source-{name}-{key}", key, files, **facts)
    LocalStore(tmp_path / name).publish(artifact, source)


def rewrite(tier, key, change):
    """Change a tier's record behind its back, as whoever may write to it can."""
    if isinstance(tier, PosixStore):
        path = tier.root / key / RECORD_NAME
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
        return
    path, fs = tier.index_path(key), tier.objects.handle()
    fs.pipe_file(path, json.dumps(change(json.loads(fs.cat_file(path)))).encode())


class TestStatement:
    def test_each_fact_that_matters_is_part_of_it(self, tmp_path, keys):
        artifact, source = make_source(
            tmp_path / "s", KEY, FILES, components={"a": 1}, host={"h": "1"}
        )
        PosixStore(tmp_path / "t").publish(artifact, source)
        artifact = PosixStore(tmp_path / "t").find(KEY)
        file = artifact.files[0]
        changes = [
            {"key": OTHER},
            {"created": "2020-01-01T00:00:00+00:00"},
            {"executable": "small"},
            {"compiler": "x"},
            {"compiler_version": "2"},
            {"components": {"a": 2}},
            {"components": {"a": "1"}},
            {"components": {"a": 1.0}},
            {"host": {"h": "2"}},
            {"files": artifact.files[1:]},
            {"files": (attrs.evolve(file, name="other"), *artifact.files[1:])},
            {"files": (attrs.evolve(file, size=1), *artifact.files[1:])},
            {"files": (attrs.evolve(file, sha256="0" * 64), *artifact.files[1:])},
        ]
        made = [statement(attrs.evolve(artifact, **change)) for change in changes]
        assert len({statement(artifact), *made}) == len(changes) + 1
        policy = TrustPolicy([keys["build"].public], required=True)
        signed = keys["build"].sign(artifact)
        assert policy.judge(signed).outcome == "trusted"
        for change in changes:
            assert policy.judge(attrs.evolve(signed, **change)).outcome == "bad"

    def test_what_differs_from_copy_to_copy_is_no_part_of_it(self, tmp_path):
        artifact, source = make_source(tmp_path / "s", KEY, FILES)
        PosixStore(tmp_path / "t").publish(artifact, source)
        artifact = PosixStore(tmp_path / "t").find(KEY)
        copy = attrs.evolve(
            artifact,
            write_id="0" * 32,
            files=artifact.files[::-1],
            signatures=(Signature("a" * 32, "x", SCHEME),),
        )
        assert statement(copy) == statement(artifact)
        again, _ = load_record(dump_record(artifact, {"small": b"s"}), key=KEY, source="test")
        assert statement(again) == statement(artifact)

    def test_its_first_line_says_what_it_is_and_the_rest_is_one_line_of_json(self, tmp_path):
        artifact, source = make_source(tmp_path / "s", KEY, FILES)
        PosixStore(tmp_path / "t").publish(artifact, source)
        first, rest = statement(PosixStore(tmp_path / "t").find(KEY)).split(b"\n")
        assert first == b"neuron_store artifact statement v1"
        assert json.loads(rest)["key"] == KEY

    def test_a_record_without_digests_stands_for_no_bytes_and_is_not_signed(self, tmp_path, keys):
        artifact, _ = make_source(tmp_path / "s", KEY, FILES)
        with pytest.raises(ArtifactUntrusted, match="no digest"):
            keys["build"].sign(artifact)
        # Signed with digests, and the digests taken out afterwards.
        forged = attrs.evolve(
            artifact, signatures=(Signature(keys["build"].public.id, "A" * 88, SCHEME),)
        )
        assert TrustPolicy([keys["build"].public]).judge(forged).outcome == "bad"

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes"])
    def test_facts_that_are_no_json_are_not_signed(self, tmp_path, keys, value):
        artifact, _ = make_source(tmp_path / "s", KEY, FILES, components={"x": value})
        files = tuple(attrs.evolve(f, sha256="0" * 64) for f in artifact.files)
        with pytest.raises(ArtifactUntrusted, match="cannot be signed"):
            keys["build"].sign(attrs.evolve(artifact, files=files))


class TestRecord:
    def test_signatures_travel_in_the_record_and_an_unsigned_record_has_no_such_field(
        self, keys, tmp_path
    ):
        artifact, source = make_source(tmp_path / "s", KEY, FILES)
        PosixStore(tmp_path / "t").publish(artifact, source)
        artifact = PosixStore(tmp_path / "t").find(KEY)
        assert b"signatures" not in dump_record(artifact)
        signed = keys["next"].sign(keys["build"].sign(artifact))
        read, _ = load_record(dump_record(signed), key=KEY, source="test")
        assert [s.key_id for s in read.signatures] == [keys[n].public.id for n in ("build", "next")]
        assert keys["next"].sign(read).signatures == signed.signatures

    @pytest.mark.parametrize(
        "signatures",
        [
            1,
            "x",
            {},
            [1, None, "x", []],
            [{"key_id": 1}],
            [{"key_id": "../../etc", "scheme": "\n", "signature": "x"}],
            [{"key_id": "a" * 5000, "scheme": SCHEME, "signature": "x"}],
        ],
    )
    def test_what_is_no_signature_vouches_for_nothing_and_damages_nothing(
        self, tmp_path, signatures, caplog
    ):
        tier = PosixStore(tmp_path / "t")
        tier.publish(*make_source(tmp_path / "s", KEY, FILES))
        rewrite(tier, KEY, lambda raw: {**raw, "signatures": signatures})
        assert tier.find(KEY).signatures == ()
        tier.verify(KEY)

    def test_of_many_signatures_only_the_first_sixteen_are_looked_at(self, tmp_path, keys):
        tier = PosixStore(tmp_path / "t")
        tier.publish(*make_source(tmp_path / "s", KEY, FILES))
        junk = [
            {"key_id": f"{n:032x}", "scheme": SCHEME, "signature": "eA=="} for n in range(10_000)
        ]
        rewrite(tier, KEY, lambda raw: {**raw, "signatures": junk})
        assert len(tier.find(KEY).signatures) == 16


class TestFetch:
    def test_a_signed_artifact_is_fetched_and_keeps_its_signature(self, tmp_path, shared, keys):
        compiled(tmp_path)
        assert node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY) == {
            shared.name: Publication.CREATED
        }
        store = node(tmp_path, "b", shared, trusted=[keys["build"]])
        path = store.get(KEY)
        assert (path / "graph.bin").read_bytes() == FILES["graph.bin"]
        assert [s.key_id for s in store.local.find(KEY).signatures] == [keys["build"].public.id]
        assert store.counters()[shared.name].refused == 0

    def test_the_signature_outlives_promotion_by_a_node_that_has_no_key(
        self, tmp_path, memory, keys
    ):
        """Build → object tier → node → directory → node, each time with another write id."""
        compiled(tmp_path)
        directory = PosixStore(tmp_path / "directory")
        node(tmp_path, "build", memory, signer=keys["build"]).promote(KEY)
        node(tmp_path, "b", memory, trusted=[keys["build"]]).get(KEY)
        node(tmp_path, "b", directory).promote(KEY)
        store = node(tmp_path, "c", directory, trusted=[keys["build"]])
        store.get(KEY)
        ids = {s.find(KEY).write_id for s in (memory, directory, store.local)}
        assert len(ids) == 3
        assert TrustPolicy([keys["build"].public]).judge(store.local.find(KEY)).outcome == "trusted"

    @pytest.mark.parametrize(
        "how", ["unsigned", "stranger", "facts", "bytes", "other key", "stripped"]
    )
    def test_what_nobody_trusted_signed_is_refused_reported_and_left_where_it_is(
        self, tmp_path, shared, keys, how, caplog
    ):
        compiled(tmp_path)
        signer = {"unsigned": None, "stranger": keys["stranger"]}.get(how, keys["build"])
        key = KEY
        if how == "other key":
            # What was signed as KEY is planted as OTHER.
            compiled(tmp_path, "second", OTHER)
            node(tmp_path, "second", shared).promote(OTHER)
            node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
            signed = shared.find(KEY).signatures
            plain = [attrs.asdict(s) for s in signed]
            rewrite(shared, OTHER, lambda raw: {**raw, "signatures": plain})
            key = OTHER
        else:
            node(tmp_path, "build", shared, signer=signer).promote(KEY)
        if how == "facts":
            rewrite(shared, KEY, lambda raw: {**raw, "components": {"target": "trn1"}})
        if how == "bytes":
            other = make_source(tmp_path / "evil", KEY, {**FILES, "graph.bin": b"EVIL" * 3500})
            signatures = [attrs.asdict(s) for s in shared.find(KEY).signatures]
            shared.delete(KEY)
            shared.publish(*other)
            rewrite(shared, KEY, lambda raw: {**raw, "signatures": signatures})
        if how == "stripped":
            rewrite(shared, KEY, lambda raw: {k: v for k, v in raw.items() if k != "signatures"})
        store = node(tmp_path, "b", shared, trusted=[keys["build"], keys["next"]])
        before = shared.find(key)
        for _ in range(2):
            with pytest.raises(ArtifactNotFound) as caught:
                store.get(key)
            assert [a.outcome for a in caught.value.answers] == ["miss", "refused"]
        assert store.counters()[shared.name].refused == 2
        assert store.counters()[shared.name].errors == 0
        told = [
            r for r in caplog.records if "is refused" in r.message and r.levelno >= logging.WARNING
        ]
        assert len(told) == 1
        assert shared.find(key) == before
        shared.verify(key)
        assert store.local.find(key) is None
        with pytest.raises(ArtifactUntrusted):
            store.find(key)
        with pytest.raises(ArtifactUntrusted):
            store.verify(key)
        with pytest.raises(ArtifactNotFound):
            store.open_file(key, "small")

    def test_nothing_of_a_refused_artifact_is_read_but_its_record(
        self, tmp_path, keys, monkeypatch
    ):
        compiled(tmp_path)
        shared = PosixStore(tmp_path / "shared")
        node(tmp_path, "build", shared).promote(KEY)
        opened = []
        monkeypatch.setattr(
            "neuron_store_backends._entry.Entry.open",
            lambda self, name: (
                opened.append((self.path, name)) or os.open(f"{self.path}/{name}", 0)
            ),
        )
        with pytest.raises(ArtifactNotFound):
            node(tmp_path, "b", shared, trusted=[keys["build"]]).get(KEY)
        assert opened == []

    def test_bytes_that_do_not_fit_the_signed_digests_are_damage_and_not_used(
        self, tmp_path, shared, keys
    ):
        compiled(tmp_path)
        node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
        if isinstance(shared, PosixStore):
            (shared.root / KEY / "graph.bin").write_bytes(b"EVIL***" * 2000)
        else:
            parcels = shared.parcels(shared.find(KEY), ())
            path = next(p.path for p in parcels if p.files[0].name == "graph.bin")
            shared.objects.handle().pipe_file(path, b"EVIL***" * 2000)
        with pytest.raises(ArtifactNotFound, match="corrupt"):
            node(tmp_path, "b", shared, trusted=[keys["build"]]).get(KEY)

    def test_the_next_tier_is_asked_and_in_the_end_it_is_compiled_again(
        self, tmp_path, memory, keys
    ):
        compiled(tmp_path)
        planted = PosixStore(tmp_path / "planted")
        node(tmp_path, "build", planted).promote(KEY)
        node(tmp_path, "build", memory, signer=keys["build"]).promote(KEY)
        store = node(tmp_path, "b", planted, memory, trusted=[keys["build"]])
        store.get(KEY)
        assert store.counters()[planted.name].refused == 1
        assert store.counters()[memory.name].hits == 1

        job = FakeCompile(KEY, str(tmp_path / "log")).job()
        alone = node(tmp_path, "c", planted, trusted=[keys["build"]])
        CompileCoordinator(alone, CompilePolicy()).get_or_compile(job)
        assert len(starts(tmp_path / "log")) == 1

    def test_a_record_that_is_exchanged_between_two_looks_is_not_taken(self, tmp_path, keys):
        """By a tier that knows nothing of `fetch_accepted`: the default looks twice."""
        compiled(tmp_path)
        shared = PosixStore(tmp_path / "shared")
        node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
        evil = PosixStore(tmp_path / "evil")
        evil.publish(*make_source(tmp_path / "e", KEY, {"graph.bin": b"EVIL"}))

        class Exchanged(PosixStore):
            fetch_accepted = PosixStore.__mro__[2].fetch_accepted

            def fetch(self, key, into):
                return evil.fetch(key, into)

        store = node(tmp_path, "b", Exchanged(shared.root), trusted=[keys["build"]])
        with pytest.raises(ArtifactNotFound, match="refused"):
            store.get(KEY)
        assert store.local.find(KEY) is None

    def test_a_stream_of_a_shared_tier_is_fetched_and_checked_first(self, tmp_path, shared, keys):
        compiled(tmp_path)
        node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
        store = node(tmp_path, "b", shared, trusted=[keys["build"]])
        with store.open_file(KEY, "small") as stream:
            assert stream.read() == b"s"
        assert store.local.find(KEY) is not None
        with pytest.raises(ArtifactNotFound, match="no file"):
            store.open_file(KEY, "nowhere")

    def test_an_entry_of_the_neuron_stack_is_unsigned(self, tmp_path, keys):
        from tests.fakes import write_entry

        shared = PosixStore(tmp_path / "shared")
        (shared.root / KEY).mkdir(parents=True)
        write_entry(shared.root / KEY, KEY)
        assert node(tmp_path, "a", shared).get(KEY)
        with pytest.raises(ArtifactNotFound, match="not signed"):
            node(tmp_path, "b", shared, trusted=[keys["build"]]).get(KEY)

    def test_without_the_requirement_unsigned_is_taken_and_a_wrong_signature_is_not(
        self, tmp_path, keys
    ):
        compiled(tmp_path)
        shared = PosixStore(tmp_path / "shared")
        node(tmp_path, "build", shared).promote(KEY)
        trusted = {"trusted": [keys["build"]], "required": False}
        node(tmp_path, "b", shared, **trusted).get(KEY)
        shared.delete(KEY)
        node(tmp_path, "build", shared, signer=keys["stranger"]).promote(KEY)
        node(tmp_path, "c", shared, **trusted).get(KEY)
        shared.delete(KEY)
        node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
        rewrite(shared, KEY, lambda raw: {**raw, "host": {"name": "elsewhere"}})
        with pytest.raises(ArtifactNotFound, match="does not fit"):
            node(tmp_path, "d", shared, **trusted).get(KEY)


class TestPromote:
    def test_old_and_new_key_sign_side_by_side_while_keys_are_exchanged(
        self, tmp_path, shared, keys
    ):
        compiled(tmp_path)
        node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
        found = node(tmp_path, "build", shared, signer=keys["next"]).promote(KEY)
        assert found == {shared.name: Publication.PRESENT}
        assert len(shared.find(KEY).signatures) == 2
        for name in ("build", "next"):
            node(tmp_path, f"node-{name}", shared, trusted=[keys[name]]).get(KEY)
        shared.verify(KEY)

    def test_an_unsigned_entry_with_the_same_record_gets_the_signature(
        self, tmp_path, shared, keys
    ):
        compiled(tmp_path)
        node(tmp_path, "build", shared).promote(KEY)
        before = shared.find(KEY)
        signed = node(tmp_path, "build", shared, signer=keys["build"])
        for _ in range(2):
            assert signed.promote(KEY) == {shared.name: Publication.PRESENT}
        after = shared.find(KEY)
        assert after == before
        assert after.write_id == before.write_id
        assert len(after.signatures) == 1
        node(tmp_path, "b", shared, trusted=[keys["build"]]).get(KEY)

    def test_a_record_of_others_is_not_vouched_for_and_the_tier_counts_as_not_reached(
        self, tmp_path, shared, keys
    ):
        compiled(tmp_path, "stranger")
        compiled(tmp_path, "build", components={"target": "trn1"})
        node(tmp_path, "stranger", shared).promote(KEY)
        with pytest.raises(PromoteError, match="delete it there"):
            node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
        assert shared.find(KEY).signatures == ()

    def test_another_nodes_record_by_the_same_key_is_as_good(self, tmp_path, shared, keys):
        compiled(tmp_path, "one")
        compiled(tmp_path, "two")
        node(tmp_path, "one", shared, signer=keys["build"]).promote(KEY)
        found = node(tmp_path, "two", shared, signer=keys["build"]).promote(KEY)
        assert found == {shared.name: Publication.PRESENT}

    def test_signing_at_the_same_time_loses_no_signature(self, tmp_path, shared, keys):
        import threading

        compiled(tmp_path)
        node(tmp_path, "build", shared).promote(KEY)
        stores = [node(tmp_path, "build", shared, signer=signer) for signer in keys.values()]
        barrier = threading.Barrier(len(stores))
        failures = []

        def sign(store):
            barrier.wait()
            try:
                store.promote(KEY)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=sign, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert {s.key_id for s in shared.find(KEY).signatures} == {
            k.public.id for k in keys.values()
        }

    def test_a_kill_at_any_step_of_signing_leaves_a_whole_entry(self, tmp_path, keys):
        compiled(tmp_path)
        killed = []
        for number in range(1, 40):
            shared = PosixStore(tmp_path / f"shared-{number}")
            node(tmp_path, "build", shared).promote(KEY)
            store = node(tmp_path, "build", shared, signer=keys["build"])
            told = run_killed_at(lambda store=store: store.promote(KEY), number)
            assert told.error is None
            found = PosixStore(shared.root).verify(KEY)
            assert len(found.signatures) in {0, 1}
            assert list(shared.keys()) == [KEY]
            if told.step is None:
                assert len(found.signatures) == 1
                break
            killed.append(told.step)
        assert {"endorse.claim", "endorse.write", "endorse.rename", "endorse.done"} <= set(killed)

    def test_what_others_made_is_not_signed_as_our_own(self, tmp_path, keys):
        """Whoever can write the tier could else have the build key vouch for anything."""
        evil, source = make_source(tmp_path / "evil", KEY, {"k.bin": b"EVIL"})
        shared = PosixStore(tmp_path / "shared")
        shared.publish(evil, source)
        store = node(tmp_path, "build", shared, signer=keys["build"])
        assert (store.get(KEY) / "k.bin").read_bytes() == b"EVIL"
        with pytest.raises(ArtifactUntrusted, match=f"fetched from {shared.root}") as caught:
            store.promote(KEY)
        assert "delete it here and compile it" in str(caught.value)
        assert shared.find(KEY).signatures == ()
        # Nor by way of another tier, or without the store's own key.
        store = node(tmp_path, "build", PosixStore(tmp_path / "second"))
        with pytest.raises(ArtifactUntrusted):
            store.promote(KEY, signer=keys["build"])
        # Unsigned it goes on, and says no more where it came from.
        assert store.promote(KEY) == {store.shared[0].name: Publication.CREATED}
        assert store.shared[0].find(KEY).fetched_from is None
        assert store.local.find(KEY).fetched_from == str(shared.root)

    def test_what_this_key_or_a_trusted_one_signed_is_signed_again(self, tmp_path, keys):
        compiled(tmp_path)
        shared = PosixStore(tmp_path / "shared")
        node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)
        second = PosixStore(tmp_path / "second")
        mine = node(tmp_path, "other", shared, second, signer=keys["build"])
        mine.get(KEY)
        assert mine.promote(KEY)[second.name] is Publication.CREATED
        theirs = node(
            tmp_path, "third", shared, trusted=[keys["build"]], signer=keys["next"], required=False
        )
        theirs.get(KEY)
        theirs.promote(KEY)
        assert len(shared.find(KEY).signatures) == 2

    def test_a_record_full_of_junk_signatures_can_be_signed(self, tmp_path, keys):
        compiled(tmp_path)
        shared = PosixStore(tmp_path / "shared")
        node(tmp_path, "build", shared).promote(KEY)
        junk = [{"key_id": f"{n:032x}", "signature": "A" * 88, "scheme": SCHEME} for n in range(16)]
        rewrite(shared, KEY, lambda record: {**record, "signatures": junk})
        store = node(tmp_path, "build", shared, signer=keys["build"])
        assert store.promote(KEY) == {shared.name: Publication.PRESENT}
        reader = node(tmp_path, "reader", shared, trusted=[keys["build"]])
        assert reader.get(KEY)

    def test_verify_goes_by_the_record_as_find_does(self, tmp_path, keys):
        """A digest that the record leaves out is computed, and so fits; nobody signed that."""
        compiled(tmp_path)
        shared = PosixStore(tmp_path / "shared")
        node(tmp_path, "build", shared, signer=keys["build"]).promote(KEY)

        def forget(record):
            record["files"][0]["sha256"] = None
            return record

        rewrite(shared, KEY, forget)
        reader = node(tmp_path, "reader", shared, trusted=[keys["build"]])
        for ask in (reader.find, reader.verify):
            with pytest.raises(ArtifactUntrusted):
                ask(KEY)

    def test_whoever_was_killed_while_signing_blocks_nobody(self, tmp_path, keys, monkeypatch):
        monkeypatch.setattr("neuron_store_backends._aside.CLAIM_SECONDS", 0.2)
        compiled(tmp_path)
        shared = PosixStore(tmp_path / "shared")
        node(tmp_path, "build", shared).promote(KEY)
        store = node(tmp_path, "build", shared, signer=keys["build"])
        for last in ("endorse.claim", "endorse.write", "endorse.rename"):
            # By name: a claim that was left is waited out in as many steps as it takes.
            assert run_killed_at(lambda: store.promote(KEY), 1, name=last).step == last
        assert store.promote(KEY) == {shared.name: Publication.PRESENT}
        assert len(shared.find(KEY).signatures) == 1

    def test_save_cache_and_automatic_promotion_sign_with_the_key_in_the_environment(
        self, tmp_path, monkeypatch, keys
    ):
        public = create_key(tmp_path / "key")
        monkeypatch.setenv("NEURON_STORE_SIGNING_KEY", str(tmp_path / "key"))
        compiled(tmp_path)
        save_cache(tmp_path / "build", tmp_path / "shared", KEY)
        policy = TrustPolicy([public], required=True)
        assert policy.judge(PosixStore(tmp_path / "shared").find(KEY)).outcome == "trusted"

        with open_store(tmp_path / "auto", local=tmp_path / "c") as store:
            job = FakeCompile(OTHER, str(tmp_path / "log")).job()
            CompileCoordinator(store, CompilePolicy(promote=True)).get_or_compile(job)
        assert policy.judge(PosixStore(tmp_path / "auto").find(OTHER)).outcome == "trusted"


class TestSettings:
    def test_trusted_keys_are_keys_files_and_directories(self, tmp_path, keys):
        place = tmp_path / "trusted.d"
        place.mkdir()
        (place / "a.pub").write_text(f"# ours\n\n{keys['build'].public} build machine\n")
        (place / "README").write_text("not a key")
        (tmp_path / "one.pub").write_text(f"{keys['next'].public}\n")
        value = f"{keys['stranger'].public} {place} {tmp_path / 'one.pub'}"
        settings = load_settings({"NEURON_STORE_TRUSTED_KEYS": value, "HOME": str(tmp_path)})
        assert {k.id for k in settings.trust.keys} == {k.public.id for k in keys.values()}
        assert not settings.trust.required

    def test_the_settings_file_takes_a_list(self, tmp_path, keys):
        file = tmp_path / "settings.toml"
        file.write_text(
            f'trusted_keys = ["{keys["build"].public}"]\n'
            'require_signature = true\nverify = "always"\n'
        )
        settings = load_settings({"NEURON_STORE_CONFIG": str(file), "HOME": str(tmp_path)})
        assert settings.trust.required
        assert settings.verify == "always"

    @pytest.mark.parametrize(
        ("name", "value", "match"),
        [
            ("NEURON_STORE_REQUIRE_SIGNATURE", "1", "names no key"),
            ("NEURON_STORE_TRUSTED_KEYS", "ed25519:AAAA", "no public key"),
            ("NEURON_STORE_TRUSTED_KEYS", "rsa:AAAA", "neither a key"),
            ("NEURON_STORE_TRUSTED_KEYS", "keys/a.pub", "absolute path"),
            ("NEURON_STORE_TRUSTED_KEYS", "/nowhere/a.pub", "No such file"),
            ("NEURON_STORE_VERIFY", "never", "none of"),
        ],
    )
    def test_a_setting_that_cannot_be_used_is_named(self, tmp_path, name, value, match):
        with pytest.raises(ConfigError, match=match) as caught:
            load_settings({name: value, "HOME": str(tmp_path)})
        assert name in str(caught.value)

    def test_a_file_of_trusted_keys_that_others_may_write_is_refused(self, tmp_path, keys):
        file = tmp_path / "a.pub"
        file.write_text(f"{keys['build'].public}\n")
        file.chmod(0o664)
        with pytest.raises(ConfigError, match="could add a key"):
            load_settings({"NEURON_STORE_TRUSTED_KEYS": str(file), "HOME": str(tmp_path)})

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
    def test_a_directory_of_trusted_keys_that_others_may_write_is_refused(
        self, tmp_path, keys, mode
    ):
        place = tmp_path / "trusted"
        place.mkdir()
        (place / "a.pub").write_text(f"{keys['build'].public}\n")
        place.chmod(mode)
        with pytest.raises(ConfigError, match="could add a key; run: chmod go-w"):
            load_settings({"NEURON_STORE_TRUSTED_KEYS": str(place), "HOME": str(tmp_path)})

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file away")
    @pytest.mark.parametrize("name", ["trusted", "trusted/a.pub"])
    def test_trusted_keys_that_belong_to_a_stranger_are_refused(self, tmp_path, keys, name):
        place = tmp_path / "trusted"
        place.mkdir()
        (place / "a.pub").write_text(f"{keys['build'].public}\n")
        os.chown(tmp_path / name, 65534, 65534)
        with pytest.raises(ConfigError, match="belongs to uid 65534") as caught:
            load_settings({"NEURON_STORE_TRUSTED_KEYS": str(place), "HOME": str(tmp_path)})
        assert str(tmp_path / name) in str(caught.value)

    def test_trusted_keys_behind_a_link_that_loops_are_named_once(self, tmp_path):
        (tmp_path / "a.pub").symlink_to(tmp_path / "a.pub")
        with pytest.raises(ConfigError, match="Too many levels") as caught:
            load_settings(
                {"NEURON_STORE_TRUSTED_KEYS": str(tmp_path / "a.pub"), "HOME": str(tmp_path)}
            )
        assert str(caught.value).count(str(tmp_path)) == 1

    def test_where_signatures_count_a_local_tier_open_to_all_is_refused(
        self, tmp_path, monkeypatch, keys
    ):
        monkeypatch.setenv("NEURON_STORE_TRUSTED_KEYS", str(keys["build"].public))
        (tmp_path / "local").mkdir()
        (tmp_path / "local").chmod(0o1777)
        open_store(tmp_path / "shared", local=tmp_path / "local").close()
        monkeypatch.setenv("NEURON_STORE_REQUIRE_SIGNATURE", "1")
        with pytest.raises(ConfigError, match="writable by all"):
            open_store(tmp_path / "shared", local=tmp_path / "local")
        (tmp_path / "local").chmod(0o700)
        open_store(tmp_path / "shared", local=tmp_path / "local").close()

    def test_where_signatures_count_the_local_tier_is_there_before_anybody_else_can_make_it(
        self, tmp_path, monkeypatch, keys
    ):
        monkeypatch.setenv("NEURON_STORE_TRUSTED_KEYS", str(keys["build"].public))
        monkeypatch.setenv("NEURON_STORE_REQUIRE_SIGNATURE", "1")
        before = os.umask(0)
        try:
            open_store(tmp_path / "shared", local=tmp_path / "a" / "b" / "local").close()
        finally:
            os.umask(before)
        for path in ("a", "a/b", "a/b/local"):
            assert (tmp_path / path).stat().st_mode & 0o022 == 0

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory away")
    def test_where_signatures_count_a_strangers_local_tier_is_refused(
        self, tmp_path, monkeypatch, keys
    ):
        monkeypatch.setenv("NEURON_STORE_TRUSTED_KEYS", str(keys["build"].public))
        monkeypatch.setenv("NEURON_STORE_REQUIRE_SIGNATURE", "1")
        (tmp_path / "local").mkdir()
        os.chown(tmp_path / "local", 65534, 65534)
        with pytest.raises(ConfigError, match="belongs to uid 65534"):
            open_store(tmp_path / "shared", local=tmp_path / "local")


class TestKeys:
    def test_a_private_key_is_0600_and_nothing_is_overwritten(self, tmp_path):
        old = os.umask(0)
        try:
            public = create_key(tmp_path / "key")
        finally:
            os.umask(old)
        assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "key.pub").stat().st_mode & 0o777 == 0o644
        assert PublicKey.parse((tmp_path / "key.pub").read_text().strip(), what="t") == public
        secret = (tmp_path / "key").read_bytes()
        for _ in range(2):
            with pytest.raises(ConfigError, match="exists"):
                create_key(tmp_path / "key")
            assert (tmp_path / "key").read_bytes() == secret
        (tmp_path / "other.pub").write_text("mine")
        with pytest.raises(ConfigError, match="exists"):
            create_key(tmp_path / "other")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["key", "key.pub", "other.pub"]

    @pytest.mark.parametrize("name", ["a/", "there", "there/"])
    def test_a_directory_is_no_name_for_a_key(self, tmp_path, name):
        (tmp_path / "there").mkdir()
        with pytest.raises(ConfigError, match="names a directory"):
            create_key(f"{tmp_path}/{name}")
        assert [p.name for p in tmp_path.rglob("*")] == ["there"]

    def test_a_place_that_cannot_be_written_is_told_by_the_name_that_was_given(self, tmp_path):
        with pytest.raises(ConfigError) as caught:
            create_key(tmp_path / "no" / "key")
        assert str(caught.value) == f"{tmp_path}/no/key: No such file or directory"

    def test_a_key_in_the_place_of_its_files_name_is_not_repeated(self, tmp_path):
        create_key(tmp_path / "key")
        pem = (tmp_path / "key").read_text()
        bare = "".join(pem.splitlines()[1:-1])
        signing, trusted = "NEURON_STORE_SIGNING_KEY", "NEURON_STORE_TRUSTED_KEYS"
        for text in (pem, bare):
            for load in (
                lambda text=text: Signer.load(text, what="--key"),
                lambda text=text: load_settings({signing: text}),
                lambda text=text: PublicKey.parse(f"ed25519:{text}", what="here"),
                lambda text=text: TrustPolicy.from_sources(
                    Sources.load({trusted: f"ed25519:{text}"})
                ),
                lambda text=text: TrustPolicy.from_sources(Sources.load({trusted: text})),
            ):
                with pytest.raises(ConfigError) as caught:
                    load()
                assert bare[:20] not in str(caught.value)

    def test_a_path_that_looks_like_a_key_is_a_path(self, tmp_path):
        name = str(tmp_path / ("k" * 60))
        public = create_key(name)
        assert Signer.load(name, what="--key").public == public

    def test_a_public_key_in_place_of_a_private_one_is_said_to_be_one(self, tmp_path):
        create_key(tmp_path / "key")
        with pytest.raises(ConfigError, match="this is a public key") as caught:
            Signer.load(tmp_path / "key.pub", what="--key")
        assert "chmod" not in str(caught.value)

    def test_nobody_is_told_to_chmod_what_is_no_private_key(self, tmp_path):
        (tmp_path / "notes").write_text("mine")
        (tmp_path / "notes").chmod(0o644)
        with pytest.raises(ConfigError, match="not a private key"):
            Signer.load(tmp_path / "notes", what="--key")

    def test_openssl_and_we_read_each_others_keys(self, tmp_path):
        import shutil

        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        made = tmp_path / "made.pem"
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(made)], check=True
        )
        made.chmod(0o600)
        assert Signer.load(made, what="--key").public.raw
        create_key(tmp_path / "ours")
        subprocess.run(["openssl", "pkey", "-in", str(tmp_path / "ours"), "-noout"], check=True)

    def test_a_key_that_others_may_read_is_refused(self, tmp_path):
        create_key(tmp_path / "key")
        (tmp_path / "key").chmod(0o640)
        with pytest.raises(ConfigError, match="chmod 600"):
            Signer.load(tmp_path / "key", what="--key")

    @pytest.mark.parametrize(
        "content",
        [b"", b"\xff" * 100, b"-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----\n"],
    )
    def test_what_is_no_key_is_named_and_not_quoted(self, tmp_path, content):
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
        with pytest.raises(ConfigError, match="not a private key") as caught:
            Signer.load(tmp_path / "key", what="--key")
        assert str(tmp_path / "key") in str(caught.value)
        assert "MC4C" not in str(caught.value)

    def test_keys_of_other_kinds_and_encrypted_ones_are_refused(self, tmp_path):
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519

        def write(private, cipher):
            data = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, cipher)
            (tmp_path / "key").write_bytes(data)
            (tmp_path / "key").chmod(0o600)

        write(ec.generate_private_key(ec.SECP256R1()), form.NoEncryption())
        with pytest.raises(ConfigError, match="not an Ed25519 key"):
            Signer.load(tmp_path / "key", what="--key")
        write(ed25519.Ed25519PrivateKey.generate(), form.BestAvailableEncryption(b"secret"))
        with pytest.raises(ConfigError, match="encrypted"):
            Signer.load(tmp_path / "key", what="--key")

    def test_the_secret_is_in_no_text_of_the_signer(self, tmp_path):
        create_key(tmp_path / "key")
        signer = Signer.load(tmp_path / "key", what="--key")
        secret = signer._private.private_bytes_raw()
        text = repr(signer) + str(signer)
        assert base64.b64encode(secret).decode() not in text
        assert secret.hex() not in text
        assert "Ed25519PrivateKey" not in text

    def test_without_the_extra_the_error_names_it_and_unsigned_stores_work(
        self, tmp_path, monkeypatch, keys
    ):
        for name in [m for m in sys.modules if m.split(".")[0] == "cryptography"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "cryptography", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingExtra, match=r"neuron-store\[sign\]"):
            create_key(tmp_path / "key")
        environ = {"NEURON_STORE_TRUSTED_KEYS": str(keys["build"].public), "HOME": str(tmp_path)}
        with pytest.raises(MissingExtra, match=r"neuron-store\[sign\]"):
            load_settings(environ)
        load_settings({"HOME": str(tmp_path)})

    def test_opening_a_store_without_keys_imports_no_cryptography(self, tmp_path):
        code = (
            "import sys; from neuron_store import open_store; "
            "open_store('/x/y', local=sys.argv[1]); "
            "sys.exit('cryptography' in sys.modules)"
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("NEURON_")}
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=env)

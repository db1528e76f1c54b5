"""The contract must fail on stores that break it: otherwise passing it would say nothing."""

from __future__ import annotations

import functools
import os
import shutil
import time

import attrs
import pytest

from neuron_store import Publication
from neuron_store.artifact import dump_record, load_record
from neuron_store.testing import ArtifactStoreContract
from neuron_store.testing.contract import KEY
from neuron_store_backends.posix import PosixStore
from neuron_store_backends.renaming import with_digests


class LooksFirst(PosixStore):
    """Looks whether the key is there, then writes in place: what racy caches do."""

    def publish(self, artifact, source, *, consume=False):
        existing = self.find(artifact.key)
        # Long enough for another's look, or it would be luck whether one comes in between.
        time.sleep(0.05)
        if existing is not None:
            same = existing.same_bytes(with_digests(artifact, source))
            return Publication.PRESENT if same else Publication.CONFLICT
        target = self.root / artifact.key
        shutil.copytree(source, target, dirs_exist_ok=True)
        record = dump_record(with_digests(artifact, source))
        (target / ".neuron_store.json").write_bytes(record)
        return Publication.CREATED


class Replaces(PosixStore):
    """The last writer wins."""

    def publish(self, artifact, source, *, consume=False):
        existing = self.find(artifact.key)
        if existing is not None:
            self.delete(artifact.key)
        return super().publish(artifact, source, consume=consume)


class MarksFirst(PosixStore):
    """Writes the record before the files, so a reader takes half an artifact for a whole one."""

    def publish(self, artifact, source, *, consume=False):
        target = self.root / artifact.key
        if target.exists():
            return super().publish(artifact, source, consume=consume)
        os.makedirs(target)
        (target / ".neuron_store.json").write_bytes(dump_record(with_digests(artifact, source)))
        # As above, for a reader's turn.
        time.sleep(0.1)
        for file in artifact.files:
            (target / file.name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file.name, target / file.name)
        return Publication.CREATED


def with_facts(store, artifact, **facts):
    """What a tier does that writes the record from what it thinks of the artifact."""
    path = store.root / artifact.key / ".neuron_store.json"
    record, inline = load_record(path.read_bytes(), key=artifact.key, source=store.location)
    path.write_bytes(dump_record(attrs.evolve(record, **facts), inline))


class DropsSignatures(PosixStore):
    """Publishes the artifact, and nobody's word for it."""

    def publish(self, artifact, source, *, consume=False):
        unsigned = attrs.evolve(artifact, signatures=())
        return super().publish(unsigned, source, consume=consume)


class SameWriteId(PosixStore):
    """Cannot tell its own record from another's after a lost reply."""

    def publish(self, artifact, source, *, consume=False):
        answer = super().publish(artifact, source, consume=consume)
        if answer is Publication.CREATED:
            with_facts(self, artifact, write_id="0" * 32)
        return answer


class Contract(ArtifactStoreContract):
    __test__ = False
    rounds = 60
    method = "fork"


def test_a_store_that_looks_before_it_writes_fails_the_race(tmp_path):
    factory = functools.partial(LooksFirst, str(tmp_path / "tier"))
    with pytest.raises(AssertionError):
        Contract().test_of_racing_publishers_exactly_one_creates(factory, tmp_path, same=False)


def test_a_store_where_the_last_writer_wins_fails(tmp_path):
    with pytest.raises(AssertionError):
        Contract().test_the_first_writer_stays_whatever_the_size(
            Replaces(tmp_path / "tier"), tmp_path, 1
        )


@pytest.mark.parametrize("limit", [1, 2])
def test_a_store_that_ignores_exclusive_create_for_small_files_fails(tmp_path, limit):
    """Pitfall 19: the contract asks with 0 B, 1 B and 6 MiB."""

    class SmallOnesReplace(Replaces):
        def publish(self, artifact, source, *, consume=False):
            if artifact.size < limit:
                return super().publish(artifact, source, consume=consume)
            return PosixStore.publish(self, artifact, source, consume=consume)

    contract, tier = Contract(), SmallOnesReplace(tmp_path / "tier")
    with pytest.raises(AssertionError):
        contract.test_the_first_writer_stays_whatever_the_size(tier, tmp_path / "a", limit - 1)
    tier.delete(KEY)
    contract.test_the_first_writer_stays_whatever_the_size(tier, tmp_path / "b", 6 << 20)


def test_a_store_that_shows_half_an_artifact_fails_the_readers(tmp_path):
    factory = functools.partial(MarksFirst, str(tmp_path / "tier"))
    # OSError: a reader may take the damaged directory away while it is being filled.
    with pytest.raises((AssertionError, OSError)):
        Contract().test_a_reader_sees_a_whole_artifact_or_none(factory, tmp_path)


def test_a_store_that_drops_signatures_fails(tmp_path):
    contract, tier = Contract(), DropsSignatures(tmp_path / "tier")
    with pytest.raises(AssertionError, match="vouches"):
        contract.test_what_is_published_is_found_read_fetched_and_listed(tier, tmp_path)


def test_a_store_whose_writes_all_have_one_write_id_fails(tmp_path):
    contract, tier = Contract(), SameWriteId(tmp_path / "tier")
    with pytest.raises(AssertionError, match="its record from another's"):
        contract.test_a_deleted_artifact_is_gone_and_may_come_back(tier, tmp_path)


def test_a_store_that_remembers_a_miss_fails(tmp_path):
    class Remembers(PosixStore):
        misses: set[str]

        def find(self, key):
            self.misses = getattr(self, "misses", set())
            found = None if key in self.misses else super().find(key)
            if found is None:
                self.misses.add(key)
            return found

    factory = functools.partial(Remembers, str(tmp_path / "tier"))
    with pytest.raises(AssertionError):
        Contract().test_another_clients_write_and_delete_are_seen_at_once(
            factory, Remembers(tmp_path / "tier"), tmp_path
        )

"""Adding signatures to a record that is there, the artifact and its write id untouched.

A record is exchanged as a whole: by a rename inside the entry's directory, under the claim that
keeps everybody else from it, or by a conditional replace. Readers have the one or the other.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING

from neuron_store.artifact import (
    MAX_RECORD_BYTES,
    RECORD_NAME,
    Artifact,
    dump_record,
)
from neuron_store.errors import ArtifactCorrupt, InvalidRecord, TierError
from neuron_store.signing import merge_signatures, same_statement
from neuron_store.steps import step
from neuron_store.streams import write_all
from neuron_store_backends._aside import claimed
from neuron_store_backends._honesty import require_replace
from neuron_store_backends._trouble import Changed, backoff

if TYPE_CHECKING:
    from neuron_store_backends._entry import Entry
    from neuron_store_backends.conditional import ConditionalStore

__all__ = ["endorse_entry", "endorse_object"]

_ROUNDS = 12
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _endorsed(there: Artifact | None, artifact: Artifact) -> Artifact | None:
    """What is there with the signatures of `artifact` too; None where it says something else."""
    if there is None or not same_statement(there, artifact):
        return None
    return merge_signatures(there, *artifact.signatures)


def _unchanged(there: Artifact | None, merged: Artifact) -> bool:
    return there is not None and set(there.signatures) == set(merged.signatures)


def endorse_entry(entry: Entry, artifact: Artifact) -> bool:
    """`ArtifactStore.endorse` for a directory."""
    there = entry.artifact()
    merged = _endorsed(there, artifact)
    if merged is None or _unchanged(there, merged):
        return merged is not None
    step("endorse.claim")
    with claimed(entry) as held:
        # What was read before may have been endorsed by somebody else since.
        merged = _endorsed(entry.artifact(), artifact) if held else None
        if merged is None:
            return False
        draft = f".neuron_store.{uuid.uuid4().hex}"
        step("endorse.write")
        try:
            descriptor = os.open(draft, _NEW, 0o666, dir_fd=entry.fd)
            try:
                write_all(descriptor, dump_record(merged))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            step("endorse.rename")
            os.rename(draft, RECORD_NAME, src_dir_fd=entry.fd, dst_dir_fd=entry.fd)
        except BaseException:
            _discard(draft, entry)
            raise
        step("endorse.done")
    return True


def _discard(draft: str, entry: Entry) -> None:
    try:
        os.unlink(draft, dir_fd=entry.fd)
    except OSError:  # it was never made, or the disk is in trouble: the name is ours alone
        pass


def endorse_object(store: ConditionalStore, artifact: Artifact) -> bool:
    """`ArtifactStore.endorse` for an object store."""
    key, objects = artifact.key, store.objects
    path = store.index_path(key)
    for attempt in range(1, _ROUNDS + 1):
        step("endorse.look")
        blob = objects.read(path, MAX_RECORD_BYTES, key=key)
        if blob is None:
            return False
        try:
            there, inline = store.parse(key, blob)
        except InvalidRecord as error:
            raise ArtifactCorrupt(key, store.location, error.reason) from error
        merged = _endorsed(there, artifact)
        if merged is None or _unchanged(there, merged):
            return merged is not None
        require_replace(objects, key, why="the record is to be signed")
        step("endorse.replace")
        try:
            objects.replace(path, dump_record(merged, inline), blob.version, key=key)
        except Changed:
            # By somebody else, or by us with the reply lost: the next look tells.
            time.sleep(backoff(attempt))
            continue
        step("endorse.replaced")
        return True
    raise TierError(store.location, "endorse", "others keep changing the record", key=key)

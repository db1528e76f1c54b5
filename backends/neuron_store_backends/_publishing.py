"""One publish by conditional create, from the first look to the answer.

Whatever interrupts it, at most payload without a record stays behind, which nobody sees and `gc`
sweeps. Nothing that exists is ever overwritten by other bytes, but for a record that is proven to
be damaged, and that only on the condition that it is still the one that was proven so.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs

from neuron_store.abc import Publication
from neuron_store.artifact import MAX_RECORD_BYTES, Artifact, dump_record, new_write_id
from neuron_store.errors import (
    ArtifactCorrupt,
    InvalidArtifact,
    InvalidRecord,
    TierError,
    TierUnfit,
)
from neuron_store.signing import merge_signatures, same_statement
from neuron_store.steps import step
from neuron_store_backends._honesty import (
    require_create,
    require_replace,
    requiring_create,
)
from neuron_store_backends._objects import Parcel
from neuron_store_backends._packing import Packing
from neuron_store_backends._parcels import bundled
from neuron_store_backends._streaming import check_source, digest_source, read_source
from neuron_store_backends._sweeping import wait_for_sweep
from neuron_store_backends._trouble import Changed, Exists, Missing, backoff

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from neuron_store_backends._objects import Blob, Stored
    from neuron_store_backends.conditional import ConditionalStore

__all__ = ["BESIDE", "INLINE_FILE", "INLINE_TOTAL", "STEPS", "Publishing"]

INLINE_FILE = 8 << 10
INLINE_TOTAL = 64 << 10
BESIDE = 64 << 20
"""Bytes that may be sent while the store's honesty is measured. More would be much to send in vain
to a store that is refused, and beside more the measurement is little."""
_ROUNDS = 12

STEPS = (
    "conditional.begin",
    "conditional.look",
    "conditional.measure",
    "conditional.list",
    "conditional.upload",
    "conditional.piece",
    "conditional.commit",
    "conditional.committed",
)
"""Steps of every publish that creates, in order; the piece once for each piece read."""
REPAIR_STEPS = ("conditional.heal", "conditional.replace", "conditional.replaced")
"""Steps of one that finds damage."""
COMPRESS_STEPS = ("conditional.judge", "conditional.compress")
"""Steps of one that compresses, before it measures."""


class Publishing:
    """State of one publish."""

    def __init__(self, store: ConditionalStore, artifact: Artifact, source: Path) -> None:
        self.store = store
        self.objects = store.objects
        self.key = artifact.key
        self.source = source
        # The caller's id may be that of every other node that fetched the same artifact.
        # And it may say how another tier stores the files.
        self.artifact = attrs.evolve(artifact.without_forms(), write_id=new_write_id())
        self.packing = Packing(source, artifact.key)
        self.inline: dict[str, bytes] = {}
        self.uploaded = False
        self.began = time.monotonic()
        # What our own record, found after a lost reply, says that we did.
        self.asked = Publication.CREATED

    def run(self) -> Publication:
        """Publish; raises what `ArtifactStore.publish` says."""
        with self.packing:
            return self._run()

    def _run(self) -> Publication:
        step("conditional.begin")
        self._read_source()
        for attempt in range(1, _ROUNDS + 1):
            step("conditional.look")
            blob = self._look()
            answer = self._create() if blob is None else self._settle(blob)
            if isinstance(answer, Publication):
                return answer
            if attempt > 2:
                time.sleep(backoff(attempt - 2))
        raise TierError(
            self.store.location,
            "publish",
            "others keep changing the entry; try again when they are done",
            key=self.key,
        )

    # -- the source -----------------------------------------------------------------------------

    def _read_source(self) -> None:
        """Digests that are missing, and the small files' bytes."""
        files, room = [], INLINE_TOTAL
        for file in self.artifact.files:
            if file.size <= min(INLINE_FILE, room):
                self.inline[file.name] = read_source(self.source, file, self.key)
                room -= file.size
            if file.sha256 is None:
                files.append(digest_source(self.source, file, self.key))
            else:
                if file.name not in self.inline:
                    check_source(self.source, file, self.key)
                files.append(file)
        if not files:
            raise InvalidArtifact(str(self.source), "no file at all")
        self.artifact = attrs.evolve(self.artifact, files=tuple(files))

    def _pack(self) -> None:
        """Choose the form in which each file is stored. Only who writes a record need know."""
        afar = [f for f in self.artifact.files if f.name not in self.inline]
        if self.store.compress is not None:
            afar = [self.packing.packed(f) for f in afar]
        forms = {f.name: f.stored for f in bundled(afar)}
        files = (attrs.evolve(f, stored=forms.get(f.name)) for f in self.artifact.files)
        self.artifact = attrs.evolve(self.artifact, files=tuple(files))

    @property
    def _payload(self) -> Mapping[str, Parcel]:
        return {parcel.path: parcel for parcel in self.store.parcels(self.artifact, self.inline)}

    def _record(self) -> bytes:
        data = dump_record(self.artifact, self.inline)
        if len(data) > MAX_RECORD_BYTES:
            raise InvalidArtifact(
                str(self.source), f"its record has {len(data)} bytes; at most {MAX_RECORD_BYTES}"
            )
        return data

    # -- nothing is there -----------------------------------------------------------------------

    def _look(self) -> Blob | None:
        return self.objects.peek(self.store.index_path(self.key), MAX_RECORD_BYTES, key=self.key)

    def _create(self) -> Publication | None:
        self._pack()
        record = self._record()
        step("conditional.measure")
        payload = self._payload
        if not 0 < sum(parcel.size for parcel in payload.values()) <= BESIDE:
            require_create(self.objects)
        # Names of payload promise their bytes, so what is sent before the verdict harms nobody.
        with requiring_create(self.objects):
            lent = self._upload(payload)
        step("conditional.commit")
        self.asked = Publication.CREATED
        try:
            self.objects.create(self.store.index_path(self.key), record, key=self.key)
        except Exists:
            return None
        step("conditional.committed")
        return Publication.CREATED if self._keep(lent) else None

    def _upload(self, wanted: Mapping[str, Parcel]) -> bool:
        """Bring the payload there; True when some of it was there before us."""
        step("conditional.list")
        if not wanted or self.uploaded:
            return False
        found = self._list()
        now, marked = time.time(), self.store.damage_path(self.key) in found
        # Payload of another publisher that is at work, or of one that was killed. It has the right
        # bytes, since an upload completes with those only; but once it is old, somebody may be
        # about to sweep it.
        fresh = {
            path
            for path, stored in found.items()
            if path in wanted
            and stored.size == wanted[path].size
            and stored.modified is not None
            and now - stored.modified < self.store.grace / 2
            and not marked
        }
        self._send([parcel for path, parcel in wanted.items() if path not in fresh])
        self.uploaded = True
        return not wanted.keys().isdisjoint(found)

    def _send(self, parcels: Sequence[Parcel]) -> None:
        step("conditional.upload")
        plain = [parcel for parcel in parcels if not parcel.is_encoded]
        packed = [Parcel(p.path, (p.files[0].at_rest,)) for p in parcels if p.is_encoded]
        self.objects.send(plain, self.source, key=self.key)
        if packed:
            self.objects.send(packed, self.packing.folder, key=self.key)

    def _keep(self, lent: bool) -> bool:
        """After the commit: payload that was there before us may have been swept meanwhile.

        So may be what took us so long to upload that it counted as left behind. False when
        something was brought back: until then our record looked damaged, and another publisher
        may have replaced it.
        """
        if not lent and time.monotonic() - self.began < self.store.grace / 4:
            return True
        step("conditional.keep")
        found = wait_for_sweep(self.store, self.key)
        missing = [
            parcel
            for path, parcel in self._payload.items()
            if path not in found or found[path].size != parcel.size
        ]
        if missing:
            self._send(missing)
            self._renew()
        return not missing

    def _renew(self) -> None:
        """Write our record anew, so that whoever saw it damaged can no longer replace it."""
        blob = self._look()
        try:
            if blob is None or not self._is_ours(blob):
                return
            require_replace(self.objects, self.key)
        except (InvalidRecord, TierUnfit):
            # What cannot be replaced by us cannot be by others either.
            return
        self.artifact = attrs.evolve(self.artifact, write_id=new_write_id())
        step("conditional.renew")
        try:
            self.objects.replace(
                self.store.index_path(self.key), self._record(), blob.version, key=self.key
            )
        except Changed:
            # By another, or by ourselves and the reply was lost: the next look tells.
            pass

    def _is_ours(self, blob: Blob) -> bool:
        return self.store.parse(self.key, blob)[0].write_id == self.artifact.write_id

    def _list(self) -> Mapping[str, Stored]:
        return self.objects.listing(self.store.payload_root(self.key), key=self.key)

    # -- something is there ---------------------------------------------------------------------

    def _settle(self, blob: Blob) -> Publication | None:
        """Judge what is there; None when it changed under the judgement."""
        try:
            theirs, inline = self.store.parse(self.key, blob)
        except InvalidRecord:
            return self._displace(blob)
        if theirs.write_id == self.artifact.write_id:
            # The reply to our own write was lost, or we looked again.
            return self.asked if self._keep(lent=True) else None
        found = self._list() if len(inline) < len(theirs.files) else {}
        damaged = self._damage(theirs, inline, found)
        marked = self.store.damage_path(self.key) in found
        same = theirs.same_bytes(self.artifact)
        if not damaged:
            answer: Publication | None = Publication.PRESENT if same else Publication.CONFLICT
        elif all(self._has(parcel) for parcel in damaged):
            # The names promise exactly the bytes that we have; nobody can be displaced by them.
            step("conditional.heal")
            self._send(damaged)
            answer = Publication.REPAIRED
        else:
            if same_statement(theirs, self.artifact):
                # Only the form is another: whoever vouched for the artifact still does.
                self.artifact = merge_signatures(self.artifact, *theirs.signatures)
            return self._displace(blob)
        if marked:
            self.objects.remove(self.store.damage_path(self.key), key=self.key)
        return answer

    def _damage(
        self, theirs: Artifact, inline: Mapping[str, bytes], found: Mapping[str, Stored]
    ) -> list[Parcel]:
        """Objects that the record names and that are not there as it says."""
        damaged = []
        marked = self.store.damage_path(self.key) in found
        for parcel in self.store.parcels(theirs, inline):
            stored = found.get(parcel.path)
            there = stored is not None and stored.size == parcel.size
            if not there or (marked and not self._intact(parcel)):
                damaged.append(parcel)
        return damaged

    def _has(self, parcel: Parcel) -> bool:
        """Whether we have the very bytes that a record of others names.

        Another release of the library may compress to other bytes; both are right.
        """
        if any(self.artifact.file(file.name) != file for file in parcel.files):
            return False
        file = parcel.files[0]
        return not parcel.is_encoded or self.packing.packed(file).stored == file.stored

    def _intact(self, parcel: Parcel) -> bool:
        try:
            self.store.verify_parcel(self.key, parcel)
        except (Missing, ArtifactCorrupt):
            return False
        return True

    def _displace(self, blob: Blob) -> Publication | None:
        """Replace a damaged record by ours, if it is still the same one."""
        self._pack()
        record = self._record()
        require_create(self.objects)
        require_replace(self.objects, self.key)
        self._upload(self._payload)
        step("conditional.replace")
        self.asked = Publication.REPAIRED
        try:
            self.objects.replace(
                self.store.index_path(self.key), record, blob.version, key=self.key
            )
        except Changed:
            return None
        step("conditional.replaced")
        return Publication.REPAIRED if self._keep(lent=True) else None

"""Tiers that publish by a conditional create: object stores.

Below the tier's prefix:

* `payload/<key>/<sha256>/<file name>`: the files, at names that different bytes can never share.
  The digest is of the bytes there: where the tier compresses, the record says both. Small files
  of an artifact that has many lie together (`_parcels`).
* `index/<key>.json`: the record, created if-absent after the payload. It alone makes an artifact
  visible. Files of a few KiB travel inside it.
* `payload/<key>/damaged`: a reader's word that a payload had wrong bytes of the right size, which
  no listing shows. The next publish checks every digest when it sees one.
* `payload/<key>/sweeping`: somebody removes payload of this key that no record names; a publisher
  that sees it after its commit waits until it is gone, and then looks what is missing.
* `lease/<key>.json`: the lease of a key, while somebody holds it (`_leasing`); a collector, too.
* `probe/<random>`: what `probe` and the check of the store's honesty write, and remove.
"""

from __future__ import annotations

import hashlib
import io
import logging
import time
from typing import TYPE_CHECKING, BinaryIO

from neuron_store.abc import ArtifactStore, Publication, TierReport
from neuron_store.artifact import (
    MAX_RECORD_BYTES,
    Artifact,
    check_artifact,
    check_key,
    is_key,
    load_record,
)
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    InvalidRecord,
    NeuronStoreError,
    TierError,
)
from neuron_store.steps import step
from neuron_store.streams import empty_directory, require_empty, write_file
from neuron_store_backends._encoding import require_zstd
from neuron_store_backends._file_trouble import remedy
from neuron_store_backends._parcels import digest_parcel, parcels, require_whole_bundles, whole
from neuron_store_backends._receiving import open_payload, receive_payload
from neuron_store_backends._trouble import Exists, Missing, Vanished

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping
    from pathlib import Path

    from neuron_store.abc import Lease
    from neuron_store.collector import Collector
    from neuron_store_backends._leasing import ObjectLeases
    from neuron_store_backends._objects import Blob, Objects, Parcel

__all__ = ["GRACE", "ConditionalStore"]

_log = logging.getLogger(__name__)

GRACE = 3600.0
"""Seconds for which a payload that no record names is left alone: its record may be on the way."""


_ROUNDS = 6
_PATIENCE = (0.2, 0.8)


class _Exchanged(Exception):
    """The artifact that is being read was removed. Internal: read anew, or not found."""


class _Lost(Exception):
    """Payload that the record names is not there. Internal: looked for again, or corrupt."""

    def __init__(self, error: ArtifactCorrupt) -> None:
        super().__init__(str(error))
        self.error = error


class ConditionalStore(ArtifactStore):
    """An artifact store in an object store. See the module's docstring for the layout.

    Args:
        objects: the object store.
        name: short name for tables.
        read_only: readers leave no word of damage behind either.
        compress: `zstd` stores each file compressed that shrinks by it; None, all as they are.
            Reading needs no option.

    Raises:
        MissingExtra: the module that compresses is not installed.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        name: str | None = None,
        read_only: bool = False,
        compress: str | None = None,
    ) -> None:
        if compress is not None:
            require_zstd(objects.location)
        self.objects = objects
        self.compress = compress
        self.grace = GRACE
        self._name = name
        self._read_only = read_only
        self._leases: ObjectLeases | None = None

    @property
    def location(self) -> str:
        return self.objects.location

    @property
    def name(self) -> str:
        return self._name or self.location

    # -- layout ---------------------------------------------------------------------------------

    def index_path(self, key: str) -> str:
        """Where the record of `key` is."""
        return f"{self.objects.root}/index/{key}.json"

    def payload_root(self, key: str) -> str:
        """The folder of the files of `key`, whoever wrote them."""
        return f"{self.objects.root}/payload/{key}"

    def parcels(self, artifact: Artifact, inline: Container[str]) -> list[Parcel]:
        """The objects of the files that do not travel in the record."""
        afar = [f for f in artifact.files if f.name not in inline]
        return parcels(self.payload_root(artifact.key), afar)

    def sweep_path(self, key: str) -> str:
        """Where somebody says that payload is being swept."""
        return f"{self.payload_root(key)}/sweeping"

    def damage_path(self, key: str) -> str:
        """Where readers say that a payload was damaged."""
        return f"{self.payload_root(key)}/damaged"

    # -- reading --------------------------------------------------------------------------------

    def find(self, key: str) -> Artifact | None:
        found = self._record(check_key(key))
        return found[0] if found is not None else None

    def open_file(self, key: str, name: str) -> BinaryIO:
        check_key(key)
        for _ in range(_ROUNDS):
            found = self._record(key)
            if found is None:
                break
            artifact, inline = found
            file = artifact.file(name)
            if file is None:
                raise ArtifactNotFound(key, f"{self.location} (it has no file {name!r})")
            if name in inline:
                return io.BytesIO(inline[name])
            parcel = next(p for p in self.parcels(artifact, inline) if file in p.files)
            try:
                if parcel.is_bundle:
                    start, stop = parcel.span(file)
                    stream = self.objects.open(parcel.path, stop, key=key, start=start)
                else:
                    stream = open_payload(self.objects, parcel, key=key)
                return whole(stream, file, key=key, location=self.location)
            except Missing as error:
                self._require_gone(artifact, parcel, error)
        raise ArtifactNotFound(key, self.location)

    def fetch(self, key: str, into: Path) -> Artifact:
        return self.fetch_accepted(key, into, lambda _artifact: None)

    def fetch_accepted(
        self, key: str, into: Path, accept: Callable[[Artifact], object]
    ) -> Artifact:
        check_key(key)
        require_empty(into)
        pauses = iter(_PATIENCE)
        step("fetch.look")
        for _ in range(_ROUNDS):
            found = self._record(key)
            if found is None:
                break
            artifact, inline = found
            accept(artifact)
            try:
                return self._fetch(artifact, inline, into)
            except _Exchanged:
                # Deleted, and perhaps published again, while it was read: from the start.
                empty_directory(into)
            except _Lost as lost:
                # A publisher may be bringing back what was swept under its hands.
                empty_directory(into)
                pause = next(pauses, None)
                if pause is None:
                    if self.sweep_path(key) in self.objects.listing(self.payload_root(key)):
                        break
                    self._note_damage(key)
                    raise lost.error from lost
                time.sleep(pause)
            except ArtifactCorrupt:
                self._note_damage(key)
                raise
            except NeuronStoreError:
                raise
            except OSError as error:
                raise TierError(
                    str(into), "write", remedy(error), key=key, code=error.errno
                ) from error
        raise ArtifactNotFound(key, self.location)

    def _fetch(self, artifact: Artifact, inline: Mapping[str, bytes], into: Path) -> Artifact:
        step("fetch.copy")
        key = artifact.key
        afar = self.parcels(artifact, inline)
        for name, data in inline.items():
            # Its digest was checked when the record was parsed.
            write_file(into, name, data)
        try:
            receive_payload(self.objects, afar, into, key=key)
        except Missing as error:
            try:
                lost = next(parcel for parcel in afar if parcel.path == error.args[0])
                self._require_gone(artifact, lost, error)
            except ArtifactCorrupt as corrupt:
                raise _Lost(corrupt) from error
            raise _Exchanged from error
        # Every record here has the digests that were checked.
        return artifact.without_forms()

    def verify(self, key: str) -> Artifact:
        check_key(key)
        for _ in range(_ROUNDS):
            found = self._record(key)
            if found is None:
                break
            try:
                self._verify(*found)
            except _Exchanged:
                continue
            except ArtifactCorrupt:
                self._note_damage(key)
                raise
            return found[0]
        raise ArtifactNotFound(key, self.location)

    def _verify(self, artifact: Artifact, inline: Mapping[str, bytes]) -> None:
        # What is in line was checked when the record was parsed.
        for parcel in self.parcels(artifact, inline):
            try:
                self.verify_parcel(artifact.key, parcel)
            except (Missing, Vanished) as error:
                self._require_gone(artifact, parcel, error)
                raise _Exchanged from error

    def path_of(self, key: str) -> Path | None:
        return super().path_of(check_key(key))

    def keys(self) -> Iterator[str]:
        prefix = f"{self.objects.root}/index"
        for path in sorted(self.objects.listing(prefix)):
            name = path.removeprefix(prefix + "/")
            if name.endswith(".json") and is_key(name.removesuffix(".json")):
                yield name.removesuffix(".json")

    def preload(self) -> None:
        self.objects.preload()

    def verify_parcel(self, key: str, parcel: Parcel) -> None:
        """Check the digests of what does not travel in the record.

        Raises:
            ArtifactCorrupt: it has other bytes.
            Missing, Vanished: it is not there (any more).
            TierError: it cannot be read.
        """
        with open_payload(self.objects, parcel, key=key) as stream:
            digest_parcel(stream, parcel, key=key, location=self.location)

    def _record(self, key: str) -> tuple[Artifact, Mapping[str, bytes]] | None:
        blob = self.objects.peek(self.index_path(key), MAX_RECORD_BYTES, key=key)
        if blob is None:
            return None
        try:
            return self.parse(key, blob)
        except InvalidRecord as error:
            raise ArtifactCorrupt(key, self.location, error.reason) from error

    def parse(self, key: str, blob: Blob) -> tuple[Artifact, Mapping[str, bytes]]:
        """The record in an index object, and the files inside it, their digests checked.

        Raises:
            InvalidRecord: it cannot be read, or it names a file that cannot be found by it.
            TierError: a newer release wrote it, so that this one cannot judge it.
        """
        try:
            artifact, inline = load_record(blob.data, key=key, source=self.location)
            afar = (f for f in artifact.files if f.name not in inline)
            require_whole_bundles(afar, self.location)
        except InvalidRecord as error:
            if error.newer:
                raise TierError(self.location, "read", error.reason, key=key) from error
            raise
        for file in artifact.files:
            if file.sha256 is None:
                raise InvalidRecord(f"{file.name} has no digest", source=self.location)
            data = inline.get(file.name)
            if data is not None and hashlib.sha256(data).hexdigest() != file.sha256:
                raise InvalidRecord(f"in-line {file.name} has other bytes", source=self.location)
        return artifact, inline

    def _require_gone(self, artifact: Artifact, parcel: Parcel, cause: Exception) -> None:
        """Payload is not there: fine when its record is not there either, or is another by now.

        Raises:
            ArtifactCorrupt: the record still names it.
        """
        now = self._record(artifact.key)
        if now is not None and now[0].write_id == artifact.write_id:
            names = ", ".join(f.name for f in parcel.files[:3])
            reason = f"{names} is named and not there"
            raise ArtifactCorrupt(artifact.key, self.location, reason) from cause

    def _note_damage(self, key: str) -> None:
        if self._read_only:
            return
        try:
            self.objects.create(self.damage_path(key), b"", key=key)
        except Exists:
            pass
        except TierError as error:
            # Reading may be all that these credentials allow.
            _log.debug("damage of %s not noted: %s", key, error)

    # -- writing --------------------------------------------------------------------------------

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        from neuron_store_backends._publishing import Publishing  # noqa: PLC0415  (most processes only read)

        del consume  # nothing to take over: the bytes travel
        return Publishing(self, check_artifact(artifact), source).run()

    def endorse(self, artifact: Artifact) -> bool:
        from neuron_store_backends._endorsing import endorse_object  # noqa: PLC0415  (rarely needed)

        return endorse_object(self, check_artifact(artifact))

    def delete(self, key: str) -> bool:
        """Remove the record, then what payload is older than the grace time.

        Younger payload may be that of a publisher whose record is on its way; `gc` sweeps it.
        """
        return self.take_away(check_key(key)) is not None

    def take_away(self, key: str, *, since: float | None = None) -> int | None:
        """As `delete`; bytes freed, None when there was nothing.

        Args:
            key: checked.
            since: Unix seconds by the store's clock: a record written later than that stays.
        """
        from neuron_store_backends._sweeping import sweep_payload  # noqa: PLC0415  (most only read)

        path = self.index_path(key)
        blob = self.objects.read(path, MAX_RECORD_BYTES, key=key)
        if blob is None:
            return None
        if since is not None and blob.modified is not None and blob.modified > since:
            return None
        step("conditional.hide")
        self.objects.remove(path, key=key)
        step("conditional.free")
        return len(blob.data) + (sweep_payload(self, key) or 0)

    def collector(self) -> Collector:
        from neuron_store_backends._collecting_objects import ObjectCollector  # noqa: PLC0415  (gc only)

        return ObjectCollector(self)

    def lease(self, key: str, ttl: float) -> Lease:
        if self._leases is None:
            from neuron_store_backends._leasing import ObjectLeases  # noqa: PLC0415  (few ask for one)

            self._leases = ObjectLeases(self.objects)
        return self._leases.take(key, ttl)

    def probe(self) -> TierReport:
        from neuron_store_backends._honesty import probe  # noqa: PLC0415  (only doctor needs it)

        return probe(self)

    def close(self) -> None:
        self.objects.close()

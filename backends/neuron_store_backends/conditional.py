"""Tiers that publish by a conditional create: object stores.

Below the tier's prefix:

* `payload/<key>/<sha256>/<file name>`: the files, at names that different bytes can never share.
* `index/<key>.json`: the record, created if-absent after the payload. It alone makes an artifact
  visible. Files of a few KiB travel inside it.
* `payload/<key>/damaged`: a reader's word that a payload had wrong bytes of the right size, which
  no listing shows. The next publish checks every digest when it sees one.
* `probe/<random>`: what `probe` and the check of the store's honesty write, and remove.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, cast

import attrs

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
from neuron_store.streams import copy_stream, require_empty
from neuron_store_backends._streaming import IN_FLIGHT, ObjectReader
from neuron_store_backends._trouble import Exists, Missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from neuron_store.artifact import ArtifactFile
    from neuron_store_backends._objects import Blob, Objects

__all__ = ["GRACE", "ConditionalStore"]

_log = logging.getLogger(__name__)

GRACE = 3600.0
"""Seconds for which a payload that no record names is left alone: its record may be on the way."""


class ConditionalStore(ArtifactStore):
    """An artifact store in an object store. See the module's docstring for the layout.

    Args:
        objects: the object store.
        name: short name for tables.
        read_only: readers leave no word of damage behind either.
    """

    def __init__(
        self, objects: Objects, *, name: str | None = None, read_only: bool = False
    ) -> None:
        self.objects = objects
        self.grace = GRACE
        self._name = name
        self._read_only = read_only

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

    def payload_path(self, key: str, file: ArtifactFile) -> str:
        """Where a file is that does not travel in the record."""
        return f"{self.payload_root(key)}/{file.sha256}/{file.name}"

    def damage_path(self, key: str) -> str:
        """Where readers say that a payload was damaged."""
        return f"{self.payload_root(key)}/damaged"

    # -- reading --------------------------------------------------------------------------------

    def find(self, key: str) -> Artifact | None:
        found = self._record(check_key(key))
        return found[0] if found is not None else None

    def open_file(self, key: str, name: str) -> BinaryIO:
        found = self._record(check_key(key))
        if found is None:
            raise ArtifactNotFound(key, self.location)
        artifact, inline = found
        file = artifact.file(name)
        if file is None:
            raise ArtifactNotFound(key, f"{self.location} (it has no file {name!r})")
        if name in inline:
            return io.BytesIO(inline[name])
        try:
            return self.open_payload(key, file)
        except Missing as error:
            raise self._lost(key, file) from error

    def fetch(self, key: str, into: Path) -> Artifact:
        check_key(key)
        require_empty(into)
        step("fetch.look")
        found = self._record(key)
        if found is None:
            raise ArtifactNotFound(key, self.location)
        artifact, inline = found
        step("fetch.copy")
        budget = threading.Semaphore(IN_FLIGHT)

        def one(file: ArtifactFile) -> ArtifactFile:
            stream: BinaryIO
            if file.name in inline:
                stream = io.BytesIO(inline[file.name])
            else:
                try:
                    stream = self.open_payload(key, file, budget)
                except Missing as error:
                    raise self._lost(key, file) from error
            with stream:
                return copy_stream(stream, into, file, key=key, location=self.location)

        try:
            # More threads than pieces would only wait for each other.
            with ThreadPoolExecutor(min(IN_FLIGHT, len(artifact.files))) as pool:
                # Large ones first, so that the last to arrive is not the longest.
                order = sorted(artifact.files, key=lambda f: -f.size)
                done = {f.name: f for f in pool.map(one, order)}
        except ArtifactCorrupt:
            self._note_damage(key)
            raise
        except NeuronStoreError:
            raise
        except OSError as error:
            raise TierError(
                str(into), "write", error.strerror or "failed", key=key, code=error.errno
            ) from error
        return attrs.evolve(artifact, files=tuple(done[f.name] for f in artifact.files))

    def verify(self, key: str) -> Artifact:
        try:
            return super().verify(key)
        except ArtifactCorrupt:
            self._note_damage(key)
            raise

    def path_of(self, key: str) -> Path | None:
        return super().path_of(check_key(key))

    def keys(self) -> Iterator[str]:
        prefix = f"{self.objects.root}/index"
        for path in sorted(self.objects.listing(prefix)):
            name = path.removeprefix(prefix + "/")
            if name.endswith(".json") and is_key(name.removesuffix(".json")):
                yield name.removesuffix(".json")

    def open_payload(
        self, key: str, file: ArtifactFile, budget: threading.Semaphore | None = None
    ) -> BinaryIO:
        """A file that does not travel in the record, streamed; raises the internal `Missing`."""
        reader = ObjectReader(
            self.objects, self.payload_path(key, file), file.size, key=key, budget=budget
        )
        return cast("BinaryIO", reader)

    def _record(self, key: str) -> tuple[Artifact, Mapping[str, bytes]] | None:
        blob = self.objects.read(self.index_path(key), MAX_RECORD_BYTES, key=key)
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

    def _lost(self, key: str, file: ArtifactFile) -> NeuronStoreError:
        """The error for a payload that is not there: the artifact is gone, or it is damaged."""
        if self.objects.read(self.index_path(key), MAX_RECORD_BYTES, key=key) is None:
            return ArtifactNotFound(key, self.location)
        return ArtifactCorrupt(key, self.location, f"{file.name} is named and not there")

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

    def delete(self, key: str) -> bool:
        """Remove the record, then what payload is older than the grace time.

        Younger payload may be that of a publisher whose record is on its way; `gc` sweeps it.
        """
        path = self.index_path(check_key(key))
        if self.objects.read(path, MAX_RECORD_BYTES, key=key) is None:
            return False
        step("conditional.hide")
        self.objects.remove(path, key=key)
        step("conditional.free")
        now = time.time()
        for stored_path, stored in self.objects.listing(self.payload_root(key), key=key).items():
            if stored.modified is None or now - stored.modified < self.grace:
                continue
            # Each time anew: between two removals somebody may have published the key again, and
            # a publisher looks once more at payload that was there before it.
            if self.objects.read(path, MAX_RECORD_BYTES, key=key) is not None:
                break
            self.objects.remove(stored_path, key=key)
        return True

    def probe(self) -> TierReport:
        from neuron_store_backends._honesty import probe  # noqa: PLC0415  (only doctor needs it)

        return probe(self)

    def close(self) -> None:
        self.objects.forget()

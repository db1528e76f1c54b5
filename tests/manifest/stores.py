"""A real store over a directory, made without the backends, and what tests put into it."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

import attrs

from neuron_store.abc import ArtifactStore, Publication
from neuron_store.artifact import (
    RECORD_NAME,
    Artifact,
    check_key,
    dump_record,
    load_record,
    new_write_id,
)
from neuron_store.errors import ArtifactCorrupt, ArtifactNotFound, TierError
from neuron_store.neuron_layout import (
    HLO_NAME,
    METADATA_NAME,
    completion_mark,
    foreign_artifact,
    list_files,
    neff_name,
)
from neuron_store.streams import copy_stream

FIXTURES = Path(__file__).parent / "fixtures"


class DirectoryStore(ArtifactStore):
    """A directory of artifacts. `remote`: keeps its directories to itself, as object stores do."""

    def __init__(self, root: Path, *, remote: bool = False) -> None:
        self.root = root
        self.remote = remote
        self.broken: str | None = None
        root.mkdir(parents=True, exist_ok=True)

    @property
    def location(self) -> str:
        return str(self.root)

    def find(self, key: str) -> Artifact | None:
        check_key(key)
        if self.broken:
            raise TierError(self.location, "find", self.broken, key=key)
        directory = self.root / key
        try:
            data = (directory / RECORD_NAME).read_bytes()
        except FileNotFoundError:
            try:
                return foreign_artifact(directory, key)
            except FileNotFoundError:
                return None
        artifact, _ = load_record(data, key=key, source=str(directory))
        return artifact

    def path_of(self, key: str) -> Path | None:
        return None if self.remote or self.find(key) is None else self.root / key

    def open_file(self, key: str, name: str) -> BinaryIO:
        artifact = self.find(key)
        if artifact is None or artifact.file(name) is None:
            raise ArtifactNotFound(key, self.location)
        try:
            return open(self.root / key / name, "rb")
        except FileNotFoundError:
            raise ArtifactCorrupt(key, self.location, f"{name} is missing") from None

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        staged = self.root / f".staging-{new_write_id()}"
        staged.mkdir()
        files = []
        for file in artifact.files:
            with open(source / file.name, "rb") as stream:
                files.append(
                    copy_stream(stream, staged, file, key=artifact.key, location=self.location)
                )
            times = os.stat(source / file.name)
            os.utime(staged / file.name, ns=(times.st_atime_ns, times.st_mtime_ns))
        done = attrs.evolve(artifact, files=tuple(files))
        (staged / RECORD_NAME).write_bytes(dump_record(done))
        try:
            os.rename(staged, self.root / artifact.key)
        except OSError:
            shutil.rmtree(staged)
            return Publication.PRESENT
        return Publication.CREATED

    def keys(self):
        return (entry.name for entry in os.scandir(self.root) if not entry.name.startswith("."))

    def delete(self, key: str) -> bool:
        if not (self.root / key).exists():
            return False
        shutil.rmtree(self.root / key)
        return True


def fill(root: Path, key: str, *, payload: int = 5000, hlo: str = "decode", mtime: float = 0.0):
    """Write an entry as the Neuron stack does: four files, the completion mark last."""
    directory = root / key
    directory.mkdir(parents=True)
    shutil.copyfile(FIXTURES / f"{hlo}.hlo", directory / HLO_NAME)
    neff = struct.pack("<QQQ", 2, 1024, payload).ljust(1024 + payload, b"\0")
    program = directory / neff_name(key)
    program.write_bytes(neff)
    (directory / METADATA_NAME).write_text(f'{{"version": 0, "cache_key": "{key}"}}')
    (directory / ".compilation_complete").write_bytes(completion_mark(len(neff)))
    if mtime:
        os.utime(program, (mtime, mtime))
    return directory


def publish(store: ArtifactStore, tmp: Path, key: str, *, executable: str | None = None, **options):
    """Publish such an entry, or one of another compiler, with our record."""
    source = fill(tmp, key, **options)
    if executable:
        (source / neff_name(key)).rename(source / executable)
    return store.publish(
        Artifact(
            key=key,
            files=tuple(list_files(source, key)),
            executable=executable or neff_name(key),
            compiler="neuronx-cc",
        ),
        source,
    )


def key_of(number: int) -> str:
    return f"{number:032x}"

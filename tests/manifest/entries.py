"""Entries of the Neuron stack, and a tier that is an `ArtifactStore` and nothing more."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

from neuron_store.abc import ArtifactStore
from neuron_store.artifact import Artifact
from neuron_store.neuron_layout import (
    HLO_NAME,
    METADATA_NAME,
    completion_mark,
    list_files,
    neff_name,
)
from neuron_store_backends.posix import PosixStore

FIXTURES = Path(__file__).parent / "fixtures"
NAME_TOO_LONG = "x" * 300
"""Of a root that every look-up fails at, for root too."""


class InterfaceOnly(ArtifactStore):
    """The abstract members of the interface, and no other: no directories, as object stores."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tier = PosixStore(root)

    @property
    def location(self):
        return self._tier.location

    def find(self, key):
        return self._tier.find(key)

    def open_file(self, key, name):
        return self._tier.open_file(key, name)

    def publish(self, artifact, source, *, consume=False):
        return self._tier.publish(artifact, source, consume=consume)

    def keys(self):
        return self._tier.keys()

    def delete(self, key):
        return self._tier.delete(key)


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

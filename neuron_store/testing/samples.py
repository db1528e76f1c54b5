"""Artifacts to test with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuron_store.artifact import Artifact, ArtifactFile

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["make_source"]


def make_source(
    directory: Path, key: str, files: Mapping[str, bytes], **facts: object
) -> tuple[Artifact, Path]:
    """Write `files` below the new directory, and the record of them, digests not yet known.

    Raises:
        FileExistsError: the directory exists; each artifact has one of its own.
    """
    directory = Path(directory)
    directory.mkdir(parents=True)
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    listed = tuple(ArtifactFile(name, len(data)) for name, data in sorted(files.items()))
    return Artifact(key=key, files=listed, **facts), directory  # type: ignore[arg-type]  # checked by attrs' own tests

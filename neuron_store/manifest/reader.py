"""Finds and reads manifests: single files, an engine's directory, or a whole deployment's tree."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs

from neuron_store.errors import InvalidArtifact, ManifestError
from neuron_store.manifest.schema import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    load_manifest,
)
from neuron_store.streams import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Engine", "find_manifests", "graph_ranks", "read_engines", "read_manifest"]

MAX_DEPTH = 6
"""Directories below the given one that are searched."""


@attrs.frozen
class Engine:
    """One engine's manifest and what to call it."""

    name: str
    """Its directory, relative to where the search began: `dev0_7`, `node3/dev8_15`."""
    path: Path
    manifest: Manifest


def read_manifest(path: Path) -> Manifest:
    """Read one manifest.

    Raises:
        ManifestError: no such file, a link or a device, too large, or not a manifest.
    """
    try:
        descriptor = open_regular(path)
    except (OSError, InvalidArtifact) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ManifestError(f"cannot be read: {reason}", source=str(path)) from error
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        if size > MAX_MANIFEST_BYTES:
            raise ManifestError(
                f"{size} bytes; at most {MAX_MANIFEST_BYTES} are read", source=str(path)
            )
        return load_manifest(stream.read(MAX_MANIFEST_BYTES + 1), source=str(path))


def find_manifests(directory: Path) -> list[Path]:
    """Every `manifest.json` below a directory, sorted; not in ledgers and dot directories."""
    found: list[Path] = []

    def walk(folder: Path, depth: int) -> None:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise ManifestError(
                f"cannot be searched: {error.strerror}", source=str(folder)
            ) from error
        for entry in entries:
            if entry.name == MANIFEST_NAME and entry.is_file(follow_symlinks=False):
                found.append(folder / entry.name)
            elif (
                depth < MAX_DEPTH
                and entry.name != "ledger"
                and not entry.name.startswith(".")
                and entry.is_dir(follow_symlinks=False)
            ):
                walk(folder / entry.name, depth + 1)

    walk(directory, 0)
    return found


def read_engines(paths: Iterable[Path]) -> list[Engine]:
    """Read manifests from files and directories; names are made unique where they collide.

    Raises:
        ManifestError: one cannot be read, or a directory holds none.
    """
    engines: list[Engine] = []
    for path in paths:
        if path.is_dir():
            found = find_manifests(path)
            if not found:
                raise ManifestError(
                    f"no {MANIFEST_NAME} in it or below; give the file, or the directory that "
                    "VLLM_NEURON_MANIFEST_DIR named",
                    source=str(path),
                )
            for file in found:
                name = os.path.relpath(file.parent, path)
                engines.append(
                    Engine(path.name if name == "." else name, file, read_manifest(file))
                )
        else:
            name = path.absolute().parent.name if path.name == MANIFEST_NAME else path.name
            engines.append(Engine(name, path, read_manifest(path)))
    names = [engine.name for engine in engines]
    return [
        attrs.evolve(engine, name=str(engine.path)) if names.count(engine.name) > 1 else engine
        for engine in engines
    ]


def graph_ranks(engines: Iterable[Engine]) -> dict[str, tuple[int, ...]]:
    """Each key of any of the engines, in order, with the global ranks that traced it anywhere."""
    ranks: dict[str, set[int]] = {}
    for engine in engines:
        for graph in engine.manifest.graphs:
            ranks.setdefault(graph.graph_hash, set()).update(graph.ranks)
    return {key: tuple(sorted(found)) for key, found in ranks.items()}

"""Finds and reads manifests: files, pipes, an engine's directory, a whole deployment's tree."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from neuron_store.errors import ManifestError
from neuron_store.manifest.schema import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    load_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Engine", "find_manifests", "graph_ranks", "read_engines", "read_manifest"]

logger = logging.getLogger(__name__)

MAX_DEPTH = 6
"""Directories below the given one that are searched."""
MAX_DIRECTORIES = 20_000
"""That are searched in all: a link may lead to the root of the file system."""
STANDARD_INPUT = "-"
_DESCRIPTORS = Path("/dev/fd")


@attrs.frozen
class Engine:
    """One engine's manifest and what to call it."""

    name: str
    """Its directory, relative to where the search began: `dev0_7`, `node3/dev8_15`."""
    path: Path
    manifest: Manifest


def read_manifest(path: Path) -> Manifest:
    """Read one manifest: a file, a link to one, a pipe, or `-` for the standard input.

    Raises:
        ManifestError: no such file, too large, or not a manifest.
    """
    standard = os.fspath(path) == STANDARD_INPUT
    source = "standard input" if standard else str(path)
    try:
        # The caller named it on this machine, so a link is followed, and a pipe read to its end;
        # how much is read is bounded whatever it is.
        with open(0 if standard else path, "rb", closefd=not standard) as stream:
            data = stream.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ManifestError(f"cannot be read: {error.strerror}", source=source) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"at most {MAX_MANIFEST_BYTES} bytes are read", source=source)
    return load_manifest(data, source=source)


def find_manifests(directory: Path) -> list[Path]:
    """Every `manifest.json` below a directory, sorted; not in ledgers and dot directories.

    Links are followed, as deployments have them (a Kubernetes ConfigMap's files all are), after
    everything else: what was found already is not found again under a link's name, and a cycle
    ends. A link that leads nowhere is an error where it is called `manifest.json`, and else said in
    the log.

    Raises:
        ManifestError: a directory cannot be read, or there are too many.
    """
    search = _Search(directory)
    search.walk(directory, 0)
    search.follow()
    return sorted(search.found.values())


class _Search:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: dict[tuple[int, int], Path] = {}
        self.walked: set[tuple[int, int]] = set()
        self.links: list[tuple[Path, int]] = []

    def walk(self, folder: Path, depth: int) -> None:
        try:
            status = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise ManifestError(
                f"cannot be searched: {error.strerror}", source=str(folder)
            ) from error
        if (status.st_dev, status.st_ino) in self.walked:
            return
        self.walked.add((status.st_dev, status.st_ino))
        if len(self.walked) > MAX_DIRECTORIES:
            raise ManifestError(
                f"more than {MAX_DIRECTORIES} directories below it; name those of the engines",
                source=str(self.directory),
            )
        for entry in entries:
            if entry.name == "ledger" or entry.name.startswith("."):
                continue
            if entry.is_symlink():
                self.links.append((folder / entry.name, depth))
            elif entry.is_dir() or entry.name == MANIFEST_NAME:
                self.take(folder / entry.name, depth)

    def take(self, path: Path, depth: int) -> None:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            if depth < MAX_DEPTH:
                self.walk(path, depth + 1)
        elif path.name == MANIFEST_NAME and stat.S_ISREG(status.st_mode):
            self.found.setdefault((status.st_dev, status.st_ino), path)

    def follow(self) -> None:
        # Grows while it is gone through: behind a link there may be more.
        for path, depth in self.links:
            try:
                self.take(path, depth)
            except OSError as error:
                if path.name == MANIFEST_NAME:
                    raise ManifestError(
                        f"it is a link that leads nowhere ({error.strerror})", source=str(path)
                    ) from error
                logger.warning("%s is a link that leads nowhere; left out", path)


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
            name = _name(path)
            engines.append(Engine(name, path, read_manifest(path)))
    names = [engine.name for engine in engines]
    return [
        attrs.evolve(engine, name=str(engine.path)) if names.count(engine.name) > 1 else engine
        for engine in engines
    ]


def _name(path: Path) -> str:
    if path.name == MANIFEST_NAME:
        return path.absolute().parent.name
    # Nobody knows a pipe of the shell's `<(...)` by its number.
    unnamed = os.fspath(path) == STANDARD_INPUT or path.parent == _DESCRIPTORS
    return "stdin" if unnamed else path.name


def graph_ranks(engines: Iterable[Engine]) -> dict[str, tuple[int, ...]]:
    """Each key of any of the engines, in order, with the global ranks that traced it anywhere."""
    ranks: dict[str, set[int]] = {}
    for engine in engines:
        for graph in engine.manifest.graphs:
            ranks.setdefault(graph.graph_hash, set()).update(graph.ranks)
    return {key: tuple(sorted(found)) for key, found in ranks.items()}

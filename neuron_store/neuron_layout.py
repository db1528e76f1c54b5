"""The directory that the Neuron stack itself writes for one graph, and what completes it.

Facts about libtorch_neuronx_lite 0.21 to 0.24: the four files below, of which the completion mark
comes last and records the executable's size. Everything else it leaves there is for debugging.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from typing import TYPE_CHECKING

from neuron_store.artifact import RECORD_NAME, Artifact, ArtifactFile, check_file_name
from neuron_store.errors import ArtifactCorrupt, InvalidArtifact, InvalidRecord
from neuron_store.streams import read_small

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "HLO_NAME",
    "MARK_NAME",
    "METADATA_NAME",
    "belongs_to_artifact",
    "check_loadable",
    "completion_mark",
    "foreign_artifact",
    "foreign_fault",
    "list_files",
    "neff_length",
    "neff_name",
]

HLO_NAME = "graph.hlo"
MARK_NAME = ".compilation_complete"
METADATA_NAME = ".artifact_metadata_v0.json"
_METADATA = re.compile(r"\.artifact_metadata_v\d+\.json\Z")
_NEFF_HEADER = struct.Struct("<QQQ")
# What stays behind at a promote: debug output with the compile host's paths, captures of single
# ranks (`dev0_7.rank3/`, `rank3/`), locks, access marks, NFS's names of unlinked open files.
_LEFT_BEHIND = frozenset(
    {
        "command.txt",
        "log-neuron-cc.txt",
        "fxgraph.txt",
        "example_inputs.txt",
        "hlo_passes",
        ".cache_accessed",
        ".compilation_metadata",
        ".compilation_metadata.lock",
    }
)
_RANK_DIRECTORY = re.compile(r"(?:[A-Za-z0-9_]+\.)?rank\d+\Z")


def neff_name(key: str) -> str:
    """The file name under which the Neuron runtime looks for the executable."""
    return f"graph_{key}.neff"


def completion_mark(neff_size: int, *, now: float | None = None) -> bytes:
    """The text of `.compilation_complete`; `neff_size` in bytes, `now` in Unix seconds."""
    moment = time.time() if now is None else now
    return f"completed:{moment}\nneff_size:{neff_size}\n".encode()


def neff_length(header: bytes) -> int | None:
    """Bytes that a NEFF must have by its own header, or None when it is not a NEFF header.

    The first three little-endian u64 are format version (2), header length (1024) and payload
    length.
    """
    if len(header) < _NEFF_HEADER.size:
        return None
    version, header_length, payload = _NEFF_HEADER.unpack_from(header)
    if version != 2 or header_length != 1024:
        return None
    return int(header_length + payload)


def belongs_to_artifact(name: str, *, neuron: bool) -> bool:
    """Whether a file (relative POSIX path) found in an entry's directory is part of the artifact.

    Args:
        name: relative POSIX path.
        neuron: the directory is one of the Neuron stack's, so its debug files are left behind.
    """
    top = name.split("/", 1)[0]
    if top.startswith((".neuron_store", ".nfs")):
        return False
    return not (neuron and (top in _LEFT_BEHIND or _RANK_DIRECTORY.match(top) is not None))


def list_files(directory: Path, key: str) -> list[ArtifactFile]:
    """The files of an artifact in `directory`, by name; sizes, no digests.

    Raises:
        InvalidArtifact: a symbolic link, a device or an unsafe name is among them.
        OSError: the directory cannot be read.
    """
    return [file for file, _ in _timed_files(directory, key)]


def _timed_files(directory: Path, key: str) -> list[tuple[ArtifactFile, float]]:
    """As `list_files`, with each file's mtime in Unix seconds."""
    neuron = os.path.lexists(directory / neff_name(key))
    files: list[tuple[ArtifactFile, float]] = []

    def walk(folder: str, prefix: str) -> None:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                name = prefix + entry.name
                if not belongs_to_artifact(name, neuron=neuron):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    walk(entry.path, name + "/")
                elif entry.is_file(follow_symlinks=False):
                    try:
                        check_file_name(name)
                    except InvalidRecord as error:
                        raise InvalidArtifact(entry.path, error.reason) from None
                    status = entry.stat(follow_symlinks=False)
                    files.append((ArtifactFile(name, status.st_size), status.st_mtime))
                else:
                    raise InvalidArtifact(
                        entry.path, "a symbolic link, device or pipe; only regular files are kept"
                    )

    walk(os.fspath(directory), "")
    return files


def foreign_artifact(directory: Path, key: str) -> Artifact | None:
    """The artifact that the Neuron stack completed in `directory`, without a record of ours.

    Complete means: all four files exist and the mark's `neff_size` is the executable's size.
    None when it is not complete.

    Raises:
        OSError: the directory cannot be read.
    """
    mark = _read_small(directory / MARK_NAME)
    if mark is None:
        return None
    sizes = re.search(rb"^neff_size:(\d{1,19})\s*$", mark, re.MULTILINE)
    try:
        files = _timed_files(directory, key)
    except (InvalidArtifact, FileNotFoundError):
        return None
    by_name = {file.name: file for file, _ in files}
    neff = by_name.get(neff_name(key))
    if neff is None or HLO_NAME not in by_name or not any(map(_METADATA.match, by_name)):
        return None
    if sizes is None or int(sizes[1]) != neff.size:
        return None
    # As the stack's own manifest has it; the mark has another time, or none.
    moment = next(mtime for file, mtime in files if file is neff)
    return Artifact(
        key=key,
        files=tuple(file for file, _ in files),
        created=_iso(moment),
        executable=neff.name,
        compiler="neuronx-cc",
    )


def foreign_fault(directory: Path, key: str) -> str | None:
    """Why an entry that the Neuron stack marked complete is none; None: not marked, or whole."""
    mark = _read_small(directory / MARK_NAME)
    if mark is None or has_record(directory):
        return None
    try:
        names = {f.name: f.size for f in list_files(directory, key)}
    except InvalidArtifact as error:
        return str(error)
    except OSError:
        return None
    neff = neff_name(key)
    for name in (HLO_NAME, neff):
        if name not in names:
            return f"{name} is missing"
    if not any(map(_METADATA.match, names)):
        return f"{METADATA_NAME} is missing"
    said = re.search(rb"^neff_size:(\d{1,19})\s*$", mark, re.MULTILINE)
    if said is None:
        return f"{MARK_NAME} does not say the executable's size"
    if int(said[1]) != names[neff]:
        return f"{neff} has {names[neff]} bytes, {MARK_NAME} says {int(said[1])}"
    return None


def _iso(moment: float) -> str:
    from datetime import UTC, datetime  # noqa: PLC0415  (needed for foreign entries only)

    try:
        return datetime.fromtimestamp(moment, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC).isoformat()


def check_loadable(directory: Path, key: str, location: str) -> None:
    """Check what the stack's own loader will trip over: the metadata's key, the NEFF's length.

    Raises:
        ArtifactCorrupt: the metadata names another key or is no JSON object, or the executable is
            no NEFF, or not as long as its header says.
    """
    data = _read_small(directory / METADATA_NAME)
    if data is not None:
        try:
            said = json.loads(data).get("cache_key")
        except (ValueError, AttributeError, RecursionError):
            raise ArtifactCorrupt(key, location, f"{METADATA_NAME} is not a JSON object") from None
        if said is not None and said != key:
            raise ArtifactCorrupt(
                key, location, f"Cache key mismatch: expected {key!r}, found {str(said)[:80]!r}"
            )
    neff = directory / neff_name(key)
    header = _read_small(neff, _NEFF_HEADER.size)
    if header is None:
        return
    expected, size = neff_length(header), neff.stat().st_size
    if expected is None:
        raise ArtifactCorrupt(key, location, f"{neff.name} has {size} bytes and is not a NEFF")
    if expected != size:
        raise ArtifactCorrupt(
            key, location, f"{neff.name} has {size} bytes, its header says {expected}"
        )


def _read_small(path: Path, limit: int = 1 << 20) -> bytes | None:
    try:
        return read_small(path, limit)
    except (FileNotFoundError, NotADirectoryError, InvalidArtifact):
        return None


def has_record(directory: Path) -> bool:
    """Whether the entry carries a record of ours."""
    return os.path.lexists(directory / RECORD_NAME)

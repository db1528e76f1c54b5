"""What the store knows of each graph: paths, size, time and result shapes."""

from __future__ import annotations

import io
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import attrs

from neuron_store.artifact import MAX_RECORD_BYTES, RECORD_NAME, load_record
from neuron_store.errors import HloError, InvalidArtifact, NeuronStoreError
from neuron_store.manifest.hlo import read_output_shapes
from neuron_store.neuron_layout import HLO_NAME, neff_name
from neuron_store.streams import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from neuron_store.abc import ArtifactStore
    from neuron_store.manifest.schema import Graph

__all__ = ["enrich"]

logger = logging.getLogger(__name__)

# Look-ups of a tier without directories wait for the network.
_REMOTE_WORKERS = 16


def enrich(store: ArtifactStore, graphs: list[Graph]) -> list[Graph]:
    """The graphs with what the store says of them. What has vanished stays unsaid; never raises."""
    done = {}
    remote = []
    unread: list[str] = []
    # Where the last artifact lay, its siblings lie: asking the store for each, which looks through
    # all files of an artifact, would take longer than everything else together.
    root: str | None = None
    for graph in graphs:
        known = None if root is None else _from_sibling(root, graph, unread)
        if known is None:
            known, root = _from_directory(store, graph, root, unread)
        if known is None:
            remote.append(graph)
        else:
            done[graph.graph_hash] = known
    if remote:
        with ThreadPoolExecutor(min(_REMOTE_WORKERS, len(remote))) as pool:
            for graph in pool.map(lambda graph: _from_store(store, graph, unread), remote):
                done[graph.graph_hash] = graph
    if unread:
        logger.warning(
            "result shapes of %d graphs cannot be read; the first: %s", len(unread), unread[0]
        )
    return [done[graph.graph_hash] for graph in graphs]


def _from_sibling(root: str, graph: Graph, unread: list[str]) -> Graph | None:
    """Enriched from `<root>/<key>/`; None when the executable is not there under the usual name."""
    key = graph.graph_hash
    try:
        return _from_files(graph, f"{root}/{key}", neff_name(key), unread)
    except Exception as error:  # noqa: BLE001  (the store will be asked, and says what is wrong)
        logger.debug("graph %s is not at %s: %s", key, root, error)
        return None


def _from_directory(
    store: ArtifactStore, graph: Graph, root: str | None, unread: list[str]
) -> tuple[Graph | None, str | None]:
    """Enriched from the artifact's own directory, and the directory's parent.

    No graph where the store shows no directory.
    """
    key = graph.graph_hash
    try:
        directory = store.path_of(key)
        if directory is None:
            return None, root
        if directory.name == key:
            root = str(directory.parent)
        try:
            return _from_files(graph, str(directory), neff_name(key), unread), root
        except FileNotFoundError:
            # Another compiler's, which names its executable otherwise.
            artifact = store.find(key)
            if artifact is None or artifact.executable is None:
                return graph, root
            return _from_files(graph, str(directory), artifact.executable, unread), root
    except Exception as error:  # noqa: BLE001  (one graph's trouble must not cost the others)
        logger.warning("graph %s cannot be described: %s: %s", key, type(error).__name__, error)
        return graph, root


def _from_files(graph: Graph, directory: str, executable: str, unread: list[str]) -> Graph:
    status = os.stat(f"{directory}/{executable}", follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArtifact(f"{directory}/{executable}", "not a regular file")
    return _described(
        graph,
        executable=executable,
        size=status.st_size,
        created=_recorded(directory, graph.graph_hash) or _iso(status.st_mtime),
        open_hlo=lambda: io.FileIO(open_regular(f"{directory}/{HLO_NAME}")),
        unread=unread,
    )


def _recorded(directory: str, key: str) -> str | None:
    """When the record says it was compiled: a copy's mtime is when it was fetched."""
    try:
        with os.fdopen(open_regular(f"{directory}/{RECORD_NAME}"), "rb") as stream:
            data = stream.read(MAX_RECORD_BYTES + 1)
        return load_record(data, key=key, source=directory)[0].compiled
    except (OSError, NeuronStoreError):
        return None  # An entry of the Neuron stack: its executable's mtime is the time.


def _from_store(store: ArtifactStore, graph: Graph, unread: list[str]) -> Graph:
    """Enriched from a tier that keeps no directories."""
    key = graph.graph_hash
    try:
        artifact = store.find(key)
        if artifact is None:
            return graph
        program = artifact.file(artifact.executable or neff_name(key))
        if program is None:
            return graph
        open_hlo = None
        if artifact.file(HLO_NAME) is not None:
            open_hlo = lambda: store.open_file(key, HLO_NAME)  # noqa: E731  (as short as it gets)
        return _described(
            graph,
            executable=program.name,
            size=program.size,
            created=artifact.compiled,
            open_hlo=open_hlo,
            unread=unread,
        )
    except Exception as error:  # noqa: BLE001  (one graph's trouble must not cost the others)
        logger.warning("graph %s cannot be described: %s: %s", key, type(error).__name__, error)
        return graph


def _described(
    graph: Graph,
    *,
    executable: str,
    size: int,
    created: str | None,
    open_hlo: Callable[[], BinaryIO] | None,
    unread: list[str],
) -> Graph:
    key = graph.graph_hash
    hlo_path: str | None = None
    shapes: tuple[str, ...] | None = None
    if open_hlo is not None:
        try:
            with open_hlo() as stream:
                hlo_path = f"{key}/{HLO_NAME}"
                shapes = tuple(read_output_shapes(stream))
        except FileNotFoundError:
            pass
        except (HloError, NeuronStoreError, OSError) as error:
            unread.append(f"{key}: {error}")
    return attrs.evolve(
        graph,
        hlo_path=hlo_path,
        neff_path=f"{key}/{executable}",
        neff_size=size,
        created_timestamp=created,
        output_shapes=shapes,
    )


def _iso(moment: float) -> str | None:
    try:
        return datetime.fromtimestamp(moment, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None  # a file system may hold times beyond the year 9999

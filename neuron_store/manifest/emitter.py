"""Writes an engine's manifest after warm-up, from its ledger, the store and the live configuration.

It sees nothing of the store but `ArtifactStore`, and is best effort: whatever fails is logged and
swallowed, so that a manifest can never break compilation, warm-up or a request.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from neuron_store.artifact import is_key
from neuron_store.compiler_flags import manifest_flags
from neuron_store.manifest.config import build_config, installed_packages
from neuron_store.manifest.engine import engine_id
from neuron_store.manifest.enrich import enrich
from neuron_store.manifest.ledger import (
    LedgerLine,
    clear_ledger,
    ledger_directory,
    manifest_root,
    read_ledger,
)
from neuron_store.manifest.schema import (
    MANIFEST_NAME,
    MAX_COUNT,
    Config,
    Graph,
    Manifest,
    dump_manifest,
)
from neuron_store.own_directory import make_own
from neuron_store.streams import create_file, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from neuron_store.abc import ArtifactStore

__all__ = ["emit_manifest", "write_manifest"]

logger = logging.getLogger(__name__)

_STALE = 3600.0
"""Seconds after which nobody writes to an unfinished manifest any more."""


def emit_manifest(
    store: ArtifactStore,
    *,
    config: Any = None,
    rank_to_global: Mapping[int, int] | Sequence[int] | Callable[[int], int] | None = None,
    local_rank: int = 0,
    neuron_config: Any = None,
    target: str | None = None,
    topology: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write `$VLLM_NEURON_MANIFEST_DIR/<engine id>/manifest.json` and remove the engine's ledger.

    To be called once an engine has warmed up. Does nothing where the variable is unset or empty,
    and on other ranks than local rank 0. Never raises.

    Args:
        store: where the artifacts are; the manifest's paths are relative to its root.
        config: the live VllmConfig, or anything shaped like it; secrets are masked.
        rank_to_global: global rank of each rank of the tensor-parallel group; None: the same.
        local_rank: of the caller.
        neuron_config: the resolved Neuron configuration, where `config` does not carry it.
        target: the compiler's target, such as trn2.
        topology: values that win over those in `config`, such as a resolved `ep_degree`.

    Returns:
        The manifest's path; None when nothing was written.
    """
    try:
        root = manifest_root()
        if root is None or local_rank != 0:
            return None
        began = time.perf_counter()
        engine = engine_id()
        unread: list[str] = []
        lines = read_ledger(ledger_directory(root, engine), unread)
        graphs = enrich(store, _group(lines, rank_to_global))
        manifest = Manifest(
            config=_config(config, graphs, neuron_config, target, topology),
            graphs=tuple(graphs),
            environment=_environment(),
        )
        path = root / engine / MANIFEST_NAME
        # A link there would have the manifest written over somebody else's.
        make_own(os.fspath(path.parent))
        write_manifest(manifest, path)
    except Exception as error:
        logger.warning("no manifest was written: %s: %s", type(error).__name__, error)
        logger.debug("while emitting a manifest", exc_info=True)
        return None
    try:
        if unread:
            logger.warning(
                "the ledger of engine %s stays: %s could not be read, so the manifest may lack "
                "graphs; emit again",
                engine,
                ", ".join(unread),
            )
        else:
            clear_ledger(root, engine)
    except Exception as error:  # noqa: BLE001  (best effort, by contract)
        logger.warning("the ledger of engine %s was not removed: %s", engine, error)
    logger.info(
        "manifest of %d graphs written to %s in %.2f s",
        len(graphs),
        path,
        time.perf_counter() - began,
    )
    return path


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write it atomically: a reader sees the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = dump_manifest(manifest)
    _remove_stale(path)
    staged = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns():x}.tmp")
    descriptor = create_file(staged)
    try:
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(staged, path)
    except BaseException:
        try:
            os.unlink(staged)
        except OSError:
            pass
        raise


def _remove_stale(path: Path) -> None:
    """What writers that were killed left beside it; on a share, those of other machines too."""
    now = time.time()
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        try:
            if now - left.lstat().st_mtime > _STALE:
                left.unlink()
        except OSError:
            pass  # another emitter's business, too


def _group(
    lines: Iterable[LedgerLine],
    rank_to_global: Mapping[int, int] | Sequence[int] | Callable[[int], int] | None,
) -> list[Graph]:
    """One graph for each key, with the ranks that traced it, in the order of tracing."""
    first: dict[str, LedgerLine] = {}
    ranks: dict[str, set[int]] = {}
    known: dict[int, int | None] = {}
    for line in lines:
        if not is_key(line.key):
            logger.warning("ledger: %.80r is no key of a graph; left out", line.key)
            continue
        # What is told of a graph, and where, must not depend on whose file is read first.
        other = first.setdefault(line.key, line)
        if (line.rank, line.position) < (other.rank, other.position):
            first[line.key] = line
        if line.rank not in known:
            known[line.rank] = _global_rank(line.rank, rank_to_global)
        traced = ranks.setdefault(line.key, set())
        rank = known[line.rank]
        if rank is not None:
            traced.add(rank)
    flags: dict[str, str] = {}
    graphs = []
    for key, line in sorted(
        first.items(), key=lambda item: (item[1].rank, item[1].position, item[0])
    ):
        told = flags.get(line.compiler_flags)
        if told is None:
            told = flags[line.compiler_flags] = manifest_flags(line.compiler_flags)
        graphs.append(
            Graph(
                graph_hash=key,
                input_shapes=line.input_shapes,
                compiler_flags=told,
                ranks=tuple(sorted(ranks[key])),
            )
        )
    return graphs


def _global_rank(
    rank: int, mapping: Mapping[int, int] | Sequence[int] | Callable[[int], int] | None
) -> int | None:
    try:
        if mapping is None:
            found = rank
        elif callable(mapping):
            found = mapping(rank)
        elif rank < 0:
            raise IndexError(rank)  # noqa: TRY301  (a list would count from its end)
        else:
            found = mapping[rank]
        # One that the manifest cannot hold would cost all graphs.
        if 0 <= int(found) < MAX_COUNT:
            return int(found)
        logger.warning("rank %.40s maps to the global rank %.40s; left out", rank, found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (a wrong rank would be worse than none)
        logger.warning(
            "rank %.40s has no global rank (%s: %s); left out", rank, type(error).__name__, error
        )
    return None


def _config(
    live: Any,
    graphs: list[Graph],
    neuron_config: Any,
    target: str | None,
    topology: Mapping[str, Any] | None,
) -> Config:
    try:
        return build_config(
            live,
            neuron_config=neuron_config,
            target=target,
            topology=topology,
            compiler_flags=next((g.compiler_flags for g in graphs if g.compiler_flags), ""),
            environ=os.environ,
        )
    except Exception as error:  # noqa: BLE001  (the graphs are worth having without it)
        logger.warning("the configuration cannot be told: %s: %s", type(error).__name__, error)
        return Config()


def _environment() -> dict[str, str]:
    try:
        return installed_packages()
    except Exception as error:  # noqa: BLE001  (the graphs are worth having without it)
        logger.warning("installed packages cannot be told: %s: %s", type(error).__name__, error)
        return {}

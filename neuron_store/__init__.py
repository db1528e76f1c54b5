"""Compile each accelerator graph once.

Names are loaded at first use (PEP 562), so that a rank which only reads the local tier imports
nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from neuron_store import errors
from neuron_store.errors import *  # noqa: F403  (every error is public)

if TYPE_CHECKING:
    from neuron_store.abc import ArtifactStore, Publication
    from neuron_store.artifact import Artifact
    from neuron_store.batch import precompile
    from neuron_store.compilers import Compiler
    from neuron_store.coordinator import CompileCoordinator
    from neuron_store.job import CompileJob
    from neuron_store.opening import get_neuron_compile_cache_dir, open_store, save_cache
    from neuron_store.tiered import TieredStore

_HOMES = {
    "Artifact": "artifact",
    "ArtifactStore": "abc",
    "CompileCoordinator": "coordinator",
    "CompileJob": "job",
    "Compiler": "compilers",
    "Publication": "abc",
    "TieredStore": "tiered",
    "get_neuron_compile_cache_dir": "opening",
    "open_store": "opening",
    "precompile": "batch",
    "save_cache": "opening",
}

__all__ = [  # noqa: PLE0604  (strings all; the errors' list is built in their own module)
    "Artifact",
    "ArtifactStore",
    "CompileCoordinator",
    "CompileJob",
    "Compiler",
    "Publication",
    "TieredStore",
    "get_neuron_compile_cache_dir",
    "open_store",
    "precompile",
    "save_cache",
    *errors.__all__,
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""`torch.compile(model, backend="neuron_store")`: each graph compiled once, by any of the ranks.

Dynamo's graph becomes a functional ATen graph (AOT Autograd), that graph a key, and the key an
artifact: from a tier, or lowered through JAX and compiled by the one process that holds the lock.
On a hit nothing is lowered, and neither JAX nor a compiler is imported.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from neuron_store._backend_options import BackendOptions
from neuron_store._once import warn_once
from neuron_store._torch_graph import CachedGraph
from neuron_store.abc import ArtifactStore
from neuron_store.compiler_flags import parse_flags
from neuron_store.compilers._neuron_target import TARGET_OVERRIDE
from neuron_store.compilers.neuronx_cc import CC_FLAGS
from neuron_store.coordinator import CompileCoordinator
from neuron_store.errors import Unkeyable, UnsupportedOperator
from neuron_store.fx_key import graph_components, installed_version
from neuron_store.lowering.decompositions import decompositions
from neuron_store.lowering.operators import lowering_version, missing_operators
from neuron_store.opening import open_store
from neuron_store.registry import get_compiler
from neuron_store.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule

__all__ = ["BackendOptions", "neuron_store"]

_log = logging.getLogger("neuron_store.torch")


def neuron_store(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend, as Dynamo calls it.

    What goes wrong with an artifact (`CompileError`, `CacheMiss`, ...) is raised by the compiled
    model's call, and tried afresh by the next one.

    Raises:
        ConfigError: an option that cannot be used; Dynamo wraps it.
    """
    chosen = BackendOptions.parse(options)
    compiler = functools.partial(_compiled, options=chosen)
    traced: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=decompositions(),
    )(gm, example_inputs)
    return traced


def _compiled(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: BackendOptions
) -> Callable[..., Any]:
    """One functional ATen graph as something that runs."""
    name = options.compiler or _default_compiler()
    refusal = _refusal(gm, example_inputs, name)
    if refusal is not None:
        if options.fallback == "error":
            return _boxed(functools.partial(_raise, refusal))
        warn_once(_log, f"a graph runs eagerly: {refusal}")
        return _boxed(gm.forward)
    flags = _flags(name, options.compiler_flags)
    components: Mapping[str, Any] | None
    try:
        components = {
            **graph_components(
                gm,
                example_inputs,
                extra=options.extra,
                **_compiler_parts(name, flags, tuple(map(os.environ.get, _DECIDING))),
            ),
            "lowering": f"{lowering_version()} {_jax_versions()}",
        }
    except Unkeyable as error:
        warn_once(_log, f"a graph is compiled without the cache: {error}")
        components = None
    return _boxed(
        CachedGraph(
            gm,
            components,
            functools.partial(_coordinator, options),
            get_compiler(name),
            flags,
            recorded=(*flags, *_added_flags(name)),
            eager_on_refusal=options.fallback == "eager",
        )
    )


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    boxed: Callable[..., Any] = make_boxed_func(function)
    return boxed


def _raise(error: Exception, *_: Any) -> Any:
    raise error


def _refusal(
    gm: GraphModule, example_inputs: Sequence[Any], compiler: str
) -> UnsupportedOperator | None:
    """Why the graph cannot be lowered, as far as its operators and devices tell."""
    missing = missing_operators(gm)
    if missing:
        return UnsupportedOperator(", ".join(missing))
    devices = {"cpu"} if compiler == "iree" else {"cpu", "neuron"}
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type not in devices:
            return UnsupportedOperator(
                f"tensors on {value.device}", f"compiler {compiler} runs on {' or '.join(devices)}"
            )
    return None


def _default_compiler() -> str:
    on_neuron = os.path.exists("/dev/neuron0") and shutil.which("neuronx-cc") is not None
    return "neuronx-cc" if on_neuron else "iree"


# Adapters make components from graphs; these say what a graph of no content adds to the flags.
_EMPTY_HLO = bytes.fromhex("0a0565656565651205656565656530011a00")
_DEMOTE = "iree-input-demote-f64-to-f32"
_EMPTY = {"iree": b"module {\n}\n"}
# Variables that an adapter reads: another value of one makes another key.
_DECIDING = (CC_FLAGS, TARGET_OVERRIDE)


@functools.lru_cache(maxsize=64)
def _compiler_parts(
    name: str, flags: tuple[str, ...], _environment: tuple[str | None, ...]
) -> Mapping[str, str]:
    """The compiler, its version, canonical flags and target, as the adapter has them in keys."""
    job = get_compiler(name).job(_EMPTY.get(name, _EMPTY_HLO), flags=flags)
    return {
        part: str(job.components.get(part, ""))
        for part in ("compiler", "compiler_version", "compiler_flags", "target")
    }


def _flags(name: str, flags: Sequence[str] | str) -> tuple[str, ...]:
    tokens = tuple(token for flag in parse_flags(flags) for token in flag.tokens)
    if name == "iree" and not any(_DEMOTE in token for token in tokens):
        # IREE's default would make float32 of float64, also in the results' type.
        return (f"--{_DEMOTE}=false", *tokens)
    return tokens


def _added_flags(name: str) -> tuple[str, ...]:
    """What the adapter takes from the environment: the compiler gets it, so a manifest tells it."""
    added = os.environ.get(CC_FLAGS, "") if name == "neuronx-cc" else ""
    return tuple(token for flag in parse_flags(added) for token in flag.tokens)


@functools.cache
def _jax_versions() -> str:
    # From the metadata: importing JAX costs half a second, and a hit has no use for it.
    return " ".join(f"{name} {installed_version(name) or 'absent'}" for name in ("jax", "jaxlib"))


_stores: dict[tuple[Any, str], ArtifactStore] = {}


def _coordinator(options: BackendOptions) -> CompileCoordinator:
    store = options.store
    if not isinstance(store, ArtifactStore):
        # One store for all graphs, so that a tier in trouble is left alone by all of them; opened
        # again when the settings change.
        name = (store, repr(load_settings()))
        if name not in _stores:
            _stores[name] = open_store(store)
        store = _stores[name]
    return CompileCoordinator(store)

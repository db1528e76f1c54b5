"""What an FX graph's key is computed from.

The components are those of the Neuron stack's own key (graph, inputs, framework, compiler and
kernel-library versions, canonical flags, target, replica groups) and whatever `extra` adds.
Importing this module imports torch, and nothing that compiles.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import torch

from neuron_store._fx_text import GraphText
from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule

__all__ = [
    "extra_components",
    "graph_components",
    "installed_version",
    "normal_groups",
    "source_digest",
]

_SCALARS = (str, int, float, bool, type(None))


def graph_components(
    gm: GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    compiler: str,
    compiler_version: str,
    compiler_flags: str = "",
    target: str = "",
    extra: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """The named components of the graph's key, each a JSON value.

    Equal for equal graphs in any process; never in them: node names, object ids, paths, the
    environment, ranks, device indices, and the values of inputs.

    Args:
        gm: a graph of Dynamo or of AOT Autograd, not changed.
        example_inputs: one for each placeholder; may be left out when the tracer recorded them
            (`node.meta`). Symbolic sizes are always taken from the record.
        compiler: its adapter's name.
        compiler_version: as the adapter says it.
        compiler_flags: in canonical form (`neuron_store.compiler_flags`).
        target: the platform, such as `trn2`, or the CPU with its features.
        extra: more components, kept as `extra:<name>`. One named `op:<namespace>::<name>` vouches
            for the source of that custom operator.

    Raises:
        Unkeyable: the graph holds something whose meaning the key cannot carry.
        ConfigError: an extra component is not a plain value.
    """
    extra = {} if extra is None else extra
    more = extra_components(extra)
    text = GraphText(known_operators=[n[3:] for n in extra if n.startswith("op:")])
    inputs = text.inputs(gm, example_inputs)
    structure = text.graph(gm)
    components: dict[str, Any] = {
        "graph": hashlib.sha256(structure.encode()).hexdigest(),
        "graph_operators": dict(sorted(text.operators.items())),
        "inputs": list(inputs),
        "symbols": list(text.symbols.ranges()),
        "framework": f"torch {torch.__version__}",
        "compiler": compiler,
        "compiler_version": compiler_version,
        "compiler_flags": compiler_flags,
        "target": target,
        "replica_groups": [list(ranks) for ranks in normal_groups(text.groups)],
    }
    nki = installed_version("nki")
    if nki is not None:
        components["kernel_library"] = f"nki {nki}"
    return {**components, **more}


def extra_components(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `extra` adds to a graph's components.

    Raises:
        ConfigError: a name that is no text, or a value that is not plain.
    """
    for name in extra:
        if not isinstance(name, str):
            raise ConfigError(
                f"extra component {name!r:.200} is named by a {type(name).__qualname__}; use text"
            )
    return {f"extra:{name}": _plain(name, extra[name]) for name in sorted(extra)}


def normal_groups(groups: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Replica groups with their ranks counted from the lowest of all.

    Data-parallel replicas run one program over other ranks (`0..7` and `8..15`), so where in the
    world the groups begin is not told. How they overlap and how far apart their ranks lie is: on
    the device `(0, 1)` and `(0, 2)` are other neighbours, and other programs.
    """
    first = min((rank for group in groups for rank in group), default=0)
    return [[rank - first for rank in group] for group in groups]


def source_digest(*objects: Callable[..., Any] | type) -> str:
    """A digest of the source of functions or classes, for an `extra` component.

    It covers their text only, neither where the file lies nor what they call.

    Raises:
        ConfigError: an object has no Python source (built in, or typed at a prompt).
    """
    digest = hashlib.sha256()
    for item in objects:
        try:
            source = textwrap.dedent(inspect.getsource(item))
        except (OSError, TypeError) as error:
            raise ConfigError(
                f"source_digest: no source for {item!r} ({error}); "
                "pass a digest of the kernel's files instead"
            ) from error
        digest.update(f"{len(source)}:".encode() + source.encode())
    return digest.hexdigest()


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, _SCALARS) and value == value:  # noqa: PLR0124  (NaN is no JSON value)
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(name, item) for key, item in value.items()}
    raise ConfigError(
        f"extra component {name!r} is a {type(value).__qualname__}; "
        "give text, numbers, lists and mappings of them, such as a digest from source_digest()"
    )


@functools.cache
def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, from its metadata: nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Turns a live vLLM configuration into the manifest's `config`, and tells the installed packages.

vLLM is not imported: whatever has the right attributes or items will do.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import re
from collections.abc import Mapping
from typing import Any

import attrs

from neuron_store.compiler_flags import last_value, recorded_flags
from neuron_store.manifest.coercion import to_plain
from neuron_store.manifest.schema import Config, Topology

__all__ = ["build_config", "installed_packages"]

logger = logging.getLogger(__name__)

TARGET_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
_SIZES = (
    "world_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
)
# Spellings met in Neuron configurations.
_ATTENTION_DP = ("attention_dp_size", "attention_dp_degree", "attn_dp_degree")
_EXPERT_PARALLEL = ("ep_degree", "expert_parallel_size", "moe_ep_degree", "expert_parallel_degree")
_NEURON = ("neuron_config", "override_neuron_config")


def build_config(
    live: Any,
    *,
    neuron_config: Any = None,
    target: str | None = None,
    topology: Mapping[str, Any] | None = None,
    compiler_flags: str = "",
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The manifest's `config` from a live configuration; never raises.

    Args:
        live: a VllmConfig or anything shaped like it; None leaves all unsaid.
        neuron_config: the resolved Neuron configuration, where `live` does not carry it.
        target: the compiler's target; else the Neuron configuration's, else
            NEURON_PLATFORM_TARGET_OVERRIDE, else `--target` among the flags.
        topology: values that win over those found, such as a resolved `ep_degree`.
        compiler_flags: of any of the graphs.
        environ: instead of the process's environment.
    """
    if neuron_config is None:
        neuron_config = _neuron_config(live)
    model, scheduler = _get(live, "model_config"), _get(live, "scheduler_config")
    dtype = _get(model, "dtype")
    said = (
        target,
        _get(neuron_config, "target"),
        _get(neuron_config, "platform_target"),
        (environ or {}).get(TARGET_OVERRIDE),
        last_value(recorded_flags(compiler_flags), "--target"),
    )
    return Config(
        model=_text(_get(model, "model")),
        # As text first: to ask a foreign object whether it is true may raise anything.
        target=next((text for value in said if (text := _text(value))), None),
        dtype=_text(dtype),
        max_num_seqs=_count(_get(scheduler, "max_num_seqs")),
        max_model_len=_count(_get(model, "max_model_len")),
        topology=_topology(_get(live, "parallel_config"), neuron_config, topology or {}),
        neuron_config=_object(neuron_config),
        vllm_config=_object(live),
    )


def _neuron_config(live: Any) -> Any:
    for place in (live, _get(live, "model_config"), _get(live, "additional_config")):
        for name in _NEURON:
            found = _get(place, name)
            if found is not None:
                return found
    return None


def _topology(parallel: Any, neuron: Any, said: Mapping[str, Any]) -> Topology:
    if parallel is None and not said:
        return Topology()
    sizes: dict[str, Any] = {name: _count(_get(parallel, name)) for name in _SIZES}
    if parallel is not None:
        # What this vLLM does not know, it does not do.
        sizes = {name: 1 if size is None else size for name, size in sizes.items()}
    sizes["attention_dp_size"] = _first(neuron, parallel, _ATTENTION_DP) or 1
    ep = _first(neuron, parallel, _EXPERT_PARALLEL)
    if ep is None:
        spread = (sizes["tensor_parallel_size"] or 1) * (sizes["data_parallel_size"] or 1)
        # vLLM spreads experts over all ranks of tensor and data parallelism together.
        ep = spread if _get(parallel, "enable_expert_parallel") is True else 1
    sizes["ep_degree"] = ep
    known = {field.name for field in attrs.fields(Topology)} - {"extra", "has_collectives"}
    sizes.update({name: _count(said[name]) for name in known if name in said})
    collective = said.get("has_collectives")
    if not isinstance(collective, bool):
        # Ranks that share a graph's work talk to each other; data-parallel engines do not.
        together = ("world_size", "tensor_parallel_size", "pipeline_parallel_size", "ep_degree")
        collective = any((sizes[name] or 1) > 1 for name in together)
    return Topology(**sizes, has_collectives=collective)


def _first(neuron: Any, parallel: Any, names: tuple[str, ...]) -> int | None:
    for place in (neuron, parallel):
        for name in names:
            size = _count(_get(place, name))
            if size is not None:
                return size
    return None


def _get(value: Any, name: str) -> Any:
    """An attribute or an item; None where there is none, or where it raises."""
    if value is None:
        return None
    try:
        if isinstance(value, Mapping):
            return value.get(name)
        return getattr(value, name, None)
    except KeyboardInterrupt:
        raise
    except BaseException:
        # A foreign property may raise anything.
        logger.debug("%s.%s cannot be read", type(value).__name__, name, exc_info=True)
        return None


def _text(value: Any) -> str | None:
    plain = to_plain(value)
    return plain if plain is None or isinstance(plain, str) else str(plain)


def _count(value: Any) -> int | None:
    plain = to_plain(value)
    return plain if type(plain) is int else None


def _object(value: Any) -> dict[str, Any]:
    plain = to_plain(value)
    if plain is None:
        return {}
    return plain if isinstance(plain, dict) else {"value": plain}


def installed_packages() -> dict[str, str]:
    """Python's and every installed distribution's version, by name."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except Exception:
            logger.debug("an installed distribution cannot be read", exc_info=True)
            continue
        if name and version:
            # The first on the path is the one that is imported.
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return {"python": platform.python_version(), **dict(sorted(versions.items()))}

"""How the coordinator goes about a compile; apart from where artifacts are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from neuron_store.errors import ConfigError
from neuron_store.variables import Sources

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CompilePolicy"]


@attrs.frozen
class CompilePolicy:
    """Raises `ConfigError` when `disabled` and `require_hit` are both set."""

    disabled: bool = False
    """Read nothing, write nothing, compile in this process."""
    require_hit: bool = False
    """A miss in every tier raises `CacheMiss`."""
    timeout: float = 600.0
    """Seconds to wait for another process's compile."""
    attempts: int = 2
    """Compiles in all before those who wait get the error."""
    promote: bool = False
    """Promote each artifact after its compile."""
    fleet_lease: bool = False
    """One node in the fleet compiles a key and promotes it to the tier that gave the lease, since
    those who wait could not fetch it otherwise."""
    lease_ttl: float = 30.0
    """Seconds without a sign of life after which a lease is taken over."""

    def __attrs_post_init__(self) -> None:
        if self.disabled and self.require_hit:
            raise ConfigError(
                "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE and VLLM_NEURON_DISABLE_WARMUP_COMPILE are "
                "both set: without a cache every graph would have to be compiled, and compiling "
                "is forbidden; unset one of them"
            )

    @classmethod
    def from_sources(cls, sources: Sources) -> CompilePolicy:
        """The policy that environment and settings file ask for."""
        return cls(
            disabled=sources.read("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE")[0],
            require_hit=sources.read("VLLM_NEURON_DISABLE_WARMUP_COMPILE")[0],
            timeout=sources.read("NEURON_LIBTORCH_COMPILATION_TIMEOUT")[0],
            attempts=sources.read("NEURON_STORE_COMPILE_ATTEMPTS")[0],
            promote=sources.read("NEURON_STORE_PROMOTE")[0] == "auto",
            fleet_lease=sources.read("NEURON_STORE_FLEET_LEASE")[0],
            lease_ttl=sources.read("NEURON_STORE_LEASE_TTL")[0],
        )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> CompilePolicy:
        """As `from_sources`, reading the environment (the process's own unless given)."""
        return cls.from_sources(Sources.load(environ))

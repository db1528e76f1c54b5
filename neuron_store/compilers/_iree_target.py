"""Which processor IREE compiles for: never `host`, since that word means another one elsewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs

from neuron_store.compiler_flags import FlagDialect, check_flags, parse_flags
from neuron_store.compilers._cpu import host_cpu
from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuron_store.compilers._cpu import HostCPU

__all__ = ["DEVICE", "DIALECT", "IreeTarget", "resolve_target"]

_CPU = "--iree-llvmcpu-target-cpu"
_FEATURES = "--iree-llvmcpu-target-cpu-features"
_TRIPLE = "--iree-llvmcpu-target-triple"
DEVICE = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
)
_OTHER_DEVICES = frozenset(
    {
        "--iree-hal-target-device",
        "--iree-hal-target-backends",
        "--iree-hal-local-target-device-backends",
    }
)
# LLVM's command-line parser takes one dash or two; a repeated list option adds up.
DIALECT = FlagDialect(
    synonyms={"-o": "--o"},
    machine=frozenset(
        {
            "--o",
            "--dump-compilation-phases-to",
            "--iree-hal-dump-executable-benchmarks-to",
            "--iree-hal-dump-executable-binaries-to",
            "--iree-hal-dump-executable-configurations-to",
            "--iree-hal-dump-executable-files-to",
            "--iree-hal-dump-executable-intermediates-to",
            "--iree-hal-dump-executable-sources-to",
        }
    ),
    repeats_add_up=True,
    graph_suffixes=(".mlir", ".mlirbc"),
)


@attrs.frozen
class IreeTarget:
    """The processor that is compiled for, by name: never `host`."""

    arch: str
    cpu: str
    features: tuple[str, ...] = ()
    """With their sign, as in `+avx512f`; on top of what the name means."""
    triple: str | None = None
    """None: the host's architecture."""

    def __str__(self) -> str:
        return f"{self.triple or self.arch}/{self.cpu}{''.join(self.features)}"

    @property
    def flags(self) -> list[str]:
        """As the compiler takes it."""
        chosen = [f"{_CPU}={self.cpu}"]
        if self.features:
            chosen.append(f"{_FEATURES}={','.join(self.features)}")
        if self.triple is not None:
            chosen.append(f"{_TRIPLE}={self.triple}")
        return chosen


def resolve_target(flags: Sequence[str] | str) -> tuple[IreeTarget, list[str]]:
    """The target that the flags ask for, this host's where they do not, and the other flags.

    Raises:
        ConfigError: a device other than llvm-cpu, a feature without its sign, or what `check_flags`
            refuses.
    """
    check_flags(flags, DIALECT)
    host = host_cpu()
    cpu, triple = "host", None
    features: list[str] = []
    rest: list[str] = []
    for flag in parse_flags(_two_dashes(flags), DIALECT):
        if flag.name == _CPU:
            cpu = flag.value or "host"
        elif flag.name == _TRIPLE:
            triple = flag.value
        elif flag.name == _FEATURES:
            features = _feature_list(flag.value or "", host.usable)
        elif flag.name in _OTHER_DEVICES:
            if flag.value not in {"local", "llvm-cpu"}:
                raise ConfigError(
                    f"IREE flag {' '.join(flag.tokens)}: this adapter compiles for llvm-cpu only; "
                    "drop the flag"
                )
        elif flag.name != "--o":
            rest.extend(flag.tokens)
    target = IreeTarget(
        triple.split("-", 1)[0] if triple else host.arch, cpu, tuple(features), triple
    )
    return (_named(target, host) if cpu == "host" else target), rest


def _named(target: IreeTarget, host: HostCPU) -> IreeTarget:
    """The target with this host's processor in place of the word `host`."""
    if target.arch != host.arch:
        raise ConfigError(
            f"IREE flag {_TRIPLE}={target.triple} is for another processor than this host's "
            f"{host.arch}; name it with {_CPU}=..."
        )
    features = target.features
    if host.level == "generic" and not features:
        # Where no level has a name the features are the name.
        features = tuple(f"+{name}" for name in host.usable)
    return attrs.evolve(target, cpu=host.level, features=features)


def _two_dashes(flags: Sequence[str] | str) -> list[str]:
    tokens = [token for flag in parse_flags(flags, DIALECT) for token in flag.tokens]
    return [f"-{t}" if re.match(r"-[a-z][\w-]+", t) else t for t in tokens]


def _feature_list(value: str, host: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in filter(None, value.split(",")):
        if name == "host":
            found += [f"+{feature}" for feature in host]
        elif name[0] in "+-":
            found.append(name)
        else:
            raise ConfigError(f"IREE flag {_FEATURES}: feature {name!r} needs a + or - before it")
    return found

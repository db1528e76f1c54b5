"""Which Neuron platform to compile for."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from neuron_store.compiler_flags import last_value
from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TARGET_OVERRIDE", "resolve_target"]

TARGET_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Environment variable that names the platform target, whatever the flags say."""
_PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
# EC2 instance families by their name before the dot; trn2u is trn2 in an UltraServer.
_FAMILIES = {"inf2": "inf2", "trn1": "trn1", "trn1n": "trn1n", "trn2": "trn2", "trn2u": "trn2",
             "trn3": "trn3"}  # fmt: skip
_TARGET = re.compile(r"[a-z][a-z0-9]{1,19}\Z")


def resolve_target(flags: Sequence[str] | str) -> str:
    """The platform target: NEURON_PLATFORM_TARGET_OVERRIDE, else `--target`, else this host's.

    Raises:
        ConfigError: none of them says, or what it says is not a target's name.
    """
    given = last_value(flags, "--target")
    override = os.environ.get(TARGET_OVERRIDE)
    if override:
        target, source = override, TARGET_OVERRIDE
    elif given is not None:
        target, source = given, "--target"
    else:
        target, source = _detected(), _PRODUCT
    if _TARGET.match(target) is None:
        raise ConfigError(f"{source}={target!r} is not a platform target, such as trn2 or inf2")
    return target


def _detected() -> str:
    try:
        with open(_PRODUCT, encoding="ascii", errors="replace") as file:
            product = file.read(200).strip()
    except OSError:
        product = ""
    target = _FAMILIES.get(product.split(".", 1)[0])
    if target is None:
        raise ConfigError(
            f"this host ({product or 'of unknown product name'}) is not a Neuron instance, so the "
            f"platform target must be given: --target trn2 among the flags, or {TARGET_OVERRIDE}"
        )
    return target

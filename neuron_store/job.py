"""A compile that can be asked for: the seam between compilers and the coordinator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.artifact import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["CompileJob"]


def _plain_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as JSON gives it back, so that it equals what a record returns."""
    for name, component in dict(value).items():
        try:
            json.dumps(component, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"component {name!r} of a compile job is no JSON value ({error}); "
                "give text, numbers, booleans, lists or objects of them"
            ) from error
    copy = json.loads(json.dumps(dict(value)))
    assert isinstance(copy, dict)
    return copy


@attrs.frozen
class CompileJob:
    """One artifact and how to make it.

    To run under the `spawn` start method `compile` must pickle: a module-level function, a
    `functools.partial` of one, or an instance of a module-level class.

    Raises:
        InvalidKey: the key is not one safe path component.
        TypeError: a component is not a JSON value.
    """

    key: str = attrs.field(converter=check_key)
    compile: Callable[[Path], None]
    """Fills an empty private directory with the artifact's files."""
    components: Mapping[str, Any] = attrs.field(factory=dict, converter=_plain_json)
    """What the key was computed from. `compiler`, `compiler_version` and `target` are shown by
    name elsewhere. Kept in the record, and compared with the caller's at every hit."""
    executable: str | None = None
    """Name of the compiled program; None: `graph_<key>.<suffix>` if there is one."""
    host: Mapping[str, str] = attrs.field(factory=dict)
    """Facts about the machine that matter for the artifact, such as CPU features."""

"""Compilers: what turns a graph into a `CompileJob`, and an artifact into something that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from neuron_store.job import CompileJob

__all__ = ["Compiler"]


@runtime_checkable
class Compiler(Protocol):
    """Makes jobs from graphs and loads what they made."""

    @property
    def name(self) -> str:
        """As it appears in records and on the command line, such as `iree`."""

    def version(self) -> str:
        """The compiler's version, a component of every key."""

    def job(self, graph: Path | bytes, *, flags: Sequence[str] | str = ()) -> CompileJob:
        """The job that compiles `graph`; its key follows from its components."""

    def load(self, path: Path) -> Any:
        """What runs the artifact in directory `path` (as `get_or_compile` returned it)."""

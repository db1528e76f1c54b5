"""What a fuzz target is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from hypothesis import strategies as st

from tests.fuzz.guarding import Broken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from neuron_store.errors import NeuronStoreError

__all__ = ["HERE", "Target", "must"]

HERE = Path(__file__).parent


@attrs.frozen
class Target:
    """One reader of foreign bytes."""

    name: str
    call: Callable[[bytes, Path], object]
    """(input, root, a directory of its own) to a short value that tells kinds of outcomes apart."""
    allowed: tuple[type[NeuronStoreError], ...]
    seeds: Callable[[], Sequence[bytes]]
    """Valid input."""
    tokens: tuple[bytes, ...] = ()
    strategy: st.SearchStrategy[bytes] = attrs.field(factory=lambda: st.binary(max_size=2000))
    secret: Callable[[bytes], bool] = lambda _: False
    """Whether the input has the `SECRET` where a credential stands."""

    @property
    def corpus(self) -> Path:
        return HERE / "corpus" / self.name

    def inputs(self) -> list[bytes]:
        """The seeds, and what was found worth keeping."""
        kept = sorted(self.corpus.iterdir()) if self.corpus.is_dir() else []
        return [*self.seeds(), *(path.read_bytes() for path in kept)]


def must(good: bool, what: str) -> None:
    if not good:
        raise Broken(what)

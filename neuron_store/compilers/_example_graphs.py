"""The graphs that ship with the package: a transformer block's prefill and decode.

In a wheel they are the package data `neuron_store/_graphs/`; in a checkout, which an editable
install runs from, `examples/graphs/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_store.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["EXAMPLES", "example_arrays", "example_graph"]

EXAMPLES = ("prefill", "decode")
_PACKAGE = Path(__file__).resolve().parents[1]


def example_graph(name: str, suffix: str = ".mlir") -> Path:
    """The file of one example graph.

    Args:
        name: `prefill` or `decode`.
        suffix: `.mlir` (StableHLO), `.hlo` (a bare HloModuleProto) or `.npz` (reference arrays).

    Raises:
        ConfigError: there is no such graph, or the installation lacks its files.
    """
    if name not in EXAMPLES or suffix not in {".mlir", ".hlo", ".npz"}:
        raise ConfigError(f"no example graph {name}{suffix}; there are {', '.join(EXAMPLES)}")
    for folder in (_PACKAGE / "_graphs", _PACKAGE.parent / "examples" / "graphs"):
        file = folder / f"{name}{suffix}"
        if file.is_file():
            return file
    raise ConfigError(
        f"{name}{suffix} is missing from {_PACKAGE}: the installation is incomplete; "
        "run: pip install --force-reinstall --no-deps neuron-store"
    )


def example_arrays(name: str) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    """What the graph takes and what XLA made of it, each in order.

    Raises:
        ConfigError: as `example_graph`.
        MissingExtra: numpy is not installed.
    """
    file = example_graph(name, ".npz")
    try:
        import numpy as np  # noqa: PLC0415  (not a dependency of the core)
    except ImportError as error:
        raise MissingExtra("reading reference arrays", "iree", "numpy") from error
    with np.load(file, allow_pickle=False) as arrays:
        count = {
            kind: sum(n.startswith(kind) for n in arrays.files) for kind in ("input", "output")
        }
        inputs = [arrays[f"input_{i}"] for i in range(count["input"])]
        outputs = [arrays[f"output_{i}"] for i in range(count["output"])]
    return inputs, outputs

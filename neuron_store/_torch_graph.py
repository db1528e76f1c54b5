"""One ATen graph that runs as a cached program, made for its sizes at the first call."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from neuron_store._fx_outputs import output_plan
from neuron_store._fx_symbols import concrete, is_symbolic
from neuron_store._once import warn_once
from neuron_store.errors import (
    CompileError,
    HostUnfit,
    TierError,
    Unsupported,
    UnsupportedOperator,
)
from neuron_store.job import CompileJob
from neuron_store.key import compute_key
from neuron_store.manifest.ledger import record_graph
from neuron_store.settings import local_root_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule

    from neuron_store.compilers import Compiler
    from neuron_store.coordinator import CompileCoordinator

__all__ = ["CachedGraph"]

_log = logging.getLogger("neuron_store.torch")
# Marks a refusal of the lowering in a CompileError, which reaches every rank that waited.
_LOWERING = "neuron_store.lowering"
_MANY = 8
"""Programs of one graph after which somebody should hear of it."""


class CachedGraph:
    """Runs `gm` as a program that the coordinator gets.

    Nothing is compiled or loaded before the first call: only then are symbolic sizes known, and
    an error reaches the caller as it is, not wrapped by the tracer.

    Args:
        gm: a functional ATen graph.
        components: of its key; None when it cannot be keyed, and is compiled for this process.
        coordinator: what gets the artifact; asked for when it is first needed.
        compiler: its adapter.
        flags: for the compiler.
        recorded: for the ledger, all that the compiler gets.
        eager_on_refusal: run `gm` itself, with one warning, when the lowering refuses it.
    """

    def __init__(
        self,
        gm: GraphModule,
        components: Mapping[str, Any] | None,
        coordinator: Callable[[], CompileCoordinator],
        compiler: Compiler,
        flags: Sequence[str] | str,
        *,
        recorded: Sequence[str],
        eager_on_refusal: bool,
    ) -> None:
        self._gm = gm
        self._components = components
        self._coordinator = coordinator
        self._compiler = compiler
        self._flags = flags
        self._recorded = recorded
        self._eager_on_refusal = eager_on_refusal
        self._eager = False
        self._inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
        self._tensors = [i for i, v in enumerate(self._inputs) if isinstance(v, torch.Tensor)]
        self._symbols = _symbol_sources(self._inputs)
        self._plan = output_plan(gm)
        self._programs: dict[tuple[int, ...], _Specialised] = {}
        self._guard = threading.Lock()

    def __call__(self, *args: Any) -> list[Any]:
        if self._eager:
            return list(self._gm(*args))
        sizes = tuple(
            int(args[i]) if dim is None else args[i].shape[dim] for _, i, dim in self._symbols
        )
        program = self._programs.get(sizes)
        if program is None:
            try:
                program = self._specialise(sizes, args)
            except CompileError as error:
                if error.compiler != _LOWERING:
                    raise
                if not self._eager_on_refusal:
                    raise UnsupportedOperator(*_refused(error)) from error
                warn_once(_log, f"a graph runs eagerly: {error.reason}")
                self._eager = True
                return list(self._gm(*args))
        return program(args)

    def _specialise(self, sizes: tuple[int, ...], args: Sequence[Any]) -> _Specialised:
        with self._guard:
            if sizes not in self._programs:
                bindings = {s: n for (s, _, _), n in zip(self._symbols, sizes, strict=True)}
                self._programs[sizes] = _Specialised(
                    self._load(bindings, args), self._tensors, self._plan, bindings
                )
                if len(self._programs) == _MANY:
                    told = ", ".join(f"{symbol}={size}" for symbol, size in bindings.items())
                    warn_once(
                        _log,
                        f"a graph was made for {_MANY} combinations of sizes (the last: "
                        f"{told}), each of which is an artifact of its own: give the model few "
                        "sizes (buckets), and numbers that change as tensors",
                    )
            return self._programs[sizes]

    def _load(self, bindings: Mapping[Any, int], args: Sequence[Any]) -> Callable[..., Any] | None:
        if all(output.result is None for output in self._plan):
            return None
        compile_into = _Lowered(self._gm, args, bindings, self._compiler, self._flags)
        if self._components is None:
            with tempfile.TemporaryDirectory(prefix="neuron_store.") as directory:
                compile_into(uuid.uuid4().hex, Path(directory))
                return self._entry(Path(directory))
        components = dict(self._components)
        if bindings:
            # The program is made for these sizes alone, whatever range the trace allows.
            components["sizes"] = [
                list(a.shape) if isinstance(a, torch.Tensor) else a for a in args
            ]
        key = compute_key(components)
        job = CompileJob(
            key=key, compile=lambda directory: compile_into(key, directory), components=components
        )
        # Every rank that traced the graph says so, whoever of them compiles it.
        record_graph(key, _rank, lambda: [a for a in args if hasattr(a, "shape")], self._recorded)
        try:
            return self._entry(self._coordinator().get_or_compile(job))
        except TierError as error:
            raise local_root_refused(error) from error

    def _entry(self, path: Path) -> Callable[..., Any]:
        if self._compiler.name != "iree":
            program: Callable[..., Any] = self._compiler.load(path)
            return program
        from neuron_store._iree_tensors import IreeTensorProgram  # noqa: PLC0415  (imports IREE)

        return IreeTensorProgram(lambda: self._compiler.load(path))


@attrs.frozen
class _Specialised:
    """A program with what is around it: from the graph's arguments to its outputs."""

    program: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None
    tensors: Sequence[int]
    plan: Sequence[Any]
    bindings: Mapping[Any, int]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        results = self.program([args[i] for i in self.tensors]) if self.program else ()
        outputs = []
        laid_out: dict[int, torch.Tensor] = {}
        for output in self.plan:
            if output.source is not None:
                outputs.append(args[output.source])
            elif output.result is None:
                value = output.value
                outputs.append(concrete(value, self.bindings) if is_symbolic(value) else value)
            else:
                if output.result not in laid_out:
                    laid_out[output.result] = self._strided(results[output.result], output.like)
                found = laid_out[output.result]
                for view in output.views:
                    found = view.of(found, self.bindings)
                outputs.append(found)
        return outputs

    def _strided(self, result: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
        """The result laid out as the trace says: what was traced after it relies on that."""
        if like is None or (like.is_contiguous() and not self.bindings):
            return result
        stride = tuple(concrete(s, self.bindings) for s in like.stride())
        if stride == result.stride() or not result.numel():
            return result
        repeated = [d for d, step in enumerate(stride) if not step and result.shape[d] > 1]
        once = result
        for dim in repeated:
            # One place in memory stands for all of the dimension, and is written once.
            once = once.narrow(dim, 0, 1)
        laid = torch.empty_strided(once.shape, stride, dtype=result.dtype).copy_(once)
        return laid.expand(result.shape)


@attrs.frozen
class _Lowered:
    """Lowers the graph and compiles what comes out, in the process that compiles."""

    gm: GraphModule
    args: Sequence[Any]
    bindings: Mapping[Any, int]
    compiler: Compiler
    flags: Sequence[str] | str

    def __call__(self, key: str, directory: Path) -> None:
        try:
            from neuron_store.lowering.export import (  # noqa: PLC0415  (imports JAX, so not on a hit)
                TensorSpec,
                export,
            )
        except ImportError as error:
            raise CompileError(
                key,
                f"lowering needs {error.name}; run: pip install 'neuron-store[torch]'",
                permanent=True,
            ) from error
        specs = [
            TensorSpec(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a
            for a in self.args
        ]
        try:
            exported = export(self.gm, specs, self.bindings)
        except UnsupportedOperator as error:
            raise CompileError(
                key, f"{error.operator}: {error.reason}", compiler=_LOWERING, permanent=True
            ) from error
        graph = exported.hlo if self.compiler.name == "neuronx-cc" else exported.stablehlo
        # The adapter's own key follows from the lowered graph, and ours from what it was lowered
        # from; the files are to be named by ours.
        own: Any = self.compiler.job(graph, flags=self.flags).compile
        attrs.evolve(own, key=key)(directory)
        if self.compiler.name == "iree":
            self._try_out(key, directory)
        (directory / "graph.hlo").write_bytes(exported.hlo)

    def _try_out(self, key: str, directory: Path) -> None:
        """Refuse, before anybody else gets it, a program that IREE makes and then cannot load."""
        try:
            self.compiler.load(directory)
        except Unsupported as error:
            raise CompileError(
                key, f"a kernel: {error}", compiler=_LOWERING, permanent=True
            ) from error
        except HostUnfit:
            pass  # the flags ask for another processor's


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _refused(error: CompileError) -> tuple[str, str]:
    operator, _, reason = error.reason.partition(": ")
    return operator, reason


def _symbol_sources(inputs: Sequence[Any]) -> Sequence[tuple[Any, int, int | None]]:
    """For each symbol of the inputs' shapes one place to read it from: an input, or its size."""
    found: dict[Any, tuple[Any, int, int | None]] = {}
    for position, value in enumerate(inputs):
        if is_symbolic(value) and value.node.expr.is_Symbol:
            found.setdefault(value.node.expr, (value.node.expr, position, None))
    for position, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if is_symbolic(size) and size.node.expr.is_Symbol:
                    found.setdefault(size.node.expr, (size.node.expr, position, dim))
    return list(found.values())

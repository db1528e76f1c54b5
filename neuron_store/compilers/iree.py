"""IREE: StableHLO in, a `.vmfb` for this kind of processor out. Needs the extra `iree`.

Making a job and finding its artifact imports nothing of IREE.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from typing import TYPE_CHECKING

import attrs

from neuron_store.artifact import is_key
from neuron_store.compiler_flags import canonical_flags
from neuron_store.compilers import _hlo
from neuron_store.compilers._cpu import host_cpu
from neuron_store.compilers._graph import GraphSource, read_graph
from neuron_store.compilers._iree_target import DEVICE, DIALECT, IreeTarget, resolve_target
from neuron_store.compilers._mlir import strip_locations
from neuron_store.compilers._process import disk_full, ended, plain_environment, run_compiler, tail
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactMismatch,
    CompileError,
    ConfigError,
    HostUnfit,
    MissingExtra,
)
from neuron_store.job import CompileJob
from neuron_store.key import (
    compute_key,
    digest,
    with_extra,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from neuron_store.compilers._iree_program import IreeProgram
    from neuron_store.key import JSON

__all__ = ["GRAPH_NAME", "TARGET_NAME", "IreeCompiler", "IreeTarget"]

GRAPH_NAME = "graph.mlir"
TARGET_NAME = "target.json"
"""What the artifact needs to run, as the compiler resolved it; read again at load."""
_LOG_NAME = "iree-compile.log"
_PACKAGE = "iree-base-compiler"
_PROBE = "func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }\n"
_RESOLVED = re.compile(rb'cpu_features = "([^"]*)"')
# A status above zero is the compiler's own verdict on its input, unless the machine got in the way.
_MACHINE_TROUBLE = re.compile(
    r"Cannot allocate memory|out of memory|bad_alloc|Too many open files|"
    r"Resource temporarily unavailable",
    re.IGNORECASE,
)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@attrs.frozen
class IreeCompiler:
    """Compiles StableHLO (MLIR as text or byte code) for the processor of this kind of host."""

    driver: str = "local-task"
    """IREE's run-time driver for `load`: `local-task` uses threads, `local-sync` the caller's."""

    @property
    def name(self) -> str:
        return "iree"

    def version(self) -> str:
        """The compiler's version.

        A host that only runs artifacts has the runtime alone; both are released under one version.

        Raises:
            MissingExtra: neither is installed.
        """
        version = _installed(_PACKAGE) or _installed("iree-base-runtime")
        if version is None:
            raise MissingExtra("compiler iree", "iree", _PACKAGE)
        return version

    def job(
        self,
        graph: Path | bytes,
        *,
        flags: Sequence[str] | str = (),
        extra: Mapping[str, JSON] | None = None,
    ) -> CompileJob:
        """The job that compiles `graph`.

        Args:
            graph: StableHLO; source locations in its text are no part of the key.
            flags: for iree-compile; none is taken from the environment.
            extra: components that the graph does not hold; each gets into the key as it is.

        Raises:
            ConfigError: an unreadable graph or one that is HLO, flags that cannot be used.
            MissingExtra: IREE is not installed.
        """
        target, rest = resolve_target(flags)
        version = self.version()
        data = read_graph(graph)
        if _hlo.is_hlo(data):
            raise ConfigError(
                "the graph is a serialised HloModuleProto; compiler iree takes StableHLO (MLIR), "
                "such as export gives, and compiler neuronx-cc takes this"
            )
        sha256 = digest(strip_locations(data))
        components = with_extra(
            {
                "graph": sha256,
                "graph_format": "stablehlo",
                "compiler": self.name,
                "compiler_version": version,
                "compiler_flags": canonical_flags([*DEVICE, *rest], dialect=DIALECT),
                "target": str(target),
            },
            extra,
        )
        key = compute_key(components)
        return CompileJob(
            key=key,
            compile=_IreeCompile(key, GraphSource.of(graph, sha256), target, tuple(rest), version),
            components=components,
            executable=f"graph_{key}.vmfb",
            host={"cpu": f"{host_cpu().arch}/{host_cpu().level}"},
        )

    def load(self, path: Path) -> IreeProgram:
        """The program in the artifact directory `path`, ready to run.

        Raises:
            ArtifactCorrupt: the directory holds no program of ours, or the program is damaged.
            ArtifactMismatch: another version of IREE compiled it.
            HostUnfit: this host's processor lacks something that the program uses.
            MissingExtra: IREE's runtime is not installed.
        """
        key, file = _executable(path)
        needs = _read_target(path, key)
        runtime = _installed("iree-base-runtime")
        if runtime is None:
            raise MissingExtra("loading an IREE artifact", "iree", "iree-base-runtime")
        if needs["compiler_version"] != runtime:
            raise ArtifactMismatch(
                key, os.fspath(path), {"compiler_version": (needs["compiler_version"], runtime)}
            )
        host = host_cpu()
        remedy = f"compile it here, or for --iree-llvmcpu-target-cpu={host.level}"
        if needs["arch"] != host.arch:
            raise HostUnfit(
                key, os.fspath(path), f"{needs['arch']} and this is {host.arch}", remedy
            )
        lacking = host.lacks(frozenset(needs["features"]))
        if lacking:
            raise HostUnfit(
                key, os.fspath(path), f"processor features {', '.join(lacking)}", remedy
            )
        from neuron_store.compilers._iree_program import IreeProgram  # noqa: PLC0415  (imports IREE)

        return IreeProgram(file, key=key, driver=self.driver)


def _executable(path: Path) -> tuple[str, Path]:
    own = path / f"graph_{path.name}.vmfb"
    found = [own] if own.is_file() else sorted(path.glob("graph_*.vmfb"))
    if len(found) != 1:
        raise ArtifactCorrupt(
            path.name, os.fspath(path), f"it holds {len(found)} files graph_*.vmfb, not one"
        )
    return found[0].name.removeprefix("graph_").removesuffix(".vmfb"), found[0]


def _read_target(path: Path, key: str) -> dict[str, list[str] | str]:
    try:
        needs = json.loads((path / TARGET_NAME).read_bytes())
        texts = all(isinstance(needs[n], str) for n in ("arch", "compiler_version"))
        good = texts and all(isinstance(f, str) for f in needs["features"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        good = False
    if not good or not is_key(key):
        raise ArtifactCorrupt(
            key, os.fspath(path), f"{TARGET_NAME} does not say what the program needs"
        )
    return dict(needs)


@attrs.frozen
class _IreeCompile:
    """Fills the work directory; pickles for `spawn`."""

    key: str
    graph: GraphSource
    target: IreeTarget
    flags: tuple[str, ...]
    version: str

    def __call__(self, workdir: Path) -> None:
        program = self._program()
        data = self.graph.read(lambda d: (strip_locations(d),), key=self.key, compiler="iree")
        (workdir / GRAPH_NAME).write_bytes(strip_locations(data))
        # Relative names, and a private directory: no path of this machine gets into the program.
        self._run(workdir, [program, GRAPH_NAME, *self._options, "-o", f"graph_{self.key}.vmfb"])
        needs = {
            "arch": self.target.arch,
            "compiler_version": self.version,
            "cpu": self.target.cpu,
            "features": self._resolved_features(workdir, program),
        }
        (workdir / TARGET_NAME).write_text(json.dumps(needs, indent=1, sort_keys=True) + "\n")
        (workdir / _LOG_NAME).unlink()

    @property
    def _options(self) -> list[str]:
        return [*DEVICE, *self.target.flags, *self.flags]

    def _program(self) -> str:
        try:
            package = importlib.metadata.distribution(_PACKAGE)
        except importlib.metadata.PackageNotFoundError as error:
            raise CompileError(
                self.key,
                f"{_PACKAGE} is not installed; run: pip install 'neuron-store[iree]'",
                compiler="iree",
                permanent=True,
            ) from error
        if package.version != self.version:
            raise CompileError(
                self.key,
                f"the key is for {_PACKAGE} {self.version}, and {package.version} is installed; "
                "make the job again",
                compiler="iree",
                permanent=True,
            )
        return str(package.locate_file("iree/compiler/_mlir_libs/iree-compile"))

    def _run(self, workdir: Path, argv: list[str]) -> None:
        log = workdir / _LOG_NAME
        status = run_compiler(
            argv, cwd=workdir, env=plain_environment(), output=log, key=self.key, compiler="iree"
        )
        if status == 0:
            return
        lines = tail(log)
        full = disk_full(workdir, lines)
        raise CompileError(
            self.key,
            f"iree-compile {ended(status)}" + (f"; {full}" if full else ""),
            compiler="iree",
            status=status,
            log_tail=lines,
            permanent=full is not None or (status > 0 and _MACHINE_TROUBLE.search(lines) is None),
        )

    def _resolved_features(self, workdir: Path, program: str) -> list[str]:
        """What the target's name means to this compiler: the features it switches on."""
        probe, shown = workdir / "probe.mlir", workdir / "probe.out"
        probe.write_text(_PROBE)
        try:
            self._run(
                workdir,
                [program, probe.name, *DEVICE, *self.target.flags,
                 "--compile-to=executable-targets", "-o", shown.name],
            )  # fmt: skip
            found = _RESOLVED.search(shown.read_bytes())
        finally:
            probe.unlink(missing_ok=True)
            shown.unlink(missing_ok=True)
        if found is None:
            raise CompileError(
                self.key,
                f"iree-compile does not say which processor features {self.target} means; "
                "this version of IREE is not known here",
                compiler="iree",
                permanent=True,
            )
        switched: dict[str, bool] = {}
        for name in filter(None, found[1].decode("ascii", "replace").split(",")):
            switched[name[1:]] = name[0] == "+"
        return sorted(name for name, on in switched.items() if on)

"""neuronx-cc, the compiler of AWS Neuron: a serialised HloModuleProto in, a NEFF out.

The artifact is the directory that the Neuron stack itself would have written. Nothing here needs a
Neuron device; the compiler itself is a program on PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, NoReturn

import attrs

from neuron_store.compiler_flags import NEURONX_CC, canonical_flags, check_flags, parse_flags
from neuron_store.compilers import _hlo
from neuron_store.compilers._graph import GraphSource, read_graph
from neuron_store.compilers._neuron_target import resolve_target
from neuron_store.compilers._process import disk_full, ended, plain_environment, run_compiler, tail
from neuron_store.errors import ArtifactCorrupt, CompileError, ConfigError, Unsupported
from neuron_store.job import CompileJob
from neuron_store.key import (
    compute_key,
    digest,
    with_extra,
)
from neuron_store.neuron_layout import (
    HLO_NAME,
    MARK_NAME,
    METADATA_NAME,
    check_loadable,
    completion_mark,
    foreign_artifact,
    neff_length,
    neff_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from neuron_store.key import JSON

__all__ = ["CC_FLAGS", "LOG_NAME", "NeuronxCompiler"]

CC_FLAGS = "NEURON_CC_FLAGS"
"""Environment variable with flags that come after the caller's own."""
LOG_NAME = "log-neuron-cc.txt"
_COMPILER = "neuronx-cc"
_BUILD = ".build"
_VERSION = re.compile(r"NeuronX Compiler version\s+(\S+)")
# Ours to give, or a wrapper's; they never reach the compiler from the caller's flags.
_TAKEN_OUT = NEURONX_CC.wrapper | {"--logfile", "--output", "--target"}
_USAGE = re.compile(
    r"unrecognized arguments|invalid choice|expected one argument|usage: neuronx-cc"
)
# What the compiler, a Python program, needs to find itself. NEURON_CC_FLAGS is among the arguments.
_KEPT_VARIABLES = ("CONDA_PREFIX", "PYTHONPATH", "VIRTUAL_ENV")


@attrs.frozen
class NeuronxCompiler:
    """Compiles HLO for a Neuron platform."""

    executable: str = _COMPILER
    """A name on PATH, or a path."""
    assume_version: str | None = None
    """The compiler's version, for a host that has none and only looks artifacts up."""

    @property
    def name(self) -> str:
        return _COMPILER

    def version(self) -> str:
        """What `neuronx-cc --version` says; asked once for each program file.

        Raises:
            ConfigError: there is no such program, or it does not say.
        """
        if self.assume_version is not None:
            return self.assume_version
        program = shutil.which(self.executable)
        if program is None:
            raise ConfigError(
                f"{self.executable} is not on PATH, and its version is part of every key; install "
                "neuronx-cc, or give NeuronxCompiler(assume_version=...)"
            )
        return _version_of(program)

    def job(
        self,
        graph: Path | bytes,
        *,
        flags: Sequence[str] | str = (),
        extra: Mapping[str, JSON] | None = None,
    ) -> CompileJob:
        """The job that compiles `graph`.

        Args:
            graph: a serialised bare HloModuleProto. The directories of source files in it are
                neither compiled nor in the key; a kernel's binary counts by its content.
            flags: for neuronx-cc; those of NEURON_CC_FLAGS come after them, so that they win.
            extra: components that the graph does not hold; each gets into the key as it is.

        Raises:
            ConfigError: an unreadable graph, unusable flags, no target, no compiler.
        """
        # By themselves: one that ends without its value must not take the variable's first for it.
        check_flags(flags)
        wanted = parse_flags(flags) + parse_flags(os.environ.get(CC_FLAGS, ""))
        target = resolve_target([token for flag in wanted for token in flag.tokens])
        passed = [
            token
            for flag in wanted
            if flag.name not in _TAKEN_OUT
            and not (flag.name == "" and flag.tokens[0].endswith(NEURONX_CC.graph_suffixes))
            for token in flag.tokens
        ]
        version = self.version()
        sha256 = digest(_hlo.key_input(read_graph(graph)))
        components = with_extra(
            {
                "graph": sha256,
                "graph_format": "hlo",
                "compiler": self.name,
                "compiler_version": version,
                "compiler_flags": canonical_flags(["--framework=XLA", *passed]),
                "target": target,
            },
            extra,
        )
        key = compute_key(components)
        source = GraphSource.of(graph, sha256)
        return CompileJob(
            key=key,
            compile=_NeuronxCompile(key, source, target, tuple(passed), version, self.executable),
            components=components,
            executable=neff_name(key),
        )

    def load(self, path: Path) -> NoReturn:
        """Check the artifact in `path`; running it is the Neuron runtime's affair.

        Raises:
            ArtifactCorrupt: it is not complete, or its NEFF is damaged.
            Unsupported: it is whole, and nothing here can run it.
        """
        key, location = path.name, os.fspath(path)
        try:
            artifact = foreign_artifact(path, key)
            size = 0 if artifact is None else _neff_size(path / neff_name(key))
        except (OSError, ValueError) as error:
            raise ArtifactCorrupt(key, location, str(error)) from error
        if not size:
            raise ArtifactCorrupt(key, location, "it is not a complete entry of the Neuron stack")
        check_loadable(path, key, location)
        raise Unsupported(
            "load",
            type(self).__name__,
            f"the artifact is whole; give {location} to the Neuron runtime on a Neuron host",
        )


_versions: dict[tuple[str, int, int], str] = {}


def _version_of(program: str) -> str:
    status = os.stat(program)
    known = (program, status.st_mtime_ns, status.st_size)
    if known not in _versions:
        try:
            done = subprocess.run(  # noqa: S603  (the program the caller named)
                [program, "--version"],
                env=plain_environment(_KEPT_VARIABLES),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=120,
                check=False,
            )
            said = (done.stdout + done.stderr).decode("utf-8", "replace")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{program} --version: {error}") from error
        found = _VERSION.search(said)
        if found is None:
            raise ConfigError(
                f"{program} --version does not say its version: {said.strip()[:200]!r}; give "
                "NeuronxCompiler(assume_version=...)"
            )
        _versions[known] = found[1]
    return _versions[known]


def _neff_size(neff: Path) -> int:
    """Bytes of a whole NEFF; `ValueError` says what is wrong with it."""
    size = neff.stat().st_size
    with neff.open("rb") as file:
        length = neff_length(file.read(1024))
    if length is None:
        raise ValueError(f"{neff.name} ({size} bytes) does not start as a NEFF does")
    if length != size:
        raise ValueError(f"{neff.name} has {size} bytes, its header says {length}")
    return size


@attrs.frozen
class _NeuronxCompile:
    """Fills the work directory; pickles for `spawn`."""

    key: str
    graph: GraphSource
    target: str
    flags: tuple[str, ...]
    version: str
    executable: str

    def __call__(self, workdir: Path) -> None:
        program = self._program()
        data = self.graph.read(_hlo.key_input, key=self.key, compiler=_COMPILER)
        # The compiler litters its directory; only what is moved out of it becomes the artifact.
        build = workdir / _BUILD
        build.mkdir()
        try:
            with (build / HLO_NAME).open("wb") as file:
                file.writelines(_hlo.compiler_input(data))
            self._run(program, build)
            size = self._checked(build / neff_name(self.key))
            for name in (HLO_NAME, neff_name(self.key)):
                (build / name).rename(workdir / name)
        finally:
            if (build / LOG_NAME).is_file():
                (build / LOG_NAME).replace(workdir / LOG_NAME)
            shutil.rmtree(build, ignore_errors=True)
        (workdir / METADATA_NAME).write_text(json.dumps(self._metadata(data), indent=2))
        (workdir / MARK_NAME).write_bytes(completion_mark(size))

    def _program(self) -> str:
        program = shutil.which(self.executable)
        if program is None:
            raise self._failure(
                f"{_COMPILER} compiler binary does not exist: {self.executable} is not on PATH; "
                "install neuronx-cc",
                permanent=True,
            )
        version = _version_of(program)
        if version != self.version:
            raise self._failure(
                f"the key is for version {self.version}, and {program} is {version}; "
                "make the job again",
                permanent=True,
            )
        return program

    def _run(self, program: str, build: Path) -> None:
        # Relative names: the NEFF records where it was written, and the runtime prints that.
        argv = [
            program, "compile", HLO_NAME, "--framework", "XLA", "--target", self.target,
            "--output", neff_name(self.key), "--logfile", LOG_NAME, *self.flags,
        ]  # fmt: skip
        printed = build / "printed.txt"
        status = run_compiler(
            argv,
            cwd=build,
            env=plain_environment(_KEPT_VARIABLES),
            output=printed,
            key=self.key,
            compiler=_COMPILER,
        )
        if status == 0:
            return
        said = tail(build / LOG_NAME)
        both = f"{said}\n{tail(printed)}"
        if status > 0 and "[F137]" in both:
            reason = (
                f"forcibly killed (status {status}, [F137]), most likely by the kernel for lack of "
                "memory; free memory or run fewer compiles at once"
            )
        elif status == 70:
            reason = "internal compiler error (status 70)"
        else:
            reason = ended(status)
        full = disk_full(build, both)
        raise self._failure(
            f"{reason}; {full}" if full else reason,
            status=status,
            log_tail=said or tail(printed),
            permanent=full is not None or (status > 0 and _USAGE.search(both) is not None),
        )

    def _checked(self, neff: Path) -> int:
        try:
            return _neff_size(neff)
        except FileNotFoundError:
            reason = f"it ended well and wrote no {neff.name}"
        except ValueError as error:
            reason = f"it ended well and left a damaged executable: {error}"
        raise self._failure(reason, status=0, log_tail=tail(neff.parent / LOG_NAME))

    def _metadata(self, data: bytes) -> dict[str, JSON]:
        count = _hlo.output_count(data)
        if count is None:
            raise self._failure("the graph has no entry computation", permanent=True)
        return {
            "version": 0,
            "cache_key": self.key,
            "output_count": count,
            "unused_input_indices": [],
            "has_rng_seed_parameter": False,
            "io_map": {str(out): into for out, into in sorted(_hlo.aliased_inputs(data).items())},
        }

    def _failure(
        self,
        reason: str,
        *,
        status: int | None = None,
        log_tail: str = "",
        permanent: bool = False,
    ) -> CompileError:
        return CompileError(
            self.key,
            reason,
            compiler=_COMPILER,
            status=status,
            log_tail=log_tail,
            permanent=permanent,
        )

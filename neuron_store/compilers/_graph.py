"""The graph that a job was made from, read again when the job runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from neuron_store.errors import CompileError, ConfigError, InvalidArtifact
from neuron_store.key import digest
from neuron_store.streams import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Normalise = Callable[[bytes], Sequence[bytes | memoryview]]

__all__ = ["GraphSource", "read_graph", "read_input"]

# A serialised protobuf has at most 2 GiB; MLIR with its weights inside may have more.
_LARGEST = 8 << 30


def read_input(path: Path, what: str, limit: int) -> bytes:
    """The bytes of a regular file that somebody named: a device or a pipe might never end.

    Args:
        path: the file, or a link to it.
        what: for messages, such as `graph`.
        limit: bytes that it may have.

    Raises:
        ConfigError: it is not there, cannot be read, is no regular file, or is too large.
    """
    try:
        # Resolved: a link is as good a name as any for a file of the caller's own.
        with open(open_regular(os.path.realpath(path)), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= limit:
                return file.read()
    except InvalidArtifact as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    raise ConfigError(f"{what} {path} has {size} bytes; at most {limit} are taken")


def read_graph(graph: Path | bytes) -> bytes:
    """The graph's bytes.

    Raises:
        ConfigError: the file is not there, cannot be read, is no regular file, or is empty.
    """
    if isinstance(graph, bytes | bytearray | memoryview):
        data, name = bytes(graph), "the graph"
    else:
        name = os.fspath(graph)
        data = read_input(Path(graph), "graph", _LARGEST)
    if not data:
        raise ConfigError(f"{name} is empty; give a serialised graph")
    return data


@attrs.frozen
class GraphSource:
    """Where the graph is: in memory, or in a file that must not have changed when it is compiled.

    A file is named, not held, so that many jobs pickle small and wait cheaply.
    """

    path: str | None
    data: bytes | None = attrs.field(repr=False)
    sha256: str
    """Of the normalised bytes, as the key has it."""

    @classmethod
    def of(cls, graph: Path | bytes, sha256: str) -> GraphSource:
        """The source of `graph`, whose digest was computed already."""
        if isinstance(graph, bytes | bytearray | memoryview):
            return cls(None, bytes(graph), sha256)
        return cls(os.path.abspath(graph), None, sha256)

    def read(self, normalise: Normalise, *, key: str, compiler: str) -> bytes:
        """The graph's bytes as they are now.

        Raises:
            CompileError: the file is gone, or has changed since the key was computed.
        """
        try:
            data = self.data if self.path is None else read_graph(Path(self.path))
        except ConfigError as error:
            raise CompileError(key, str(error), compiler=compiler, permanent=True) from error
        assert data is not None
        if digest(normalise(data)) != self.sha256:
            raise CompileError(
                key,
                f"{self.path} has changed since the job was made; make the job again",
                compiler=compiler,
                permanent=True,
            )
        return data

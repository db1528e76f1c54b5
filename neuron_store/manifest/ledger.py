"""The compile-time ledger: one line for each graph that a process captured.

`$VLLM_NEURON_MANIFEST_DIR/ledger/<engine id>/<pid>.jsonl`. Lines go out by one `os.write` each, so
that one survives `os._exit` in a forked tracer, and every process has its own file. Recording is
best effort: it never raises, and does nothing at all where the variable is unset.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import stat
import threading
import time
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.manifest.engine import VISIBLE_DEVICES, engine_id
from neuron_store.manifest.shapes import input_shapes
from neuron_store.own_directory import has_own, make_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "MANIFEST_DIR",
    "LedgerLine",
    "clear_ledger",
    "ledger_directory",
    "manifest_root",
    "read_ledger",
    "record_graph",
]

logger = logging.getLogger(__name__)

MANIFEST_DIR = "VLLM_NEURON_MANIFEST_DIR"
MAX_LINE = 16 << 20
"""Bytes; a longer line is skipped on reading."""
# How long a descriptor is trusted by its flags alone. Looking at the file behind it (`fstat`) at
# each line makes the write itself dearer: once asked for, times have to be kept more finely.
_RECHECK = 0.5
# Flags that no stranger's file is opened with, so that they mark our descriptor: on a plain file
# O_NONBLOCK does nothing.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
# The environment as bytes, and the dictionary behind it where there is one: decoding the values and
# encoding the names at each line would cost as much as the write.
_DIR_KEY, _DEVICES_KEY = MANIFEST_DIR.encode(), VISIBLE_DEVICES.encode()
_environment: Mapping[bytes, bytes] = getattr(os.environb, "_data", os.environb)


def manifest_root(environ: Mapping[str, str] | None = None) -> Path | None:
    """The directory of ledgers and manifests; None when the feature is off (unset or empty).

    A leading `~` is the home directory: a shell leaves it in place in many spots.
    """
    text = (os.environ if environ is None else environ).get(MANIFEST_DIR, "")
    return Path(os.path.expanduser(text)) if text.strip() else None


def ledger_directory(root: Path, engine: str) -> Path:
    """Where the processes of one engine write."""
    return root / "ledger" / engine


@attrs.frozen
class LedgerLine:
    """One captured graph, as one process told it."""

    key: str
    rank: int
    """Relative to the writer's tensor-parallel group."""
    input_shapes: tuple[str, ...]
    compiler_flags: str
    position: int = 0
    """Of the line in its file: the order in which the writer captured its graphs."""


# Looked up once: a line costs little more than its system calls.
_monotonic, _fcntl, _access, _GETFL = time.monotonic, fcntl.fcntl, os.access, fcntl.F_GETFL


class _Writer:
    """The ledger file of the process. Starts anew in a forked child."""

    def __init__(self) -> None:
        # A signal's handler may record while this thread does: that must end, if without its line.
        self.lock = threading.RLock()
        self.busy = False
        self.pid = -1
        self.descriptor = -1
        self.folder = -1
        self.name = b""
        self.mark = -1
        self.identity = self.folder_identity = (0, 0)
        self.source: tuple[bytes | None, bytes | None] = (None, None)
        self.checked = float("-inf")
        self.begun: set[str] = set()
        self.torn = False
        self.complained = False

    def reset(self) -> None:
        """After fork: the parent's lock may be held for ever, and its file is not ours."""
        complained = self.complained
        if _is_at(self.descriptor, self.identity):
            os.close(self.descriptor)
        if _is_at(self.folder, self.folder_identity):
            os.close(self.folder)
        self.__init__()  # type: ignore[misc]  # the object stays: `record_graph` refers to it
        self.complained = complained

    def write(self, line: bytes, source: tuple[bytes | None, bytes | None]) -> None:
        # Without the lock, which would cost a third of the write: lines of one O_APPEND write do
        # not interleave, and the descriptor's number stays while the file behind it is replaced.
        # Without a look at the pid: `reset` runs in every child that can run Python. With one at
        # the descriptor, though, which `os.closerange` may have left to a stranger, and at the
        # name, which the emitter takes away.
        now = _monotonic()
        try:
            fresh = (
                now - self.checked < _RECHECK
                and self.source == source
                and not self.torn
                and _fcntl(self.descriptor, _GETFL) == self.mark
                # Below the directory's descriptor: the kernel looks one name up, and not ten. Of a
                # stranger's directory the worst is that it has no such name.
                and _access(self.name, 0, dir_fd=self.folder)
            )
        except OSError:
            fresh = False
        if not fresh:
            line = self._prepare(source, line)
            self.checked = now
        if os.write(self.descriptor, line) != len(line):
            # A full disk cut it off; that must not swallow the next line too.
            self.torn = True
            raise OSError(errno.ENOSPC, "a ledger line was cut off")
        self.torn = False

    def _prepare(self, source: tuple[bytes | None, bytes | None], line: bytes) -> bytes:
        with self.lock:
            if self.busy:
                raise RuntimeError("a signal's handler recorded while its thread did")
            self.busy = True
            try:
                if self.pid != os.getpid() or self.source != source or not self._still_ours():
                    self._open(source)
                return b"\n" + line if self.torn else line
            finally:
                self.busy = False

    def _still_ours(self) -> bool:
        """Whether both are as they were, and the file has a name: the emitter takes it away."""
        return (
            _is_at(self.descriptor, self.identity)
            and _is_at(self.folder, self.folder_identity)
            and os.fstat(self.descriptor).st_nlink > 0
        )

    def _open(self, source: tuple[bytes | None, bytes | None]) -> None:
        pid = os.getpid()
        if self.pid != pid:
            self.begun.clear()
            self.pid = pid
        directory, devices = source
        root = manifest_root({MANIFEST_DIR: os.fsdecode(directory or b"")})
        assert root is not None
        engine = engine_id({VISIBLE_DEVICES: os.fsdecode(devices or b"")})
        folder = ledger_directory(root, engine)
        make_own(os.fspath(folder))
        path = os.fspath(folder / f"{pid}.jsonl")
        # A pid comes back: what an earlier run left under it is none of this run's.
        stale = 0 if path in self.begun else os.O_TRUNC
        descriptor = os.open(
            path,
            _FLAGS | os.O_CREAT | os.O_CLOEXEC | stale,
            0o644,
        )
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.begun.add(path)
        self.descriptor = _in_place_of(self.descriptor, self.identity, descriptor)
        self.identity = _identity(self.descriptor)
        self.mark = _fcntl(self.descriptor, _GETFL)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.folder = _in_place_of(self.folder, self.folder_identity, opened)
        self.folder_identity = _identity(self.folder)
        self.name = os.fsencode(os.path.basename(path))
        self.source = source
        self.torn = False


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_at(descriptor: int, identity: tuple[int, int]) -> bool:
    """Whether a descriptor was neither closed by others nor given to another file."""
    try:
        return descriptor >= 0 and _identity(descriptor) == identity
    except OSError:
        return False


def _in_place_of(old: int, identity: tuple[int, int], new: int) -> int:
    """The new file under the old number, where that is still ours: a thread may be writing."""
    if not _is_at(old, identity):
        return new
    os.dup2(new, old, inheritable=False)
    os.close(new)
    return old


_writer = _Writer()
os.register_at_fork(after_in_child=_writer.reset)


def record_graph(
    key: str,
    rank: int | Callable[[], int],
    inputs: Iterable[Any] | Callable[[], Iterable[Any]],
    compiler_flags: str | Sequence[str] | Callable[[], str | Sequence[str]],
) -> None:
    """Write one line for a graph that this process captured. Never raises.

    Where computing an argument costs something, pass a callable: it is called only when the
    feature is on.

    Args:
        key: the graph's hash, the name of its directory in the cache.
        rank: the writer's rank within its tensor-parallel group.
        inputs: traced inputs (anything with a `shape`), tuples of sizes, or strings as they are to
            stand in the manifest.
        compiler_flags: a command line, or its tokens, which are quoted for a shell.
    """
    directory = _environment.get(_DIR_KEY)
    if not directory or directory.isspace():
        return
    try:
        try:
            line = _encode(
                key,
                rank() if callable(rank) else rank,
                inputs() if callable(inputs) else inputs,
                compiler_flags() if callable(compiler_flags) else compiler_flags,
            )
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            # What is not ours may raise SystemExit. Only here: elsewhere it comes from a signal.
            raise RuntimeError(type(error).__name__) from error
        _writer.write(line, (directory, _environment.get(_DEVICES_KEY)))
    except Exception as error:  # noqa: BLE001  (a ledger must never break a compile)
        if not _writer.complained:
            _writer.complained = True
            logger.warning(
                "the compile ledger cannot be written, the manifest will miss graphs (said once): "
                "%s: %s",
                type(error).__name__,
                error,
            )


# The same flags stand in nearly every line of a run.
_flags_json = functools.lru_cache(maxsize=64)(encode_basestring_ascii)


def _encode(
    key: str, rank: int, inputs: Iterable[Any], compiler_flags: str | Sequence[str]
) -> bytes:
    # Assembled by hand: `json.dumps` takes four times as long as the write.
    if type(compiler_flags) is not str:
        import shlex  # noqa: PLC0415  (callers that give text need none)

        compiler_flags = shlex.join(compiler_flags)
    number = rank if type(rank) is int else f"{rank:d}"
    return (
        f'{{"key": {encode_basestring_ascii(key)}, "rank": {number}, '
        f'"input_shapes": {_text_list(inputs)}, '
        f'"compiler_flags": {_flags_json(compiler_flags)}}}\n'
    ).encode()


# Changes each byte that JSON text would not hold as it is, other than a quote.
_PLAIN = bytes(c if 0x20 <= c < 0x7F and c != 0x5C else c ^ 0x80 for c in range(256))


def _text_list(values: Iterable[Any]) -> str:
    if type(values) is not list:
        values = list(values)
    try:
        joined = '", "'.join(values)
    except TypeError:
        values = input_shapes(values)
        joined = '", "'.join(values)
    # Sizes need no escaping, and to see that is cheaper than to escape: no quotes but the
    # separators', and a table that leaves the bytes as they are.
    if values and joined.isascii() and joined.count('"') == 2 * len(values) - 2:
        raw = joined.encode()
        if raw.translate(_PLAIN) is raw:
            return f'["{joined}"]'
    return json.dumps(values)


def clear_ledger(root: Path, engine: str) -> None:
    """Remove what was recorded under one engine's id; its neighbours' and `ledger/` stay.

    To be called by local rank 0 before the first capture where a crashed run may have left lines,
    and by the emitter afterwards. Raises OSError.
    """
    import shutil  # noqa: PLC0415  (once in a run)

    directory = ledger_directory(root, engine)
    # What this process records from now on belongs into a new file.
    _writer.checked = float("-inf")
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass


def read_ledger(directory: Path, unread: list[str] | None = None) -> Iterator[LedgerLine]:
    """The lines of one engine's processes, file by file in the order of their names.

    A torn last line and whatever else is no ledger line are skipped, and said in the log. So are
    links, pipes and devices, and a file that cannot be read to its end, whose name is added to
    `unread`.

    Raises:
        OSError: something else is in place of the directory, or it cannot be listed.
    """
    from neuron_store.errors import InvalidArtifact  # noqa: PLC0415  (a compile reads no ledger)

    if not has_own(os.fspath(directory)):
        return
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".jsonl"))
    except FileNotFoundError:
        return
    for name in names:
        path = directory / name
        try:
            yield from _read_file(path)
        except InvalidArtifact as error:
            # Not unread: no later emit could read it either, so the ledger would stay for ever.
            # And no line of ours is lost with it: `record_graph` refuses to write to such a thing.
            logger.warning("ledger %s skipped: %s", path, error.reason)
        except OSError as error:
            logger.warning("ledger %s cannot be read: %s", path, error)
            if unread is not None:
                unread.append(name)


def _read_file(path: Path) -> Iterator[LedgerLine]:
    from neuron_store.streams import open_regular  # noqa: PLC0415  (a compile reads no ledger)

    position = skipped = 0
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            while raw := stream.readline(MAX_LINE):
                position += 1
                line = parse_line(raw, position) if raw.strip() else None
                if line is not None:
                    yield line
                elif raw.strip():
                    skipped += 1
    finally:
        if skipped:
            logger.warning("ledger %s: %d torn or foreign lines skipped", path, skipped)


def parse_line(raw: bytes, position: int = 0) -> LedgerLine | None:
    """One line, or None when it is not one of the ledger's."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    key, rank = value.get("key"), value.get("rank")
    shapes, flags = value.get("input_shapes"), value.get("compiler_flags")
    if (
        not isinstance(key, str)
        or type(rank) is not int
        or not isinstance(shapes, list)
        or not all(isinstance(shape, str) for shape in shapes)
        or not isinstance(flags, str)
    ):
        return None
    return LedgerLine(key, rank, tuple(shapes), flags, position)

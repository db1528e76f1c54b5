"""What no input may do: write or connect outside of its root, run on, or have its secrets told."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "S3CRETxyzzy"
"""Stands in the seeds wherever a credential could stand."""
CPU_SECONDS = 5.0
MAX_TOLD = 16 << 10
"""Characters of an error's text."""


class Broken(BaseException):
    """A promise was broken. No `Exception`: nothing that is under test can catch it."""


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.rename": 2,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
}
_FORBIDDEN = frozenset(
    {"socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
)
_watching = False
# Those of earlier tests too: a thread may still put down there what it noted.
_roots: set[str] = set()


def _outside(path: Any) -> bool:
    if isinstance(path, int):
        return False
    name = os.fsdecode(path)
    if not os.path.isabs(name):
        # By a directory's descriptor, or below the current directory, which is the root.
        return f"{os.path.normpath(name)}/".startswith("../")
    if name == os.devnull or "__pycache__" in name:
        return False
    return not f"{os.path.normpath(name)}/".startswith(tuple(_roots))


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event == "open":
        path, mode, flags = args
        written = flags & _WRITES if isinstance(flags, int) else "r" not in (mode or "r")
        if written and path is not None and _outside(path):
            raise Broken(f"opened for writing: {path!r}")
    elif event in _CHANGES:
        for path in args[: _CHANGES[event]]:
            if _outside(path):
                raise Broken(f"{event} of {path!r}")
    elif event in _FORBIDDEN:
        raise Broken(f"{event} {args!r:.200}")


class _Told(logging.Handler):
    """Formats every record, as a program that logs would, and keeps the text."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What neuron_store logs meanwhile, at every level."""
    logger = logging.getLogger("neuron_store")
    handler, level, propagate = _Told(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextlib.contextmanager
def confined(root: str) -> Iterator[None]:
    """Raise `Broken` where something outside of `root` would be changed, or time runs out."""
    global _watching  # noqa: PLW0603  (a hook of the whole process, which cannot be removed)
    if not _roots:
        sys.addaudithook(_hook)
    _roots.add(f"{root}/")

    def too_long(*_: object) -> None:
        raise Broken(f"took more than {CPU_SECONDS:g} s of the processor")

    before = signal.signal(signal.SIGPROF, too_long)
    # Of the processor's time: a busy machine breaks no promise.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    _watching = True
    try:
        yield
    finally:
        _watching = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _alone(error: BaseException) -> BaseException:
    """Without what led to it: Dask teaches pickle to take that along, cattrs's errors as well."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def check_told(error: BaseException, *, secret: bool) -> None:
    """Whether an error's text is short, and tells no secret; whether it travels."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if len(text) > MAX_TOLD:
            raise Broken(f"{type(seen).__name__} with {len(text)} characters: {text[:100]}")
        if secret and SECRET in text:
            raise Broken(f"{type(seen).__name__} tells the secret: {text[:300]}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    if str(pickle.loads(pickle.dumps(_alone(error)))) != str(error):
        raise Broken(f"{type(error).__name__} does not survive pickling")


def check_logged(texts: list[str], *, secret: bool) -> None:
    """Whether the log tells no secret."""
    for text in texts:
        if secret and SECRET in text:
            raise Broken(f"the log tells the secret: {text[:300]}")


__all__ = ["SECRET", "Broken", "check_logged", "check_told", "confined", "listening"]

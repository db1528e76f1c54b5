"""Files that a command writes because somebody named them."""

from __future__ import annotations

import os
import stat
import uuid
from typing import TYPE_CHECKING

from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["write_named"]


def write_named(path: Path, data: bytes, *, sources: Iterable[Path] = ()) -> None:
    """Write a file whole: a reader sees the old one or the new one, and a link stays a link.

    What is no file (a pipe, `/dev/stdout`, another device) is written to.

    Args:
        path: by whichever name.
        data: all of it.
        sources: files that it was made from, which are not to be written over.

    Raises:
        ConfigError: it cannot be written, or is a source.
    """
    for source in sources:
        if path.is_file() and source.is_file() and os.path.samefile(path, source):
            raise ConfigError(f"{path} is what is being read; choose another for -o")
    try:
        try:
            there = os.stat(path)
        except FileNotFoundError:
            there = None
        if there is not None and not stat.S_ISREG(there.st_mode):
            with open(path, "wb") as file:
                file.write(data)
            return
        target = os.path.realpath(path)
        staged = f"{os.path.dirname(target)}/.{os.path.basename(target)}.{uuid.uuid4().hex}.tmp"
        try:
            with open(staged, "xb") as file:
                file.write(data)
            os.replace(staged, target)
        except BaseException:
            if os.path.lexists(staged):
                os.unlink(staged)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be written: {reason}; choose another") from error

"""Warnings that a process gives once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

__all__ = ["warn_once"]

_told: set[str] = set()


def warn_once(log: logging.Logger, message: object) -> None:
    """Log a warning unless this process has logged the same one."""
    text = str(message)
    if text not in _told:
        _told.add(text)
        log.warning("%s", text)

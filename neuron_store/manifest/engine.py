"""The engine's identity: the window of Neuron cores that it sees."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NO_DEVICE", "VISIBLE_DEVICES", "engine_id", "parse_visible_devices"]

logger = logging.getLogger(__name__)

VISIBLE_DEVICES = "NEURON_VISIBLE_DEVICES"
NO_DEVICE = "nodev"
_PART = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?\Z")
# The id is asked for at every ledger line; the same text is parsed, and complained about, once.
_known: dict[str, str] = {"": NO_DEVICE}


def parse_visible_devices(text: str) -> tuple[int, int] | None:
    """First and last device of a list such as `0-7`, `0,1,2` or `0-3,8-11`; None when empty.

    Raises:
        ValueError: it is not such a list.
    """
    if not text.strip():
        return None
    spans: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _PART.match(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()[:40]!r} is neither a device number nor a range")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(f"the range {part.strip()!r} runs backwards")
        spans.append((low, high))
    return spans[0][0], spans[-1][1]


def engine_id(environ: Mapping[str, str] | None = None) -> str:
    """`dev{first}_{last}` over `NEURON_VISIBLE_DEVICES`, `nodev` when no device is visible.

    Ask late: with data parallelism each engine narrows the variable when it starts its devices.
    A value that is no list of devices gives `nodev` and one warning.
    """
    text = (os.environ if environ is None else environ).get(VISIBLE_DEVICES, "")
    name = _known.get(text)
    if name is None:
        try:
            span = parse_visible_devices(text)
        except ValueError as error:
            logger.warning(
                "%s=%.80r: %s; write 0-7 or 0,1,2; the engine is called %s",
                VISIBLE_DEVICES,
                text,
                error,
                NO_DEVICE,
            )
            span = None
        name = NO_DEVICE if span is None else f"dev{span[0]}_{span[1]}"
        _known[text] = name
    return name

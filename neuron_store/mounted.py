"""Whether a shared tier that is a directory of this machine is there at all."""

from __future__ import annotations

import os

from neuron_store.errors import TierError

__all__ = ["require_mounted"]


def require_mounted(location: str) -> None:
    """Refuse a share that is not mounted: that nothing is damaged in it says nothing.

    Not for the local tier, nor for what writes: both make the directory where it is missing.

    Args:
        location: the tier's; anything but an absolute path is no directory of this machine.

    Raises:
        TierError: it is a directory of this machine that does not exist.
    """
    if not os.path.isabs(location):
        return
    try:
        os.stat(location)
    except FileNotFoundError:
        raise TierError(
            location,
            "find",
            "the directory does not exist; mount the share, make it where it belongs "
            f"(mkdir -p {location}), or name another tier",
        ) from None
    except OSError:
        pass  # whatever is asked of it will tell

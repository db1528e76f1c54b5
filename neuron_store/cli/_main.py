"""The entry point, before anything else is imported: an early Ctrl-C must be quiet too."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with its status."""
    try:
        from neuron_store.cli.app import run  # noqa: PLC0415  (inside the try: see above)

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    if status == 130 and threading.active_count() > 1:
        # Transfers in threads would be waited for; each may be cut off anywhere.
        os._exit(status)
    sys.exit(status)

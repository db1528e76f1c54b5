"""The entry point, before anything else is imported: an early Ctrl-C must be quiet too."""

from __future__ import annotations

import io
import os
import sys
import threading

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with its status."""
    _have_streams()
    try:
        from neuron_store.cli.app import run  # noqa: PLC0415  (inside the try: see above)

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    except SystemExit as stopped:
        if stopped.code != 143:
            raise
        status = 143
    if status in {130, 143} and threading.active_count() > 1:
        # Transfers in threads would be waited for; each may be cut off anywhere.
        os._exit(status)
    sys.exit(status)


def _have_streams() -> None:
    """Put the null device where a standard stream is closed (`>&-`): the work is still wanted."""
    # Its number too, else the next file opened gets it, and what is meant for the stream.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (for good)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (for good)
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED: without a buffer a write that is cut short (a full disk, a pipe whose
        # reader left) loses the rest, and says nothing.
        sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115  (for good)

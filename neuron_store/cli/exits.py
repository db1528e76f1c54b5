"""Which exit status an error is. Here and nowhere else.

0 yes, 1 an honest no (missing, corrupt, not fit, could not be done), 2 usage or settings,
130 interrupted, 141 nobody reads our output any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_store.errors import ConfigError, InvalidKey, ReadOnlyTier, Unsupported

if TYPE_CHECKING:
    from neuron_store.errors import NeuronStoreError

__all__ = ["INTERRUPTED", "NO", "PIPE_CLOSED", "USAGE", "YES", "exit_status"]

YES = 0
NO = 1
USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

# What the caller has to put right in the command or the settings before another try can help.
_CALLERS = (ConfigError, InvalidKey, ReadOnlyTier, Unsupported)


def exit_status(error: NeuronStoreError) -> int:
    """2 for what the command line or the settings got wrong, 1 for everything else."""
    return USAGE if isinstance(error, _CALLERS) else NO

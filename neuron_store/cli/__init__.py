"""The command `neuron-store`. `docs/cli.md` is its reference."""

from __future__ import annotations

from neuron_store.cli._main import main

__all__ = ["main"]

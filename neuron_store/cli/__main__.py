"""`python -m neuron_store.cli`, where the script is not on the PATH."""

from __future__ import annotations

from neuron_store.cli._main import main

if __name__ == "__main__":
    main()

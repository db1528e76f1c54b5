"""Apart from the tests, so that a spawned child imports this and no more."""

import os


def write_many(number: int, count: int) -> None:
    from neuron_store.manifest.ledger import record_graph

    for turn in range(count):
        record_graph(f"{number}-{turn}", number % 8, ["4,", "4, 2048"] * 10, "--framework XLA")
    os._exit(0)

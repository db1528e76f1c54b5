"""Many processes, three tiers, and whatever may go wrong, for a given time.

    python -m benchmarks.soak --seconds 900 --seed 1

Sixteen workers on four "nodes" (a local tier each) share a directory and an S3 server behind a
proxy that drops, delays and garbles. They get, promote, fetch, delete, collect and repair; some are
killed and started anew, some stopped for seconds. At the end the journal of all processes must
explain everything. Exit status 1 when it does not. The plan (who does what in which order, which
fault comes next, whom the signals hit) follows from the seed; how it interleaves does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile


def cli() -> None:
    parser = argparse.ArgumentParser(description="Soak neuron_store; exit 1 on any finding.")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--grace", type=float, default=8.0, help="seconds, on every tier")
    parser.add_argument("--server", choices=["moto", "seaweed"], default="moto")
    parser.add_argument("--keep", help="an empty directory, kept, to look at afterwards")
    chosen = parser.parse_args()
    # Not before: every worker imports this module, which is its main one.
    from benchmarks.soak_run import soak

    folder = chosen.keep or tempfile.mkdtemp(prefix="soak.")
    os.makedirs(folder, exist_ok=True)
    try:
        found = soak(
            chosen.seconds,
            chosen.seed,
            workers=chosen.workers,
            keys=chosen.keys,
            grace=chosen.grace,
            kind=chosen.server,
            folder=folder,
        )
    finally:
        if chosen.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    cli()

"""`python -m tests.fuzz --seconds N [--target T]`: mutates valid input and gives it to readers.

Two processes; ends with status 1 when an input broke a promise.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.running import fuzz, save
from tests.fuzz.targets import TARGETS


def main() -> int:
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="in all, not for each target")
    parser.add_argument("--target", action="append", choices=names, help="may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="another one tries other inputs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="add to tests/fuzz/corpus")
    given = parser.parse_args()
    targets = [target for target in TARGETS if target.name in (given.target or names)]
    found = fuzz(targets, given.seconds, processes=given.processes, seed=given.seed)
    print(f"{'target':<20}{'executions':>12}{'outcomes':>10}{'slowest ms':>12}{'findings':>10}")
    for target in targets:
        each = found[target.name]
        print(
            f"{target.name:<20}{each.executions:>12,}{len(each.outcomes):>10}"
            f"{each.slowest * 1e3:>12.1f}{len(each.findings):>10}"
        )
        if given.save:
            save(target, each)
    findings = [finding for each in found.values() for finding in each.findings.values()]
    for finding in findings:
        print(f"\n{finding.target}: {finding.what}\n  input: {finding.data[:400]!r}")
    total = sum(each.executions for each in found.values())
    print(f"\n{total:,} executions, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

"""Loads in the sleep-mode pool, stock and patched in turn, on the virtual device.

For each case of sleep_load.py, the table has

- the most that the device lends, as a multiple of the most that tensors hold, on a
  device of 1.05 times the latter;
- the time of the load, as a multiple of stock's, on a device with memory to spare.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from bench.virtual import SITES, recorded, results
from scripts.commands import command
from scripts.release import Base

CASES = ("churn", "growing", "experts", "nvfp4", "dense")
SEGMENT = 2 << 20


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("cases", nargs="*", default=CASES)


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)

    def load(case: str, site: str, memory: int) -> dict[str, Any]:
        *_, last = results(base, site, {"memory": memory}, "sleep_load", case)
        return last

    print("| case | needed, MiB | stock | peak/needed | patched | peak/needed | time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in args.cases:
        seconds: dict[str, list[float]] = {site: [] for site in SITES}
        for _ in range(args.rounds):
            for site, times in seconds.items():
                ample = load(case, site, 80 << 30)
                times.append(ample["seconds"])
        needed = ample["needed"]  # of ours: the last
        row = [case, str(needed >> 20)]
        for site in SITES:
            result = load(case, site, needed * 105 // 100 // SEGMENT * SEGMENT)
            row += [result["outcome"], f"{result['peak'] / needed:.3f}"]
        medians = [statistics.median(times) for times in seconds.values()]
        print("| " + " | ".join([*row, f"{medians[1] / medians[0]:.3f}"]) + " |")
        sys.stdout.flush()
    print(f"\n{recorded(args.root)}")


if __name__ == "__main__":
    command(main)

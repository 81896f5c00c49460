"""Cycles of sleep and wake-up, patched beside stock, in turn, on the virtual device.

Prints a Markdown table. A pair is a process of either: the first cycle, and the median
of those after it. Ratios are of the processor time of sleep and wake-up together. Host
memory and calls of the device are the same in each run.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from bench.virtual import SITES, recorded, results
from scripts.commands import command
from scripts.release import Base

GIB = 1 << 30
DEVICE = {"memory": 16 * GIB, "context": 300 << 20}
HALVES = ("sleep", "wake")
Cycles = list[dict[str, Any]]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=5, help="of processes")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--gib", type=float, nargs="+", default=[2.0])
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pages", nargs="+", default=["huge", "small"])


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    names = ["GiB", "level", "pages", "cycle", "stock, s", "patched, s", "ratio"]
    names += ["range", "pairs", "host, MiB: stock", "patched"]
    names += ["calls: stock", "patched"]
    print(f"| {' | '.join(names)} |")
    print(f"| {' | '.join(['---'] * len(names))} |")
    for gib in args.gib:
        for level in args.levels:
            for pages in args.pages:
                case = {"bytes": int(gib * GIB), "huge_pages": pages == "huge"}
                case |= {"orders": [level] * args.cycles}
                found: dict[str, list[Cycles]] = {site: [] for site in SITES}
                for turn in range(args.pairs):
                    for site in SITES if turn % 2 else reversed(SITES):
                        _, *cycles = results(
                            base, site, DEVICE, "sleep_cycle", json.dumps(case)
                        )
                        found[site].append(cycles)
                for name, part in (("first", slice(1)), ("later", slice(1, None))):
                    theirs, ours = (found[site] for site in SITES)
                    row = compared(theirs, ours, part)
                    cells = [f"{gib:g}", level, pages, name, *row]
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"\n{recorded(args.root)}")


def compared(theirs: list[Cycles], ours: list[Cycles], part: slice) -> list[str]:
    before, after = (
        [median(total(c, "processor") for c in cycles[part]) for cycles in pairs]
        for pairs in (theirs, ours)
    )
    ratios = [mine / other for other, mine in zip(before, after, strict=True)]
    last = [pairs[-1][part][-1] for pairs in (theirs, ours)]
    return [
        f"{median(before):.2f}",
        f"{median(after):.2f}",
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        str(len(ratios)),
        *(str(cycle["sleep"]["host"] >> 20) for cycle in last),
        *(" + ".join(str(calls(cycle[half])) for half in HALVES) for cycle in last),
    ]


def total(cycle: dict[str, Any], what: str) -> float:
    return float(sum(cycle[half][what] for half in HALVES))


def calls(half: dict[str, Any]) -> int:
    return sum(half["calls"].values())


if __name__ == "__main__":
    command(main)

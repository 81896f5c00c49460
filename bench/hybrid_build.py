"""What building a hybrid's metadata costs the host, patched compared with stock.

Batches are prefills of prompts of 16 tokens, on the virtual device. A pair is a process
of either: the least processor time of its builds. Prints a Markdown table: medians over
the pairs, the quartiles of their ratio, and launches, which are the same in each run.
"Room" is the reserve beyond the profiled prefill: the more, the fewer groups.
"""

from __future__ import annotations

import argparse
import json
from statistics import median, quantiles
from typing import Any

from bench.virtual import HOOKS, SITES, results
from scripts.commands import command
from scripts.release import Base

GIB = 1 << 30
DEVICE = {"memory": 16 * GIB}
CASES = [("triton", 0), ("flashinfer", 0), ("mamba2", 0)]
CASES += [("flashinfer", GIB), ("mamba2", GIB)]
PROMPTS = (64, 256, 1024)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=8, help="of processes")
    parser.add_argument("--builds", type=int, default=20, help="of a process")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    cases: list[dict[str, Any]] = [
        {"layer": layer, "room": room, "prompts": prompts}
        for layer, room in CASES
        for prompts in PROMPTS
    ]
    argument = json.dumps({"cases": cases, "builds": args.builds})
    found: dict[str, list[list[dict[str, Any]]]] = {site: [] for site in SITES}
    for _ in range(args.pairs):
        for site in SITES:
            of_cases = results(
                base, site, DEVICE, "hybrid_build", argument, config=HOOKS
            )
            found[site].append(list(of_cases))
    names = ["kernels", "room, GiB", "prompts", "groups", "stock, ms", "patched, ms"]
    names += ["ratio", "quartiles", "pairs", "launches, stock", "launches, patched"]
    print(f"| {' | '.join(names)} |")
    print(f"| {' | '.join(['---'] * len(names))} |")
    for i, case in enumerate(cases):
        theirs, ours = ([turn[i] for turn in found[site]] for site in SITES)
        cells = [case["layer"], case["room"] // GIB, case["prompts"]]
        print(f"| {' | '.join(map(str, cells + compared(theirs, ours)))} |")


def compared(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[object]:
    before, after = (
        [result["milliseconds"] for result in results] for results in (theirs, ours)
    )
    ratios = [mine / other for other, mine in zip(before, after, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return [
        ours[-1]["groups"],
        f"{median(before):.2f}",
        f"{median(after):.2f}",
        f"{median(ratios):.2f}",
        f"{low:.2f} to {high:.2f}",
        len(ratios),
        theirs[-1]["kernels"],
        ours[-1]["kernels"],
    ]


if __name__ == "__main__":
    command(main)

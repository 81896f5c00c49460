"""Loads in exactly what was requested, on the virtual device: official and ours.

Another process holds all else. Ours has what it sets aside for fragmentation by
default; --buffers tells what each load needs instead. The table says how many die, in
how many steps PyTorch gives back pages to go on, and how many, as the device counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench.scenarios.loads import CASES, environment
from bench.scenarios.mixed_load import CALLS
from bench.virtual import HOOKS, results
from scripts.commands import Problem, command
from scripts.release import Base

MIB = 1 << 20
MORE = 1 << 60  # than was tried
DEVICE = {"memory": 48 << 30}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=4, help="loads of each case")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--buffers",
        type=int,
        nargs="+",
        help="MiB to try: what each load needs of them",
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    if unknown := set(args.cases) - CASES.keys():
        raise Problem(f"no such case: {', '.join(unknown)}; there are {list(CASES)}")
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))

    def measure(name: str, site: str, buffers: list[int | None]) -> dict[str, Any]:
        argument = json.dumps(CASES[name] | {"seeds": seeds, "buffers": buffers})
        variables = environment(name)
        *_, last = results(base, site, DEVICE, "mixed_load", argument, variables, HOOKS)
        return last

    header = (
        "case", "activations, MiB", "official: die", "set aside, MiB",
        "of the KV cache", "ours: die", "steps that give back", "their tokens",
        "pages mapped, unmapped in each",
    ) + ("needed, MiB",) * bool(args.buffers)  # fmt: skip
    print("| " + " | ".join(header) + " |")
    print("| --- " * len(header) + "|")
    for name in args.cases or CASES:
        official = measure(name, "official", [0])
        ours = measure(name, "envelope", args.buffers or [None])
        print("| " + " | ".join([name, *row(official, ours)][: len(header)]) + " |")
        sys.stdout.flush()


def row(official: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    needed: dict[int, int] = {}
    for run in ours["runs"]:
        needed[run["seed"]] = run["buffer"] if run["outcome"] == "served" else MORE
    set_aside = ours["set_aside"]
    needs = sorted(needed.values())
    served = [run for run in ours["runs"] if run["outcome"] == "served"]
    died = sum(run["outcome"] != "served" for run in official["runs"])
    steps = sum(run["steps"] for run in served)
    # The tokens computed, then how often each of CALLS was made.
    mapped, unmapped = (1 + list(CALLS).index(call) for call in ("map", "unmap"))
    retried = [step for run in served for step in run["asked"] if step[unmapped]]
    tokens = [step[0] for step in retried]

    def mean(column: int) -> str:
        return f"{sum(step[column] for step in retried) / len(retried):.0f}"

    return [
        str(ours["activations"] // MIB),
        f"{died} of {len(official['runs'])}",
        f"{set_aside / MIB:.0f}",
        f"{100 * set_aside / (ours['available'] + set_aside):.2f} %",
        f"{sum(need > set_aside for need in needs)} of {len(needs)}",
        f"{len(retried)} of {steps}",
        f"{min(tokens)} to {max(tokens)}" if tokens else "",
        f"{mean(mapped)}, {mean(unmapped)}" if retried else "",
        " ".join("more" if need == MORE else str(need // MIB) for need in needs),
    ]


if __name__ == "__main__":
    command(main)

"""Loads in exactly the budget, on the virtual device: stock and patched.

Another process holds all else. Patched has its default reserve for fragmentation;
--buffers measures the need of each load instead. The table says how many die, in
how many steps PyTorch gives back pages to go on, and how many, as the device counts.

With --alone nobody holds anything: memory of the process in the end and at most, and
driver calls of its steps, for the first and the last half of them.

The second table has the calls of a step by the tokens that it computes, and the time
that the model below gives them.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench.scenarios.loads import CASES, environment
from bench.scenarios.mixed_load import CALLS
from bench.virtual import HOOKS, recorded, results
from scripts.commands import Problem, command
from scripts.release import Base

MIB = 1 << 20
MORE = 1 << 60  # than was tried
DEVICE = {"memory": 48 << 30}
SIZES = (256, 2048, 1 << 30)  # tokens of a step, at most
# Microseconds. The driver's virtual memory calls: vAttention (ASPLOS 2025), "latency of
# CUDA APIs", pages of 2 MiB; PyTorch's allocator says that a page of 20 MiB takes as
# long. malloc and free: the sum of those calls. Synchronized calls wait for the kernels
# before them, which no device here has: none of that is in the model.
MICROSECONDS = {
    "malloc": 71,
    "free": 58,
    "create": 29,
    "map": 2,
    "set access": 38,
    "unmap": 34,
    "release": 23,
    "synchronize": 0,
}
ALONE = (
    "case", "stock: peak, MiB", "held", "calls, first half", "last half",
    "patched: peak, MiB", "held", "calls, first half", "last half",
)  # fmt: skip
REQUESTED = (
    "case", "activations, MiB", "stock: OOM", "buffer, MiB", "of the KV cache",
    "patched: OOM", "steps that remap", "their tokens",
    "pages mapped, unmapped per step",
)  # fmt: skip
STEPS = ("case", "vLLM", "tokens", "steps", *CALLS, "ms per step", "of the worst")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=4, help="loads of each case")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of each load, at least")
    parser.add_argument("--alone", action="store_true", help="nothing else is held")
    parser.add_argument(
        "--buffers",
        type=int,
        nargs="+",
        help="MiB to try: the smallest that each load needs",
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    if unknown := set(args.cases) - CASES.keys():
        raise Problem(f"no such case: {', '.join(unknown)}; there are {list(CASES)}")
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))
    common = {"seeds": seeds, "steps": args.steps, "alone": args.alone}

    def measure(name: str, site: str, buffers: list[int | None]) -> dict[str, Any]:
        argument = json.dumps(CASES[name] | common | {"buffers": buffers})
        variables = environment(name)
        *_, last = results(base, site, DEVICE, "mixed_load", argument, variables, HOOKS)
        return last

    header: tuple[str, ...] = ALONE if args.alone else REQUESTED
    header += ("needed, MiB",) * bool(args.buffers)
    print_header(header)
    steps = []
    for name in args.cases or CASES:
        official = measure(name, "official", [0])
        ours = measure(name, "envelope", args.buffers or [None])
        cells = (alone if args.alone else row)(official, ours)
        print("| " + " | ".join([name, *cells][: len(header)]) + " |", flush=True)
        for site, result in {"stock": official, "patched": ours}.items():
            if site == "patched" or args.alone:
                steps += [[name, site, *cells] for cells in by_tokens(result)]
    print()
    print_header(STEPS)
    for cells in steps:
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()
    print(f"\n{recorded(args.root)}")


def print_header(header: tuple[str, ...]) -> None:
    print("| " + " | ".join(header) + " |")
    print("| --- " * len(header) + "|", flush=True)


def alone(official: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    cells = []
    for result in official, ours:
        (run,) = result["runs"]
        if run["outcome"] != "served":
            cells += [run["outcome"], "", "", ""]
            continue
        half = len(run["each_step"]) // 2
        made = [sum(step[1:]) for step in run["each_step"]]
        numbers = run["process_peak"] // MIB, run["process_held"] // MIB
        cells += map(str, (*numbers, sum(made[:half]), sum(made[half:])))
    return cells


def by_tokens(result: dict[str, Any]) -> list[list[str]]:
    """What a step of each size costs, of those that were served."""
    runs = [run for run in result["runs"] if run["outcome"] == "served"]
    each_step = [step for run in runs for step in run["each_step"]]
    rows, least = [], 0
    for most in SIZES:
        steps = [step for step in each_step if least < step[0] <= most]
        if steps:
            many = len(steps)
            means = [
                sum(step[1 + i] for step in steps) / many for i in range(len(CALLS))
            ]
            times = [milliseconds(step) for step in steps]
            mean, worst = sum(times) / many, max(times)
            tokens = f"{least + 1} to {max(step[0] for step in steps)}"
            cells = [f"{n:.1f}" if n else "0" for n in means]
            rows.append([tokens, str(many), *cells, f"{mean:.2f}", f"{worst:.1f}"])
        least = most
    return rows


def milliseconds(step: list[int]) -> float:
    made = zip(CALLS, step[1:], strict=True)
    return sum(MICROSECONDS[call] * times for call, times in made) / 1000


def row(official: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    needed: dict[int, int] = {}
    for run in ours["runs"]:
        needed[run["seed"]] = run["buffer"] if run["outcome"] == "served" else MORE
    set_aside = ours["set_aside"]
    needs = sorted(needed.values())
    served = [run for run in ours["runs"] if run["outcome"] == "served"]
    died = sum(run["outcome"] != "served" for run in official["runs"])
    # The tokens computed, then how often each of CALLS was made.
    mapped, unmapped = (1 + list(CALLS).index(call) for call in ("map", "unmap"))
    each_step = [step for run in served for step in run["each_step"]]
    retried = [step for step in each_step if step[unmapped]]
    tokens = [step[0] for step in retried]

    def mean(column: int) -> str:
        return f"{sum(step[column] for step in retried) / len(retried):.0f}"

    return [
        str(ours["activations"] // MIB),
        f"{died} of {len(official['runs'])}",
        f"{set_aside / MIB:.0f}",
        f"{100 * set_aside / (ours['available'] + set_aside):.2f} %",
        f"{sum(need > set_aside for need in needs)} of {len(needs)}",
        f"{len(retried)} of {len(each_step)}",
        f"{min(tokens)} to {max(tokens)}" if tokens else "",
        f"{mean(mapped)}, {mean(unmapped)}" if retried else "",
        " ".join("more" if need == MORE else str(need // MIB) for need in needs),
    ]


if __name__ == "__main__":
    command(main)

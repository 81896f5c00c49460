"""The host's time for a step, stock and patched, on the virtual device.

Kernels take no time there, so this is the host's part alone. A step of a worker is two
calls, execute_model and sample_tokens, around each of which the patches set and
restore PyTorch's limits. Prints a Markdown table: processor time of a step that decodes
16 sequences with CUDA graphs, the least of rounds in turn, and the settings' part.
Rounds differ by more than the settings take, on a machine that does anything else;
the calls of Python and C do not.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.virtual import HOOKS, SITES, recorded, results
from scripts.commands import command
from scripts.release import Base

GIB = 1 << 30
DEVICE = {"memory": 16 * GIB, "context": 300 << 20}
CALLS = 2  # of a worker in a step


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10, help="of 200 steps, each way")
    parser.add_argument("--turns", type=int, default=3, help="starts of each way")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    names = ["model", "limit", "stock, ms", "patched, ms", "ratio", "settings, ms"]
    names += ["share", "stock, calls", "patched, calls"]
    print(f"| {' | '.join(names)} |")
    print(f"| {' | '.join(['---'] * len(names))} |")
    for model in ("dense", "moe"):
        for limited in (False, True):
            rounds: dict[str, list[float]] = {site: [] for site in SITES}
            settings: list[float] = []
            calls: dict[str, float] = {}
            for _ in range(args.turns):
                for site in SITES:
                    case = one(model, limited and site == "envelope", args.rounds)
                    found = results(
                        base, site, DEVICE, "step_cost", json.dumps(case), config=HOOKS
                    )
                    *decoded, last = found
                    rounds[site] += [result["milliseconds"] for result in decoded]
                    calls[site] = last["calls"]
                    if site == "envelope":
                        settings.append(CALLS * last["microseconds"] / 1000)
            theirs, ours = (min(rounds[site]) for site in SITES)
            spent = min(settings)
            cells = [model, "in bytes" if limited else "", f"{theirs:.3f}"]
            cells += [f"{ours:.3f}", f"{ours / theirs:.3f}", f"{spent:.4f}"]
            cells += [f"{spent / ours:.2%}", *(f"{calls[s]:.0f}" for s in SITES)]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{recorded(args.root)}")


def one(model: str, limited: bool, rounds: int) -> dict[str, Any]:
    llm: dict[str, Any] = {"gpu_memory_utilization": 0.4}
    if limited:
        llm["gpu_memory_limit_bytes"] = 6 * GIB
    return {"model": model, "graphs": True, "llm": llm, "rounds": rounds}


if __name__ == "__main__":
    command(main)

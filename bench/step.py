"""The host's time for a step, stock and patched, on the virtual device.

Kernels take no time there, so this is the host's part alone. A step of a worker is two
calls, execute_model and sample_tokens. In a caller's process a limit in bytes is set
and restored around each, in one of vLLM's own once. Prints a Markdown table: processor
time of a step that decodes 16 sequences with CUDA graphs, the least of rounds in turn,
the part that the patches add around the calls, and how often NVML was initialized
until the engine had started.
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
MODELS = ("dense", "moe")
CALLERS = "in bytes, a caller's process"
WAYS = ("stock", "", "in bytes", CALLERS)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10, help="of 200 steps, each way")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--turns", type=int, default=3, help="starts of each way")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    names = ["model", "limit", "stock, ms", "patched, ms", "ratio", "settings, ms"]
    names += ["share", "stock, calls", "patched, calls", "nvmlInit, both"]
    print(f"| {' | '.join(names)} |")
    print(f"| {' | '.join(['---'] * len(names))} |")
    for model in args.models:
        rounds: dict[str, list[float]] = {way: [] for way in WAYS}
        settings: dict[str, list[float]] = {way: [] for way in WAYS}
        calls: dict[str, float] = {}
        nvml: dict[str, int] = {}
        for _ in range(args.turns):
            for way in WAYS:
                site = SITES[way != "stock"]
                case = json.dumps(one(model, way, args.rounds))
                found = results(base, site, DEVICE, "step_cost", case, config=HOOKS)
                *decoded, last = found
                rounds[way] += [result["milliseconds"] for result in decoded]
                calls[way], nvml[way] = last["calls"], last["nvml_initializations"]
                settings[way].append(CALLS * last["microseconds"] / 1000)
        stock = min(rounds["stock"])
        for way in WAYS[1:]:
            ours, spent = min(rounds[way]), min(settings[way])
            cells = [model, way, f"{stock:.3f}", f"{ours:.3f}", f"{ours / stock:.3f}"]
            cells += [f"{spent:.4f}", f"{spent / ours:.2%}"]
            cells += [f"{calls[w]:.0f}" for w in ("stock", way)]
            cells += [f"{nvml['stock']}, {nvml[way]}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{recorded(args.root)}")


def one(model: str, way: str, rounds: int) -> dict[str, Any]:
    llm: dict[str, Any] = {"gpu_memory_utilization": 0.4}
    if way.startswith("in bytes"):
        llm["gpu_memory_limit_bytes"] = 6 * GIB
    case = {"model": model, "graphs": True, "llm": llm, "rounds": rounds}
    return case | {"caller": way == CALLERS}


if __name__ == "__main__":
    command(main)

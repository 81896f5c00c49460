"""How much memory fragmentation needs while serving, on the virtual device.

Mixed loads are served in exactly what was requested, with nothing set aside for
fragmentation and, if they die of that, with what the engine sets aside. The table says
how many die and what it costs; --buffers tells what each load needs instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from series import REPOSITORY, Base, Problem, command
from virtual import results

MIB = 1 << 20
MORE = 1 << 60  # than was tried
DEVICE = {"memory": 48 << 30}
ENGINE = REPOSITORY / "tests/vgpu/engine"
SCRIPT = ENGINE / "scenarios/mixed_load.py"
HOOKS = ENGINE / "hooks.toml"
CASES: dict[str, dict[str, Any]] = {
    "8B": {},
    "8B, V2": {"v2": True},
    "8B, 2048 tokens a batch": {"llm": {"max_num_batched_tokens": 2048}},
    "8B, 16384 tokens a batch": {"llm": {"max_num_batched_tokens": 16384}},
    "8B, LoRA": {"lora": True},
    "8B, CUDA graphs": {"graphs": True},
    "8B, compiled": {"graphs": True, "compile": True},
    "8B, expandable segments": {},
    "30B-A3B": {"model": "qwen-30b-a3b"},
    "small": {"model": "dense"},
}


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
    buffers = args.buffers or [0, None]

    def measure(name: str) -> dict[str, Any]:
        environment = {}
        if "expandable" in name:
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        argument = json.dumps(CASES[name] | {"seeds": seeds, "buffers": buffers})
        return results(
            base, "envelope", DEVICE, SCRIPT, argument, environment, config=HOOKS
        )[-1]

    header = (
        "case", "activations, MiB", "reserved in vain by one pass", "die without",
        "free in pieces then", "set aside", "die with it", "KV tokens it costs", "of",
    ) + ("needed",) * bool(args.buffers)  # fmt: skip
    print("| " + " | ".join(header) + " |")
    print("| --- " * len(header) + "|")
    for name in args.cases or CASES:
        cells = row(measure(name))
        print("| " + " | ".join([name, *cells[: len(header) - 1]]) + " |")
        sys.stdout.flush()


def row(result: dict[str, Any]) -> list[str]:
    needed: dict[int, int] = {}
    for run in result["runs"]:
        needed[run["seed"]] = run["buffer"] if run["outcome"] == "served" else MORE
    set_aside = result["set_aside"]
    needs = sorted(needed.values())
    died = [sum(need > buffer for need in needs) for buffer in (0, set_aside)]
    spare = [r["spare"] // MIB for r in result["runs"] if r["outcome"] == "OOM"]
    cost = result["tokens"] * set_aside / result["available"]
    without = any(run["buffer"] == 0 for run in result["runs"])
    return [
        str(result["activations"] // MIB),
        str(result["fragmentation"]["serving"] // MIB),
        f"{died[0]} of {len(needs)}" if without else "",
        f"{min(spare)} to {max(spare)}" if spare else "",
        str(set_aside // MIB),
        f"{died[1]} of {len(needs)}",
        str(round(cost)),
        str(round(result["tokens"] + cost)),
        " ".join("more" if need == MORE else str(need // MIB) for need in needs),
    ]


if __name__ == "__main__":
    command(main)

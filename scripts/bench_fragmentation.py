"""How much memory fragmentation needs while serving, on the virtual device.

Mixed loads are served with exactly what was requested and a buffer more, which grows
until they live. The table says how many die without a buffer and with the default one,
and what that one costs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from series import REPOSITORY, Base, Problem, command
from virtual import results

MIB = 1 << 20
DEVICE = {"memory": 48 << 30}
SCRIPT = REPOSITORY / "tests/vgpu/engine/scenarios/mixed_load.py"
BUFFERS = [*range(0, 512, 32), *range(512, 2049, 128)]
CASES: dict[str, dict[str, Any]] = {
    "8B": {},
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
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    if unknown := set(args.cases) - CASES.keys():
        raise Problem(f"no such case: {', '.join(unknown)}; there are {list(CASES)}")

    def measure(name: str) -> dict[str, Any]:
        case = CASES[name]
        llm = {"fragmentation_buffer_bytes": 0} | case.get("llm", {})
        case = case | {"seeds": list(range(args.seeds)), "buffers": BUFFERS, "llm": llm}
        environment = {}
        if "expandable" in name:
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        argument = json.dumps(case)
        return results(base, "envelope", DEVICE, SCRIPT, argument, environment)[-1]

    header = (
        "case", "activations, MiB", "reserved in vain by one pass", "die without",
        "free in pieces then", "needed", "default", "die with it",
        "tokens it costs", "of",
    )  # fmt: skip
    print("| " + " | ".join(header) + " |")
    print("| --- " * len(header) + "|")
    for name in args.cases or CASES:
        print("| " + " | ".join([name, *row(measure(name))]) + " |")
        sys.stdout.flush()


def row(result: dict[str, Any]) -> list[str]:
    loads: dict[int, int] = {}
    for run in result["runs"]:
        loads[run["seed"]] = run["buffer"] if run["outcome"] == "served" else 1 << 40
    needs = sorted(loads.values())
    default = result["default"]
    died = [sum(need * MIB > buffer for need in needs) for buffer in (0, default)]
    spare = [r["spare"] // MIB for r in result["runs"] if r["outcome"] == "OOM"]
    per_token = result["available"] / result["tokens"]
    return [
        str(result["activations"] // MIB),
        str(result["fragmentation"]["serving"] // MIB),
        f"{100 * died[0] // len(needs)}%",
        f"{min(spare)} to {max(spare)}" if spare else "",
        f"{needs[0]} to {needs[-1]}",
        str(default // MIB),
        f"{100 * died[1] // len(needs)}%",
        str(round(default / per_token)),
        str(result["tokens"]),
    ]


if __name__ == "__main__":
    command(main)

"""How much memory fragmentation needs while serving, on the virtual device.

Mixed loads are served with exactly what was requested and a buffer more, which grows
until they live. The table says how many die without a buffer and with the default one,
and what that one costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from series import Base, Problem, command

MIB = 1 << 20
SCENARIOS = "tests/vgpu/engine/scenarios"
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
    python = base.root / f".venv-vllm-{base.version}/bin/python"
    ours = base.root / f"build/envelope-{base.version}"
    if not python.exists() or not ours.is_dir():
        raise Problem("'make vgpu envelope' first.")
    if unknown := set(args.cases) - CASES.keys():
        raise Problem(f"no such case: {', '.join(unknown)}; there are {list(CASES)}")

    def measure(name: str) -> dict[str, Any]:
        case = CASES[name]
        llm = {"fragmentation_buffer_bytes": 0} | case.get("llm", {})
        case = case | {"seeds": list(range(args.seeds)), "buffers": BUFFERS, "llm": llm}
        paths = [ours, base.root, base.root / SCENARIOS]
        environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        if "expandable" in name:
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        done = subprocess.run(
            [str(python), "-m", "vgpu", "--memory", "48GiB", "--", str(python),
             str(base.root / SCENARIOS / "mixed_load.py"), json.dumps(case)],
            cwd=base.root / "build",
            env=os.environ | environment,
            capture_output=True, text=True,
        )  # fmt: skip
        lines = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
        if not lines:
            raise Problem(f"{name}: no result.\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        return result

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

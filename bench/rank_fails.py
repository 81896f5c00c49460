"""How long an engine of two ranks takes to end after one of them failed.

Rank 1 runs out of memory, or is killed, as each phase of a start and of a step begins,
on a virtual device per rank. Prints a Markdown table; a cell is the seconds until the
engine's process and all its workers have ended (with Ray: until the caller was told and
all workers have ended, as its cluster is not the engine's), or how else it came out
("hangs": it had not ended after --patience seconds). One engine runs at a time. Ray is
that of `make ray`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.virtual import HOOKS, SITES, recorded, results
from scripts.commands import command
from scripts.release import Base

WORKERS: dict[str, dict[str, Any]] = {
    "fork": {"method": "fork"},
    "spawn": {"method": "spawn"},
    "ray": {"executor": "ray"},
}
PHASES = (
    "init_device",
    "load_model",
    "profile",
    "profile_graphs",
    "kv_cache",
    "warm_up",
    "capture",
    "execute_model",
)
PARALLEL = {"TP 2": "tensor_parallel_size", "PP 2": "pipeline_parallel_size"}
DEVICE = {"memory": "4GiB", "devices": 2}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument(
        "--parallel", nargs="+", choices=PARALLEL, default=list(PARALLEL)
    )
    parser.add_argument(
        "--ways", nargs="+", choices=("memory", "kill"), default=["memory", "kill"]
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--vllm", nargs="+", choices=SITES, default=["envelope"])
    parser.add_argument("--patience", type=float, default=120, metavar="SECONDS")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    print(f"| workers | ranks | rank 1 | vLLM | {' | '.join(args.phases)} |")
    print("| --- " * (4 + len(args.phases)) + "|")
    for workers in args.workers:
        for parallel in args.parallel:
            for how in args.ways:
                # One after the other; the first also compiles kernels.
                cases = [
                    WORKERS[workers]
                    | {
                        "graphs": True,
                        "generate": 4,
                        "patience": args.patience,
                        "llm": {PARALLEL[parallel]: 2},
                        "fails": {"rank": 1, "phase": phase, "how": how},
                    }
                    for phase in args.phases
                ]
                for vllm in args.vllm:
                    print(f"| {workers} | {parallel} | {how} | {vllm} |", end="")
                    for told in results(
                        base, vllm, DEVICE, "ranks", json.dumps(cases), config=HOOKS
                    ):
                        print(f" {cell(told)} |", end="", flush=True)
                    print(flush=True)
    print(f"\n{recorded(args.root)}")


def cell(told: dict[str, Any]) -> str:
    if told["outcome"] in ("started", "hangs", "died"):
        return str(told["outcome"])
    left = f", {told['left']} left" if told["left"] else ""
    return f"{told['failed_after']:.1f}{left}"


if __name__ == "__main__":
    command(main)

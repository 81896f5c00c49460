"""Processor time of a start, patched relative to stock, in pairs: with the estimate of
CUDA graphs, and with a KV cache that is extended after they are captured.

Prints a Markdown table: the median of the ratios of the pairs, and their quartiles.
Every start is a process on a virtual device, with full CUDA graphs, forked from one
that has imported vLLM; one runs at a time, and Python's collector visits what is
imported, as in a user's start. A small model's start has no weights to read and no
kernel to wait for, so all that differs is seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from bench.extensible import WAYS, start
from bench.start import MODELS, RUNNERS, outcome
from bench.virtual import recorded
from scripts.commands import Problem, command
from scripts.release import Base

KINDS = {name: MODELS[name] for name in ("dense", "experts", "hybrid")} | {
    "vision hybrid": MODELS["hybrid"] | {"model": "vision hybrid"}
}
# Starts of a process that has imported vLLM: of each kind in turn, as a machine's speed
# changes with time.
TURN = 5


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=RUNNERS)


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    if args.pairs < 4:
        raise Problem(f"--pairs {args.pairs}: at least 4 have quartiles.")
    print(
        "| model | runner | stock, s | estimated | quartiles | extended | quartiles |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in args.models:
        for runner in args.runners:
            seconds = measured(base, KINDS[model], runner == "V2", args.pairs)
            cells = [model, runner, f"{median(seconds['official']):.2f}"]
            for way in WAYS[1:]:
                cells += compared(seconds[way], seconds["official"])
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{recorded(args.root)}")


def measured(
    base: Base, model: dict[str, Any], v2: bool, pairs: int
) -> dict[str, list[float]]:
    """Processor seconds of each start, by way.

    Raises:
        Problem: one does not start.
    """
    llm = {
        "gpu_memory_utilization": 0.7,
        "max_num_seqs": 128,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
    } | model.get("llm", {})
    case = model | {"v2": v2, "graphs": True, "llm": llm}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in turns(pairs):
        for way in WAYS:
            # The first warms the caches on disk.
            cases = [case] * (turn + 1)
            _, *results = start(base, way, cases, {"COLLECT_IMPORTS": "1"})
            for result in results:
                if result["outcome"] != "started":
                    error = result.get("error", "")
                    raise Problem(f"{way}: {outcome(result)} {error}")
                seconds[way].append(result["processor_seconds"])
    return seconds


def turns(pairs: int) -> Iterator[int]:
    for done in range(0, pairs, TURN):
        yield min(TURN, pairs - done)


def compared(ours: list[float], theirs: list[float]) -> list[str]:
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return [f"{median(ratios):.2f}", f"{low:.2f} to {high:.2f}"]


if __name__ == "__main__":
    command(main)

"""Start engines in three ways: stock, patched with an estimate of CUDA graphs, and
patched with a KV cache that is extended after they are captured
(--enable-extensible-kv-cache). Compared are the KV cache, the unused part of the
request, and the processor time of a start without Triton's autotuning, which lasts a
fixed time. Prints a Markdown table; every start is a process on a virtual device
(bench/scenarios), in the same run.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.start import MIB, grid, grid_options, outcome, percent, requested, starts
from bench.virtual import recorded
from scripts.commands import Problem, command
from scripts.release import Base

WAYS = ("official", "estimated", "extended")
LABELS = ("stock", *WAYS[1:])


def options(parser: argparse.ArgumentParser) -> None:
    grid_options(parser)
    parser.set_defaults(first=50, last=90, step=20)


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    columns = "".join(
        f"| {way}: peak/requested | KV, MiB | left, MiB " for way in LABELS
    )
    print(f"| model | runner | utilization {columns}|")
    print("| --- " * 12 + "|")
    rows: list[tuple[str, dict[str, dict[str, Any]]]] = []
    with ThreadPoolExecutor(2) as pool:
        for model, runner, cases in grid(args):
            both = pool.map(lambda way: start(base, way, cases), WAYS)  # noqa: B023
            for asked, *results in zip(cases, *both, strict=True):
                row = dict(zip(WAYS, results, strict=True))
                rows.append((model, row))
                cells = [model, runner, f"{percent(asked) / 100:.2f}"]
                for way in WAYS:
                    cells += told(row[way], requested(percent(asked)))
                print(f"| {' | '.join(cells)} |", flush=True)
    print()
    for way in WAYS[:2]:
        for model in args.models:
            print(against(way, model, [r[1] for r in rows if r[0] == model]))
    print(f"\n{recorded(args.root)}")


def against(way: str, model: str, rows: list[dict[str, dict[str, Any]]]) -> str:
    """How much more KV cache the extended have, and how much longer they take."""
    label = LABELS[WAYS.index(way)]
    every = [r for r in rows if all(r[w]["outcome"] == "started" for w in WAYS)]
    if not every:
        raise Problem(f"{model}: no row starts in all three ways.")
    gained = [kv(row["extended"]) - kv(row[way]) for row in every]
    ours, theirs = (
        sum(row[w]["processor_seconds"] for row in every) for w in ("extended", way)
    )
    return (
        f"- {model}, extended minus {label}: KV cache {min(gained) / MIB:.0f} to "
        f"{max(gained) / MIB:.0f} MiB; CPU time of a start relative to "
        f"{label}: {ours / theirs:.2f} ({len(every)} rows)"
    )


def start(
    base: Base,
    way: str,
    cases: list[dict[str, Any]],
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    if way == "official":
        return starts(base, cases, way, environment)
    more = {"enable_extensible_kv_cache": way == "extended"}
    asked = [case | {"report": True, "llm": case["llm"] | more} for case in cases]
    return starts(base, asked, "envelope", environment)


def kv(result: dict[str, Any]) -> int:
    """Bytes; the release has no report, and logs the available memory."""
    return int(result["report"]["kv_cache"] if "report" in result else result["kv"])


def told(result: dict[str, Any], requested: int) -> list[str]:
    if result["outcome"] != "started":
        return [outcome(result), "", ""]
    peak = f"{result['process_peak'] / requested:.3f}"
    left = f"{result['report']['left'] / MIB:.0f}" if "report" in result else ""
    return [peak, f"{kv(result) / MIB:.0f}", left]


if __name__ == "__main__":
    command(main)

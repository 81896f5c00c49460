"""Start engines at many utilizations, stock and patched: the peak of each start
relative to its request, and its estimate of CUDA graphs.

Prints a Markdown table; --picture writes the same as SVG. Every start is a process on
a virtual device, forked from one that has imported vLLM (bench/scenarios).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.virtual import NAMES, SITES, recorded, results
from scripts import topics
from scripts.commands import Problem, command, write_whole
from scripts.release import Base

MIB = 1 << 20
MEMORY = 2560 * MIB
DEVICE = {"memory": MEMORY, "graph": 700 << 10}
RUNNERS = ["V1", "V2"]
# The estimate of graphs may be wrong by so much: the larger of the two counts.
TOLERANCE, TOLERANCE_PART = 32 * MIB, 0.05
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": "dense"},
    "experts": {"model": "moe"},
    "hybrid": {"model": "hybrid", "llm": {"gdn_prefill_backend": "triton"}},
    "eagle": {"model": "dense", "draft": 2},
}


def grid_options(parser: argparse.ArgumentParser) -> None:
    """Options for the started cases: see grid()."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=RUNNERS)
    parser.add_argument("--first", type=int, default=10, help="utilization, percent")
    parser.add_argument("--last", type=int, default=98)
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=128, help="max_num_seqs")


def options(parser: argparse.ArgumentParser) -> None:
    grid_options(parser)
    topics.options(parser)
    parser.add_argument(
        "--buffer", type=int, help="fragmentation_buffer_bytes of the patched"
    )
    parser.add_argument("--results", type=Path, help="JSON file to write")


def main(args: argparse.Namespace) -> None:
    base = topics.chosen(args)
    rows: list[Row] = []
    print("| model | runner | utilization | stock | peak/requested | KV, MiB "
          "| graphs: estimate, actual | patched | peak/requested | KV, MiB "
          "| graphs: estimate, actual |")  # fmt: skip
    print("| --- " * 11 + "|")
    with ThreadPoolExecutor(len(SITES)) as pool:
        for model, runner, cases in grid(args):
            both = pool.map(partial(with_buffer, base, args.buffer, cases), SITES)
            for asked, *pair in zip(cases, *both, strict=True):
                rows.append(Row(model, runner, percent(asked), *pair))
                print(rows[-1].line(), flush=True)
    print()
    for line in verdict(rows):
        print(line)
    if args.results:
        told = {"device": DEVICE, "rows": [asdict(row) for row in rows]}
        write_whole(args.results, json.dumps(told, indent=1) + "\n")
    print(f"\n{recorded(args.root)}")


@dataclass(frozen=True)
class Row:
    """A start with each vLLM; for its results see scenarios/start.py."""

    model: str
    runner: str
    percent: int
    official: dict[str, Any]
    envelope: dict[str, Any]

    @property
    def requested(self) -> int:
        return requested(self.percent)

    def of(self, site: str) -> dict[str, Any]:
        return self.official if site == "official" else self.envelope

    def started(self, site: str) -> bool:
        return bool(self.of(site)["outcome"] == "started")

    def ratio(self, site: str) -> float:
        """Peak by requested."""
        return float(self.of(site).get("process_peak", MEMORY)) / self.requested

    def line(self) -> str:
        cells = [self.model, self.runner, f"{self.percent / 100:.2f}"]
        for site in SITES:
            result = self.of(site)
            cells += [outcome(result), f"{self.ratio(site):.3f}"]
            if self.started(site):
                guess = result["estimate"]  # none where the KV cache is sized last
                cells += [
                    f"{result['kv'] / MIB:.0f}",
                    f"{f'{guess / MIB:.0f}' if guess else 'none'}, "
                    f"{result['graphs'] / MIB:.0f}",
                ]
            else:
                cells += ["", ""]
        return f"| {' | '.join(cells)} |"


def grid(
    args: argparse.Namespace,
) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Model, runner, and a start for each utilization; see scenarios/start.py."""
    percents = range(args.first, args.last + 1, args.step)
    if not percents or args.first < 1 or args.last > 100:
        raise Problem("--first, --last: percents from 1 to 100, in this order")
    for model, runner in product(args.models, args.runners):
        asked = MODELS[model]
        llm = {
            "max_num_seqs": args.sequences,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
        } | asked.get("llm", {})
        cases = [{"gpu_memory_utilization": percent / 100} for percent in percents]
        common = asked | {"v2": runner == "V2", "graphs": True}
        yield model, runner, [common | {"llm": llm | budget} for budget in cases]


def requested(percent: int) -> int:
    """Bytes, by the utilization alone."""
    return math.ceil(MEMORY * percent / 100)


def percent(asked: dict[str, Any]) -> int:
    return int(round(100 * asked["llm"]["gpu_memory_utilization"]))


def with_buffer(
    base: Base, buffer: int | None, cases: list[dict[str, Any]], site: str
) -> list[dict[str, Any]]:
    if site == "envelope" and buffer is not None:
        extra = {"fragmentation_buffer_bytes": buffer}
        cases = [asked | {"llm": asked["llm"] | extra} for asked in cases]
    return starts(base, cases, site)


def starts(
    base: Base,
    cases: list[dict[str, Any]],
    site: str,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The result of each start; see scenarios/start.py."""
    told = json.dumps(cases)
    found = list(results(base, site, DEVICE, "start_each", told, environment))
    if len(found) != len(cases):
        raise Problem(f"{site}: {len(found)} of {len(cases)} starts ended.")
    return found


def outcome(result: dict[str, Any]) -> str:
    if result["outcome"] == "started":
        return "starts"
    if result["outcome"] in ("OutOfMemoryError", "died"):
        return "out of memory"
    # The V1 runner's sampler says so in an error of its own.
    if "out of memory occurred" in result["error"]:
        return "out of memory"
    return "refused" if result["outcome"] == "ValueError" else str(result["outcome"])


def verdict(rows: list[Row]) -> Iterator[str]:
    """How far each goal is met, and where it is not."""
    for site in SITES:
        over = [row for row in rows if row.ratio(site) > 1]
        started = [row for row in rows if row.started(site)]
        guessed = [row for row in started if row.of(site)["estimate"]]
        wrong = [row for row in guessed if not close(row.of(site))]
        yield (
            f"- {NAMES[site]}: {len(started)} of {len(rows)} start; {len(over)} take "
            f"more than they requested; of those that start, {len(guessed)} estimate "
            f"graphs, {len(wrong)} by more than 32 MiB and 5% wrong"
        )
    lost = [r for r in rows if r.started("official") and not r.started("envelope")]
    within = [row for row in lost if row.ratio("official") <= 1]
    named = ", ".join(f"{r.model} {r.runner} {r.percent / 100:.2f}" for r in within)
    yield (
        f"- only stock starts: {len(lost)}, of which {len(within)} within the "
        f"budget{': ' * bool(named)}{named}"
    )
    gained = [r for r in rows if r.started("envelope") and not r.started("official")]
    yield f"- only patched starts: {len(gained)}"
    both = [r for r in rows if r.started("official") and r.started("envelope")]
    if not both:
        return
    kept = [row.envelope["kv"] - row.official["kv"] for row in both]
    ours, theirs = (
        sum(r.of(site)["processor_seconds"] for r in both) for site in SITES[::-1]
    )
    yield (
        f"- KV cache, patched minus stock: {min(kept) / MIB:.0f} to "
        f"{max(kept) / MIB:.0f} MiB; CPU time, patched relative to stock: "
        f"{ours / theirs:.3f}"
    )


def close(result: dict[str, Any]) -> bool:
    allowed = max(TOLERANCE, TOLERANCE_PART * result["graphs"])
    return bool(abs(result["estimate"] - result["graphs"]) <= allowed)


if __name__ == "__main__":
    command(main)

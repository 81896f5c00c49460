"""Start engines with empty caches and again with those that the first start left,
unpatched compared with patched: how many tokens each KV cache has.

Prints a Markdown table. Every start is a process on a virtual device, forked from one
that has imported vLLM (bench/scenarios); the models are whole, with dummy
weights.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.start import outcome
from bench.virtual import NAMES, SITES, recorded, results
from scripts.commands import Problem, command, write_whole
from scripts.release import Base

MIB = 1 << 20
# The KV cache may be so many bytes smaller than in the release's second start: those
# set aside for fragmentation.
ALLOWED = 64 * MIB
STARTS = ("cold", "warm")
LABELS = tuple(NAMES.values())


@dataclass(frozen=True)
class Start:
    """As people start it: compiled, with the CUDA graphs of a release."""

    model: str
    memory: str
    tokens: int = 8192
    """A batch."""
    v2: bool = True
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        runner = "V2" if self.v2 else "V1"
        return f"{self.model} {runner} {self.memory} {self.tokens}"

    def case(self, folder: Path) -> dict[str, Any]:
        """As scenarios/start.py takes it."""
        return {
            "model": self.model,
            "v2": self.v2,
            "graphs": True,
            "compile": True,
            # Compiled models are found by their path.
            "folder": str(folder / self.model),
            "llm": {
                "gpu_memory_utilization": 0.92,
                "max_model_len": 8192,
                "max_num_seqs": 256,
                "max_num_batched_tokens": self.tokens,
                "compilation_config": {},
                **dict(self.more),
            },
        }


GRID = [
    # The card, batch and length of the published runs of vllm 0.27.1.
    Start("Qwen3-8B", "23.51GiB", 2048),
    Start("Qwen3-8B", "23.51GiB", 2048, v2=False),
    Start("Llama-3.1-8B", "44.4GiB"),
    Start("Qwen3-14B", "79.2GiB"),
    Start("Qwen2-VL-7B", "44.4GiB"),
    Start("Qwen3-30B-A3B", "79.2GiB"),
    Start("Qwen3-Next-80B-A3B", "179GiB", more=(("gdn_prefill_backend", "triton"),)),
]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="pattern: rows whose name has it")
    parser.add_argument("--results", type=Path, help="JSON file to write")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    grid = [start for start in GRID if re.search(args.only, start.name)]
    if not grid:
        raise Problem("--only: no row is left")
    columns = " | ".join(f"{label}: {kind}" for label in LABELS for kind in STARTS)
    less = "KV cache smaller, MiB | of that left of the budget, MiB"
    print(f"| model | device | runner | tokens per batch | {columns} | {less} |")
    print("| --- " * 10 + "|")
    rows = []
    for start in grid:
        rows.append(Row(start, {site: both(base, start, site) for site in SITES}))
        print(rows[-1].line(), flush=True)
    print()
    for line in verdict(rows):
        print(line)
    if args.results:
        write_whole(
            args.results, json.dumps([asdict(r) for r in rows], indent=1) + "\n"
        )
    print(f"\n{recorded(args.root)}")


def both(base: Base, start: Start, site: str) -> list[dict[str, Any]]:
    """The results of the first start and of the second."""
    case = start.case(base.root / "build/bench-first-start" / site)
    case["report"] = site != "official"  # which has none
    cases = json.dumps([case] * len(STARTS))
    device = {"memory": start.memory}
    found = list(results(base, site, device, "start_each", cases))
    if len(found) != len(STARTS):
        raise Problem(f"{start.name}, {site}: {len(found)} starts ended")
    told = ", ".join(outcome(result) for result in found)
    print(f"{site}: {start.name}: {told}", file=sys.stderr, flush=True)
    return found


@dataclass(frozen=True)
class Row:
    start: Start
    found: dict[str, list[dict[str, Any]]]
    """For each vLLM the cold and the warm start; see scenarios/start.py."""

    @property
    def started(self) -> bool:
        return all(r["outcome"] == "started" for f in self.found.values() for r in f)

    @property
    def less(self) -> int:
        """Bytes of KV cache, stock minus patched, both warm."""
        stock, patched = (self.found[site][1]["kv"] for site in SITES)
        return int(stock - patched)

    @property
    def left(self) -> int:
        """Bytes of the budget that no block of all layers filled: patched, warm. The
        driver maps pages of 2 MiB, and each layer has its own."""
        return int(self.found["envelope"][1]["report"]["left"])

    def line(self) -> str:
        start = self.start
        runner = "V2" if start.v2 else "V1"
        cells = [start.model, start.memory.replace("G", " G"), runner]
        cells.append(f"{start.tokens:,}")
        cells += [told(result) for site in SITES for result in self.found[site]]
        sizes = (self.less, self.left) if self.started else ()
        cells += [f"{size / MIB:.0f}" for size in sizes] or ["", ""]
        return f"| {' | '.join(cells)} |"


def told(result: dict[str, Any]) -> str:
    if result["outcome"] != "started":
        return outcome(result)
    return f"{result['blocks'] * result['block_size']:,}"


def verdict(rows: list[Row]) -> Iterator[str]:
    yield f"- started, all four: {sum(r.started for r in rows)} of {len(rows)}"
    rows = [row for row in rows if row.started]
    for site in SITES:
        same = sum(cold["blocks"] == warm["blocks"] for cold, warm in
                   (row.found[site] for row in rows))  # fmt: skip
        yield f"- {NAMES[site]}: the first has as many blocks as the second: {same}"
    fewer = [
        max(row.found["official"][1]["kv"] - r["kv"] for r in row.found["envelope"])
        for row in rows
    ]
    yield (
        "- patched, both, at least the second of stock minus 64 MiB: "
        f"{sum(less <= ALLOWED for less in fewer)} "
        f"(fewer, MiB: {', '.join(f'{less / MIB:.1f}' for less in fewer)})"
    )
    for site in SITES:
        peaks = (row.found[site][1] for row in rows)
        ratios = ", ".join(f"{r['process_peak'] / r['requested']:.3f}" for r in peaks)
        yield f"- {NAMES[site]}: peak of the second by its budget: {ratios}"


if __name__ == "__main__":
    command(main)

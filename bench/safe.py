"""At equal safety: the KV cache of stock vLLM, tuned by hand, beside the patched one.

Stock is started with and without expandable segments. A careful operator lowers
--gpu-memory-utilization until the engine starts, serves the largest batches and random
loads, and never takes more than its budget: another process holds everything else. By
how much is found by bisection, with short loads. A start at the lowered utilization
then serves the long loads, which may lower it further. The patched build is started
once, at the budget, as it comes.

Rows are kept in a file, as they are measured; those that are there are not measured
again. Writes the table of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.scenarios.loads import COMPILED, DEEP, NGRAM, V2, hybrid
from bench.virtual import HOOKS, recorded, results
from scripts.commands import Problem, command, write_whole
from scripts.release import Base
from scripts.topics_page import filled

MIB = 1 << 20
MEMORY = 48 << 30
DEVICE = {"memory": MEMORY}
GRAIN = 8  # MiB: the steps of the bisection
SEEDS = (800, 801, 802)
STEPS = 2000  # of each long load, at least
DATA = "docs/data/equal-safety.json"
PAGE = "docs/equal-safety.md"
TABLE = "equal safety"
# Named as in the table.
STOCK: dict[str, dict[str, str]] = {
    "": {},
    "expandable segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
}
GRAPHS = {"graphs": True}
MODELS: dict[str, dict[str, Any]] = {
    "8B": {},
    "8B of 32 layers": {"llm": DEEP},
    "small dense": {"model": "dense"},
    "experts (30B-A3B)": {"model": "qwen-30b-a3b"},
    "MLA": {"model": "MLA, 64 experts", "llm": {"attention_backend": "TRITON_MLA"}},
    "gated delta nets": hybrid(max_num_batched_tokens=2048),
    "Mamba2": {"model": "Mamba2", "llm": {"max_num_batched_tokens": 2048}},
    "8B, EAGLE": {"draft": 3},
    "8B, n-grams": {"llm": {"speculative_config": NGRAM}},
    "8B, LoRA": {"lora": True},
    "vision": {"model": "vision", "load": "images"},
    "pooling": {
        "model": "pooling",
        "llm": {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False},
    },
}
MODES: dict[str, dict[str, Any]] = {"eager": {}, "graphs": GRAPHS, "compiled": COMPILED}


@dataclass(frozen=True)
class Row:
    model: str
    runner: str
    mode: str
    budget: float
    """A share of the device."""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.runner}, {self.mode}, {self.budget}"

    def case(self, lowered: int, **more: Any) -> dict[str, Any]:
        """As scenarios/mixed_load.py takes it; the utilization is lowered by MiB."""
        asked = MODELS[self.model]
        share = self.budget - lowered * MIB / MEMORY
        llm = asked.get("llm", {}) | {"gpu_memory_utilization": share}
        runner = V2 if self.runner == "V2" else {}
        common = {"largest": True, "seeds": SEEDS, "share": self.budget}
        return asked | MODES[self.mode] | runner | common | more | {"llm": llm}


# What `make bench-safe` measures, of all models, runners, modes and budgets.
GRID = (
    Row("8B", "V1", "eager", 0.5),
    Row("8B", "V2", "eager", 0.5),
    Row("8B", "V2", "compiled", 0.9),
    Row("8B", "V1", "graphs", 0.7),
    Row("8B of 32 layers", "V2", "eager", 0.9),
    Row("small dense", "V2", "graphs", 0.5),
    Row("experts (30B-A3B)", "V2", "eager", 0.5),
    Row("experts (30B-A3B)", "V2", "compiled", 0.7),
    Row("MLA", "V2", "graphs", 0.5),
    Row("gated delta nets", "V1", "eager", 0.5),
    Row("gated delta nets", "V2", "graphs", 0.7),
    Row("Mamba2", "V1", "eager", 0.5),
    Row("8B, EAGLE", "V2", "eager", 0.7),
    Row("8B, n-grams", "V1", "eager", 0.5),
    Row("8B, LoRA", "V2", "eager", 0.5),
    Row("vision", "V2", "eager", 0.7),
    Row("pooling", "V2", "eager", 0.5),
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="pattern: rows whose name has it")
    parser.add_argument("--data", type=Path, help=f"file of the rows ({DATA})")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    file = args.data or args.root / DATA
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = {row["name"]: row for row in known}
    chosen = [row for row in GRID if re.search(args.only, row.name)]
    if not chosen:
        raise Problem("--only: no row is left.")
    for row in chosen:
        if row.name in rows:
            continue
        print(row.name, file=sys.stderr, flush=True)
        serve = partial(serve_loads, base, row)
        told = {"stock": best(serve), "patched": as_it_comes(serve)}
        rows[row.name] = asdict(row) | {"name": row.name} | told
        rows[row.name]["recorded"] = recorded(args.root)
        kept = {"device": DEVICE, "seeds": SEEDS, "steps": STEPS, "grain": GRAIN}
        kept["rows"] = [rows[row.name] for row in GRID if row.name in rows]
        write_whole(file, json.dumps(kept, indent=1) + "\n")
    lines = table([rows[row.name] for row in GRID if row.name in rows])
    print("\n".join(lines))
    if args.data is None:
        page = args.root / PAGE
        write_whole(page, filled(page.read_text(), {TABLE: lines}, PAGE))


# What mixed_load says of a site with variables, lowered by so many MiB.
Serve = Callable[..., dict[str, Any]]


def serve_loads(
    base: Base, row: Row, site: str, kind: str, lowered: int, **more: Any
) -> dict[str, Any]:
    argument = json.dumps(row.case(lowered, **more))
    *_, told = results(base, site, DEVICE, "mixed_load", argument, STOCK[kind], HOOKS)
    for run in told["runs"]:
        del run["each_step"]
    return told


def needs(told: dict[str, Any]) -> int | None:
    """MiB, a multiple of GRAIN, beyond the budget: of the start or a load."""
    above = math.ceil(told["start_above"] / MIB / GRAIN) * GRAIN
    return None if told["needed"] is None else max(told["needed"], above)


def best(serve: Serve) -> dict[str, Any] | None:
    """The stock vLLM with the most KV tokens that stays within the budget.

    One with fewer tokens before its long loads than another after them is left out.
    """
    starts = []
    for kind in STOCK:
        told = serve("official", kind, 0, grain=GRAIN)
        if (lowered := needs(told)) is not None:
            share = 1 - lowered * MIB / told["available"]
            starts.append((share * told["tokens"], kind, lowered))
    found: dict[str, Any] | None = None
    for expected, kind, lowered in sorted(starts, reverse=True):
        if found is not None and found["tokens"] >= expected:
            break
        tuned = confirmed(serve, kind, lowered)
        if tuned and (found is None or tuned["tokens"] > found["tokens"]):
            found = tuned
    return found


def confirmed(serve: Serve, kind: str, lowered: int) -> dict[str, Any] | None:
    """A start with which the long loads stay within the budget."""
    while True:
        told = serve("official", kind, lowered, grain=GRAIN, steps=STEPS)
        more = needs(told)
        if more is None:
            return None
        if more == 0:
            kept = {key: told[key] for key in ("tokens", "available", "activations")}
            return {"kind": kind, "lowered": lowered} | kept
        lowered += more


def as_it_comes(serve: Serve) -> dict[str, Any]:
    """The patched build, started at the budget."""
    told = serve("envelope", "", 0, steps=STEPS)
    served = all(run["outcome"] == "served" for run in told["runs"])
    keys = ("tokens", "available", "activations", "set_aside", "start_above")
    return {"served": served} | {key: told[key] for key in keys}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | runner | mode | budget | stock: segments | lowered by, MiB "
        "| KV tokens | patched: KV tokens | more than stock |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        stock, ours = row["stock"], row["patched"]
        cells = [row["model"], row["runner"], row["mode"], f"{row['budget']:.1f}"]
        cells += ["none stays within", "", ""]
        if stock is not None:
            cells[4:] = [stock["kind"] or "as released", str(stock["lowered"])]
            cells.append(str(stock["tokens"]))
        fits = ours["served"] and not ours["start_above"]
        cells.append(str(ours["tokens"]) if fits else "out of memory")
        cells.append("")
        if stock is not None and fits:
            more = ours["tokens"] - stock["tokens"]
            cells[-1] = f"{more:+} ({more / stock['tokens']:+.2%})"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    command(main)

"""At equal safety: the KV cache of stock vLLM, tuned by hand, beside the patched one.

Stock is started with and without expandable segments. A careful operator lowers
--gpu-memory-utilization until the engine starts, serves the largest batches and random
loads, and never takes more than its budget. What it is lowered by leaves the KV cache,
so one start tells: another process leaves the engine that much more than its budget.
It is found by bisection, with short loads first. The patched build is started at the
budget, as it comes.

Rows are kept in a file, as they are measured; those that are there are not measured
again. Writes the table of the page.
"""

from __future__ import annotations

import argparse
import json
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
DEVICE = {"memory": 48 << 30}
GRAIN = 8  # MiB: the steps of the bisection
SEEDS = (800, 801, 802)
STEPS = 2000  # of each long load, at least
DATA = "docs/data/equal-safety.json"
PAGE = "docs/equal-safety.md"
TABLE = "equal safety"
# Named as in the table.
AS_RELEASED = "as released"
STOCK: dict[str, dict[str, str]] = {
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    AS_RELEASED: {},
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
    "8B, n-grams": {
        "llm": {"speculative_config": NGRAM, "max_num_batched_tokens": 4096}
    },
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

    def case(self, **more: Any) -> dict[str, Any]:
        """As scenarios/mixed_load.py takes it."""
        asked = MODELS[self.model]
        llm = asked.get("llm", {}) | {"gpu_memory_utilization": self.budget}
        runner = V2 if self.runner == "V2" else {}
        common = {"largest": True, "seeds": SEEDS}
        return asked | MODES[self.mode] | runner | common | more | {"llm": llm}


# What `make bench-safe` measures, of all models, runners, modes and budgets.
GRID = (
    Row("8B", "V1", "eager", 0.5),
    Row("experts (30B-A3B)", "V2", "eager", 0.5),
    Row("small dense", "V2", "graphs", 0.5),
    Row("MLA", "V2", "graphs", 0.5),
    Row("8B, LoRA", "V2", "eager", 0.5),
    Row("8B, EAGLE", "V2", "eager", 0.7),
    Row("vision", "V2", "eager", 0.7),
    Row("pooling", "V2", "eager", 0.5),
    Row("Mamba2", "V1", "eager", 0.5),
    Row("8B, n-grams", "V1", "eager", 0.5),
    Row("8B", "V2", "compiled", 0.9),
    Row("gated delta nets", "V2", "graphs", 0.7),
    Row("8B of 32 layers", "V2", "eager", 0.9),
    Row("8B", "V2", "eager", 0.5),
    Row("8B", "V1", "graphs", 0.7),
    Row("experts (30B-A3B)", "V2", "compiled", 0.7),
    Row("gated delta nets", "V1", "eager", 0.5),
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


# What mixed_load says of a site with variables.
Serve = Callable[..., dict[str, Any]]


def serve_loads(
    base: Base, row: Row, site: str, kind: str, **more: Any
) -> dict[str, Any]:
    argument = json.dumps(row.case(**more))
    *_, told = results(base, site, DEVICE, "mixed_load", argument, STOCK[kind], HOOKS)
    for run in told["runs"]:
        del run["each_step"]
    return told


def best(serve: Serve) -> dict[str, Any] | None:
    """The stock vLLM with the most KV tokens that stays within the budget."""
    found: dict[str, Any] | None = None
    for kind in STOCK:
        beat = found["tokens"] if found else 0
        told = serve("official", kind, grain=GRAIN, steps=STEPS, beat=beat)
        if (lowered := told["needed"]) is None:
            continue
        blocks = (told["available"] - lowered * MIB) // told["block"]
        if (tokens := blocks * told["block_size"]) > beat:
            found = {"kind": kind, "lowered": lowered, "tokens": tokens}
            found |= {key: told[key] for key in ("available", "activations")}
    return found


def as_it_comes(serve: Serve) -> dict[str, Any]:
    """The patched build, started at the budget."""
    told = serve("envelope", AS_RELEASED, steps=STEPS)
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
            cells[4:] = [stock["kind"], str(stock["lowered"])]
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

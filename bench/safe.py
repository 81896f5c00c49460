"""At equal safety: the KV cache of stock vLLM, tuned by hand, beside the patched one.

Stock is started with and without expandable segments. A careful operator lowers
--gpu-memory-utilization until the engine starts, serves the largest batches and random
loads, and never takes more than its budget. What it is lowered by leaves the KV cache,
so one start tells: another process leaves the engine that much more than its budget.
It is found by bisection, with short loads first. The patched build is started at the
budget, as it comes.

Rows are kept in a file, which a row is in when all its engines have served; those that
are there are not measured again. Writes the table of the page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
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
    "MLA, FlashAttention": {
        "model": "MLA, 64 experts",
        "llm": {"attention_backend": "FLASH_ATTN_MLA"},
    },
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
    Row("MLA, FlashAttention", "V2", "graphs", 0.5),
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
    parser.add_argument("--steps", type=int, default=STEPS, help="of a load, at least")
    parser.add_argument("--data", type=Path, help=f"file of the rows ({DATA})")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    file = args.data or args.root / DATA
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = {row["name"]: row for row in known}
    chosen = [row for row in GRID if re.search(args.only, row.name)]
    if not chosen:
        raise Problem("--only: no row is left.")
    missing = [row for row in chosen if row.name not in rows]
    for row, told in measure(partial(serve, base), missing, args.steps):
        how = {"name": row.name, "seeds": SEEDS, "steps": args.steps, "grain": GRAIN}
        rows[row.name] = how | asdict(row) | told | {"recorded": recorded(args.root)}
        kept = [rows[row.name] for row in GRID if row.name in rows]
        data = {"device": DEVICE, "rows": kept}
        write_whole(file, json.dumps(data, indent=1) + "\n")
    lines = table([rows[row.name] for row in GRID if row.name in rows])
    print("\n".join(lines))
    if args.data is None:
        page = args.root / PAGE
        write_whole(page, filled(page.read_text(), {TABLE: lines}, PAGE))


# What mixed_load says of cases on a site with variables.
Serve = Callable[[str, dict[str, str], list[dict[str, Any]]], Iterator[dict[str, Any]]]


def serve(
    base: Base, site: str, variables: dict[str, str], cases: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    argument = json.dumps(cases)
    for told in results(base, site, DEVICE, "mixed_load", argument, variables, HOOKS):
        for run in told.get("runs", ()):
            del run["each_step"]
        yield told


def measure(
    serve: Serve, rows: list[Row], steps: int
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with its best stock vLLM, and the patched one as it comes."""
    stock: dict[Row, dict[str, Any] | None] = dict.fromkeys(rows)
    for kind, variables in STOCK.items():
        cases = [
            row.case(grain=GRAIN, steps=steps, beat=tokens_of(found))
            for row, found in stock.items()
        ]
        ran = serve("official", variables, cases) if cases else ()
        for row, told in zip(rows, ran, strict=True):
            progress(row, f"stock, {kind}", told)
            stock[row] = better(stock[row], kind, told)
    cases = [row.case(steps=steps) for row in rows]
    ran = serve("envelope", {}, cases) if cases else ()
    for row, told in zip(rows, ran, strict=True):
        progress(row, "patched", told)
        yield row, {"stock": stock[row], "patched": as_it_comes(told)}


def progress(row: Row, build: str, told: dict[str, Any]) -> None:
    """
    Raises:
        Problem: the engine did not start.
    """
    if "runs" not in told:
        raise Problem(f"{row.name}, {build}: {told}")
    print(f"{row.name}: {build}", file=sys.stderr, flush=True)


def tokens_of(found: dict[str, Any] | None) -> int:
    return found["tokens"] if found else 0


def better(
    found: dict[str, Any] | None, kind: str, told: dict[str, Any]
) -> dict[str, Any] | None:
    """The stock vLLM that has more KV tokens when it stays within the budget."""
    if (lowered := told["needed"]) is None:
        return found
    blocks = (told["available"] - lowered * MIB) // told["block"]
    if (tokens := blocks * told["block_size"]) <= tokens_of(found):
        return found
    kept = {key: told[key] for key in ("available", "activations")}
    return {"kind": kind, "lowered": lowered, "tokens": tokens} | kept


def as_it_comes(told: dict[str, Any]) -> dict[str, Any]:
    served = all(run["outcome"] == "served" for run in told["runs"])
    keys = ("tokens", "available", "activations", "set_aside", "start_above")
    return {"served": served} | {key: told[key] for key in keys}


def fits(patched: dict[str, Any]) -> bool:
    """Whether it started and served within its budget."""
    return patched["served"] and not patched["start_above"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | runner | mode | budget | steps | stock: segments | lowered by, MiB "
        "| KV tokens | patched: KV tokens | more than stock | commit |",
        "| --- " * 11 + "|",
    ]
    for row in rows:
        stock, ours = row["stock"], row["patched"]
        cells = [str(row[k]) for k in ("model", "runner", "mode", "budget", "steps")]
        if stock is None:
            cells += ["none stays within", "", ""]
        else:
            cells += [str(stock[key]) for key in ("kind", "lowered", "tokens")]
        cells.append(str(ours["tokens"]) if fits(ours) else "out of memory")
        cells.append("")
        if stock is not None and fits(ours):
            more = ours["tokens"] - stock["tokens"]
            cells[-1] = f"{more:+} ({more / stock['tokens']:+.2%})"
        cells.append(row["recorded"].split("`")[1])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    command(main)

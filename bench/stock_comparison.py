"""Start engines of many kinds, stock and patched. The goal: wherever stock starts
within its budget, patched starts as well, with a KV cache of the same size.

Prints a Markdown table. Every start is a process on a virtual device, forked from one
that has imported vLLM (bench/scenarios). They find warm caches of compiled
kernels and models: the first start of each kind is thrown away. In the end each serves
the largest batches, while another process holds all that was not requested.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench import start as bench_start
from bench.scenarios.loads import NGRAM
from bench.start import MEMORY, MIB, RUNNERS, outcome, requested
from bench.virtual import HOOKS, NAMES, SITES, recorded, results
from scripts.commands import Problem, command, write_whole
from scripts.release import Base

DEVICE = bench_start.DEVICE
MODELS = bench_start.MODELS | {
    "vision": {"model": "vision"},
    "LoRA": {"model": "dense", "llm": {"enable_lora": True}},
}
# Starts of each with --more, alone.
MORE: dict[str, dict[str, Any]] = {
    "MLA": {"model": "MLA", "llm": {"attention_backend": "TRITON_MLA"}},
    **{
        f"{backend}, 64 experts": {
            "model": "MLA, 64 experts",
            "llm": {
                "attention_backend": backend,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 256,
            },
        }
        for backend in ("FLASH_ATTN_MLA", "TRITON_MLA")
    },
    "Mamba1": {"model": "Mamba1"},
    "Mamba2": {"model": "Mamba2"},
    "Falcon-H1": {"model": "Falcon-H1"},
    "Jamba": {"model": "Jamba"},
    "LFM2": {"model": "LFM2"},
    "GPT-OSS": {"model": "GPT-OSS"},
    "Gemma 3": {"model": "sliding"},
    "pooling": {
        "model": "pooling",
        "llm": {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False},
    },
    "Whisper": {
        "model": "Whisper",
        "llm": {"max_model_len": 448, "skip_tokenizer_init": False},
    },
    "fp8 KV": {"model": "dense", "llm": {"kv_cache_dtype": "fp8"}},
    "hybrid and ngrams": {
        "model": "hybrid",
        "llm": {
            "gdn_prefill_backend": "triton",
            "max_model_len": 4096,
            "max_num_seqs": 32,
            "speculative_config": NGRAM,
        },
    },
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"graphs": True},
    "compiled": {"graphs": True, "compile": True},
}
# What else the process has: bytes of tensors, variables of the environment.
HELD = "512 MiB held"
EXPANDABLE = "expandable segments"
BOTH = f"{HELD}, {EXPANDABLE}"
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    HELD: {"tensors": 512 * MIB},
    EXPANDABLE: {},
    BOTH: {"tensors": 512 * MIB},
}
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ENVIRONMENT = {EXPANDABLE: SEGMENTS, BOTH: SEGMENTS}
# The KV cache may be so many bytes smaller: those set aside for fragmentation.
ALLOWED = 64 * MIB


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="pattern: rows whose name has it")
    parser.add_argument("--more", action="store_true", help=f"others: {' '.join(MORE)}")
    parser.add_argument("--first", type=int, default=50, help="utilization, percent")
    parser.add_argument("--last", type=int, default=70)
    parser.add_argument("--step", type=int, default=20)
    parser.add_argument("--results", type=Path, help="JSON file to write")
    parser.add_argument(
        "--read", type=Path, nargs="+", help="such files, to print and start nothing"
    )


def main(args: argparse.Namespace) -> None:
    rows = read(args.read) if args.read else measure(args)
    columns = "| starts | peak/requested | full batches | KV, MiB | KV tokens " * 2
    print("| model | runner | mode | beside | utilization " + columns + "|")
    print("| --- " * 15 + "|")
    for row in rows:
        print(row.line())
    print()
    for line in (*summary(rows), "", *verdict(rows)):
        print(line)
    if args.results:
        told = {"device": DEVICE, "rows": [asdict(row) for row in rows]}
        write_whole(args.results, json.dumps(told, indent=1) + "\n")
    print(f"\n{recorded(args.root)}")


def measure(args: argparse.Namespace) -> list[Row]:
    base = Base.load(args.root, args.base)
    percents = range(args.first, args.last + 1, args.step)
    rows = more(percents) if args.more else grid(percents)
    starts = [start for start in rows if re.search(args.only, start.name)]
    if not starts:
        raise Problem("--only, --first, --last: no row is left")
    with ThreadPoolExecutor(len(SITES)) as pool:
        both = list(pool.map(partial(start_all, base, starts), SITES))
    return [Row(*row) for row in zip(starts, *both, strict=True)]


def read(files: list[Path]) -> list[Row]:
    """The rows of earlier runs.

    Raises:
        Problem: a file has none, or those of another device.
    """
    rows = []
    for file in files:
        try:
            told = json.loads(file.read_text())
            if told["device"] != DEVICE:
                raise Problem(f"{file}: rows of {told['device']}, not of {DEVICE}")
            for row in told["rows"]:
                start = Start(**row["start"])
                rows.append(Row(start, row["official"], row["envelope"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Problem(f"{file}: not a file of --results ({error!r})") from error
    return rows


@dataclass(frozen=True)
class Start:
    model: str
    runner: str
    mode: str
    variant: str
    percent: int

    @property
    def name(self) -> str:
        kind = f"{self.model} {self.runner} {self.mode}"
        return f"{kind} {self.variant} {self.percent / 100:.2f}".replace("  ", " ")

    def case(self, folder: Path) -> dict[str, Any]:
        """As scenarios/start.py takes it."""
        asked = (MODELS | MORE)[self.model]
        llm = {
            "gpu_memory_utilization": self.percent / 100,
            "max_num_seqs": 128,
            **asked.get("llm", {}),
        }
        if self.mode == "graphs":
            llm["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL"}
        elif self.mode == "compiled":
            llm["compilation_config"] = {}  # as released
        return {
            **asked,
            **MODES[self.mode],
            **VARIANTS[self.variant],
            "v2": self.runner == "V2",
            "serve": True,
            "folder": str(folder / self.model),
            "llm": llm,
        }


def grid(percents: range) -> Iterator[Start]:
    for row in product(MODELS, RUNNERS, MODES, VARIANTS, percents):
        yield Start(*row)


def more(percents: range) -> Iterator[Start]:
    for row in product(MORE, RUNNERS, MODES, ("",), percents):
        yield Start(*row)


def start_all(base: Base, starts: list[Start], site: str) -> list[dict[str, Any]]:
    """The result of each start; see scenarios/start.py."""
    folder = base.root / "build/bench-stock"
    found: dict[Start, dict[str, Any]] = {}
    for variables in ({}, SEGMENTS):
        queue: list[Start] = []
        warm = set()
        for start in starts:
            if ENVIRONMENT.get(start.variant, {}) != variables:
                continue
            kind = start.model, start.runner, start.mode == "compiled"
            if kind not in warm:
                queue.append(start)  # its result is replaced by that of the next
                warm.add(kind)
            queue.append(start)
        cases = json.dumps([start.case(folder) for start in queue])
        environment = variables | {"VLLM_CACHE_ROOT": str(folder / site)}
        ran = results(base, site, DEVICE, "start_each", cases, environment, HOOKS)
        for result, start in zip(ran if queue else (), queue, strict=False):
            found[start] = result
            told = f"{site}: {len(found)} of {len(starts)}, {start.name}"
            print(f"{told}: {outcome(result)}", file=sys.stderr, flush=True)
    if len(found) != len(starts):
        raise Problem(f"{site}: {len(found)} of {len(starts)} starts ended.")
    return [found[start] for start in starts]


@dataclass(frozen=True)
class Row:
    """A start with each vLLM; for its results see scenarios/start.py."""

    start: Start
    official: dict[str, Any]
    envelope: dict[str, Any]

    def of(self, site: str) -> dict[str, Any]:
        return self.official if site == "official" else self.envelope

    def started(self, site: str) -> bool:
        return bool(self.of(site)["outcome"] == "started")

    def ratio(self, site: str) -> float:
        """Peak by requested; memory held before the start is in neither."""
        peak = self.of(site).get("process_peak", MEMORY)
        return float(peak) / requested(self.start.percent)

    def lives(self, site: str) -> bool:
        """Whether it serves the largest batches within its request."""
        return bool(self.of(site).get("served") == "lives")

    def within(self, site: str) -> bool:
        return self.started(site) and self.ratio(site) <= 1 and self.lives(site)

    @property
    def fewer(self) -> int:
        """Bytes by which the patched KV cache is smaller."""
        both = self.started("official") and self.started("envelope")
        return self.official["kv"] - self.envelope["kv"] if both else 0

    def line(self) -> str:
        start = self.start
        cells = [start.model, start.runner, start.mode, start.variant]
        cells.append(f"{start.percent / 100:.2f}")
        for site in SITES:
            result = self.of(site)
            cells += [outcome(result), f"{self.ratio(site):.3f}"]
            if self.started(site):
                tokens = result["blocks"] * result["block_size"]
                cells.append("served" if self.lives(site) else "out of memory")
                cells += [f"{result['kv'] / MIB:.0f}", str(tokens)]
            else:
                cells += ["", "", ""]
        return f"| {' | '.join(cells)} |"

    def to_change(self) -> str:
        """The change of flags with which patched has the KV cache of stock."""
        if not self.started("envelope"):
            return f"refused: {self.envelope.get('error', '')[:300]}"
        more = math.ceil(1000 * self.fewer / MEMORY) / 1000
        utilization = self.start.percent / 100
        return (
            f"{self.fewer / MIB:.0f} MiB of KV cache: --gpu-memory-utilization "
            f"{utilization + more:.3f} instead of {utilization:.2f}"
        )


def summary(rows: list[Row]) -> Iterator[str]:
    """Rows of a model and runner, in one.

    "left" is the part of its budget that patched never took, full batches included.
    """
    one = "| start | exceed the budget | fail a full batch "
    told = "| KV cache smaller by, MiB | left, MiB |"
    yield "| model | runner | rows " + one * 2 + told
    yield "| --- " * 11 + "|"
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.start.model, row.start.runner), []).append(row)
    for kind, same in kinds.items():
        cells = [*kind, str(len(same))]
        for site in SITES:
            started = [row for row in same if row.started(site)]
            over = sum(row.ratio(site) > 1 for row in started)
            died = sum(not row.lives(site) for row in started)
            cells += [str(len(started)), str(over), str(died)]
        both = [row for row in same if all(row.started(site) for site in SITES)]
        fewer = [row.fewer // MIB for row in both]
        cells.append(f"{min(fewer)} to {max(fewer)}" if fewer else "")
        served = [row.envelope["peak"] for row in same if row.lives("envelope")]
        left = [(MEMORY - peak) // MIB for peak in served]
        cells.append(f"{min(left)} to {max(left)}" if left else "")
        yield f"| {' | '.join(cells)} |"


def verdict(rows: list[Row]) -> Iterator[str]:
    """How far each goal is met, and where it is not."""
    for site in SITES:
        started = [row for row in rows if row.started(site)]
        over = sum(row.ratio(site) > 1 for row in rows)
        died = sum(not row.lives(site) for row in started)
        yield (
            f"- {NAMES[site]}: {len(started)} of {len(rows)} start; {over} go above "
            f"their budget; {died} run out of memory with a full batch"
        )
    within = [row for row in rows if row.within("official")]
    goals = {
        "stock starts and serves within its budget, patched does not": [
            row for row in within if not row.within("envelope")
        ],
        "the patched KV cache is over 64 MiB smaller, stock is within its budget": [
            row for row in within if row.fewer > ALLOWED
        ],
        "patched goes above its budget, or runs out of memory": [
            row
            for row in rows
            if row.started("envelope") and not row.within("envelope")
        ],
    }
    for goal, missed in goals.items():
        yield f"- {goal}: {len(missed)} (goal: 0)"
        yield from (f"  - {row.start.name}" for row in missed)
    exceeds = [r for r in rows if r.started("official") and not r.within("official")]
    changes = [r for r in exceeds if not r.started("envelope") or r.fewer > ALLOWED]
    yield (
        f"- stock starts and does not stay within its budget: {len(exceeds)}; "
        f"to keep its KV cache, {len(changes)} need a change"
    )
    yield from (f"  - {row.start.name}: {row.to_change()}" for row in changes)


if __name__ == "__main__":
    command(main)

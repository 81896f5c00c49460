"""Rows that make bench-stock counts, and rows that it does not."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.start import MEMORY, MIB
from bench.stock_comparison import DEVICE, Row, Start, grid, read, summary, verdict
from scripts.commands import Problem

HALF = MEMORY // 2


def started(kv: int, peak: int = HALF, served: str = "lives") -> dict[str, Any]:
    return {
        "served": served,
        "outcome": "started",
        "kv": kv,
        "process_peak": peak,
        "peak": MEMORY - 20 * MIB,
        "blocks": 10,
        "block_size": 16,
    }


REFUSED = {"outcome": "ValueError", "error": "too little", "process_peak": 0}


@pytest.mark.parametrize(
    ("official", "ours", "counts"),
    [
        (started(500 * MIB), started(436 * MIB), [0, 0, 0, 0]),
        (started(500 * MIB), started(435 * MIB), [0, 1, 0, 0]),
        (started(500 * MIB), REFUSED, [1, 0, 0, 0]),
        (started(500 * MIB), started(500 * MIB, HALF + 1), [1, 0, 1, 0]),
        (started(500 * MIB, HALF + 1), started(500 * MIB), [0, 0, 0, 1]),
        (started(500 * MIB, HALF + 1), started(0), [0, 0, 0, 1]),
        (started(500 * MIB, HALF + 1), REFUSED, [0, 0, 0, 1]),
        (REFUSED, REFUSED, [0, 0, 0, 0]),
        (started(500 * MIB, served="dies"), started(0), [0, 0, 0, 1]),
        (started(500 * MIB), started(500 * MIB, served="dies"), [1, 0, 1, 0]),
    ],
)
def test_goals_are_counted(
    official: dict[str, Any], ours: dict[str, Any], counts: list[int]
) -> None:
    row = Row(Start("dense", "V1", "eager", "", 50), official, ours)
    lines = list(verdict([row]))
    told = [line for line in lines if ": 1" in line or ": 0" in line]
    goals = [int(re.split(r"\D", line.split(": ")[1])[0]) for line in told[-4:]]
    assert goals == counts, lines


def test_changes_that_keep_the_kv_cache_of_stock() -> None:
    start = Start("dense", "V1", "eager", "", 50)
    row = Row(start, started(500 * MIB, HALF + 1), started(372 * MIB))
    assert row.to_change() == (
        "128 MiB of KV cache: --gpu-memory-utilization 0.550 instead of 0.50"
    )


def test_only_rows_that_both_start_have_a_smaller_kv_cache() -> None:
    start = Start("hybrid", "V2", "graphs", "", 70)
    rows = [
        Row(start, REFUSED, started(500 * MIB)),
        Row(start, started(500 * MIB), started(378 * MIB)),
    ]
    *_, line = summary(rows)
    assert "| 122 to 122 |" in line
    *_, line = summary(rows[:1])
    assert "|  |" in line


def test_each_row_has_a_name() -> None:
    starts = list(grid(range(50, 71, 20)))
    names = {start.name for start in starts}
    assert len(names) == len(starts)
    assert "LoRA V2 compiled expandable segments 0.70" in names
    assert "dense V1 eager 0.50" in names


def test_results_are_read_again(tmp_path: Path) -> None:
    start = Start("dense", "V1", "eager", "", 50)
    row = Row(start, started(500 * MIB, HALF + 1), started(372 * MIB))
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"device": DEVICE, "rows": [asdict(row)]}))
    assert read([file, file]) == [row, row]
    line = list(summary([row, row]))[-1]
    assert line == "| dense | V1 | 2 | 2 | 2 | 0 | 2 | 0 | 0 | 128 to 128 | 20 to 20 |"
    file.write_text(json.dumps({"device": {}, "rows": []}))
    with pytest.raises(Problem, match="not of"):
        read([file])
    file.write_text("{")
    with pytest.raises(Problem, match="not a file of --results"):
        read([file])

"""How make bench-safe lowers stock vLLM, and what its table says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.safe import MIB, Row, measure, table
from bench.scenarios.mixed_load import least


@pytest.mark.parametrize("known", [0, 24])
@pytest.mark.parametrize("need", [0, 1, 8, 24, 25, 100, 128, 1000, 1001])
def test_least_that_lives(known: int, need: int) -> None:
    tried: list[int] = []

    def lives(number: int) -> bool:
        tried.append(number)
        return number >= need

    found = least(lives, known, 8, 4096)
    assert found is not None and found >= need
    assert found == known or found - 8 < need
    assert (found - known) % 8 == 0
    assert len(tried) == len(set(tried)) < 20


def test_more_than_is_tried() -> None:
    assert least(lambda _: False, 16, 8, 256) is None


@pytest.mark.parametrize(
    ("expandable", "released", "kind", "lowered"),
    [
        (24, 64, "expandable", 24),
        (24, 8, "as released", 8),
        (0, 0, "expandable", 0),
        (None, 8, "as released", 8),
        (24, None, "expandable", 24),
    ],
)
def test_best_stock(
    expandable: int | None, released: int | None, kind: str, lowered: int
) -> None:
    beaten: list[int] = []

    def serve(
        site: str, variables: dict[str, str], cases: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        for case in cases:
            told: dict[str, Any] = {
                "available": 1000 * MIB + 7,
                "block": MIB,
                "block_size": 16,
            }
            told |= {"needed": expandable if variables else released, "activations": 0}
            if site == "envelope":
                told |= {"tokens": 16 * 990, "set_aside": 0, "start_above": 0}
            else:
                beaten.append(case["beat"])
            yield told | {"runs": [{"outcome": "served"}]}

    row = Row("8B", "V1", "eager", 0.5)
    ((measured, told),) = measure(serve, [row], steps=7)
    assert measured == row
    assert (told["stock"]["kind"], told["stock"]["lowered"]) == (kind, lowered)
    assert told["stock"]["tokens"] == 16 * (1000 - lowered)
    assert told["patched"]["served"]
    assert beaten == [0, 0 if expandable is None else 16 * (1000 - expandable)]


def test_table_says_who_has_more() -> None:
    row = {"model": "8B", "runner": "V1", "mode": "eager", "budget": 0.5}
    row |= {"steps": 2000, "recorded": "Recorded at commit `abc-dirty` on a day."}
    stock = {"kind": "as released", "lowered": 64, "tokens": 1000}
    ours = {"served": True, "start_above": 0, "tokens": 1010}
    died = ours | {"served": False}
    rows = [
        row | {"stock": s, "patched": p} for s in (stock, None) for p in (ours, died)
    ]
    cells = [[c.strip() for c in line.split("|")[6:-1]] for line in table(rows)[2:]]
    assert {commit for *_, commit in cells} == {"abc-dirty"}
    assert [told for *told, _ in cells] == [
        ["as released", "64", "1000", "1010", "+10 (+1.00%)"],
        ["as released", "64", "1000", "out of memory", ""],
        ["none stays within", "", "", "1010", ""],
        ["none stays within", "", "", "out of memory", ""],
    ]


def test_case_of_a_row() -> None:
    case = Row("8B, n-grams", "V2", "graphs", 0.7).case(steps=7)
    assert case["llm"]["gpu_memory_utilization"] == 0.7
    assert case["llm"]["max_num_batched_tokens"] == 4096
    assert (case["v2"], case["graphs"], case["steps"]) == (True, True, 7)

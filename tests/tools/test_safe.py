"""How make bench-safe lowers stock vLLM, and what its table says."""

from __future__ import annotations

from typing import Any

import pytest

from bench.safe import GRAIN, MIB, Row, best, table
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


class Stock:
    """Engines that need so many MiB beyond their budget, and more for long loads."""

    def __init__(self, need: int, more: int = 0, above: int = 0) -> None:
        self.need, self.more, self.above = need, more, above

    def told(self, lowered: int, long: bool) -> dict[str, Any]:
        missing = self.need + self.more * long - lowered
        return {
            "needed": max(0, -(-missing // GRAIN) * GRAIN),
            "start_above": max(0, (self.above - lowered) * MIB),
            "tokens": 16 * (1000 - lowered),
            "available": (1000 - lowered) * MIB,
            "activations": 0,
        }


@pytest.mark.parametrize(
    ("stocks", "kind", "lowered"),
    [
        ((Stock(64), Stock(24)), "expandable segments", 24),
        ((Stock(8), Stock(24)), "", 8),
        ((Stock(8, above=60), Stock(24)), "expandable segments", 24),
        ((Stock(8, more=80), Stock(24)), "expandable segments", 24),
        ((Stock(8, more=8), Stock(24)), "", 16),
        ((Stock(0), Stock(0)), "expandable segments", 0),
    ],
)
def test_best_stock(stocks: tuple[Stock, Stock], kind: str, lowered: int) -> None:
    kinds = dict(zip(("", "expandable segments"), stocks, strict=True))

    def serve(site: str, kind: str, lowered: int, **more: Any) -> dict[str, Any]:
        assert site == "official"
        return kinds[kind].told(lowered, "steps" in more)

    found = best(serve)
    assert found is not None
    assert (found["kind"], found["lowered"]) == (kind, lowered)
    assert found["tokens"] == 16 * (1000 - lowered)


def test_table_says_who_has_more() -> None:
    row = {"model": "8B", "runner": "V1", "mode": "eager", "budget": 0.5}
    stock = {"kind": "", "lowered": 64, "tokens": 1000}
    ours = {"served": True, "start_above": 0, "tokens": 1010}
    died = ours | {"served": False}
    rows = [
        row | {"stock": s, "patched": p} for s in (stock, None) for p in (ours, died)
    ]
    cells = [[c.strip() for c in line.split("|")[5:-1]] for line in table(rows)[2:]]
    assert cells == [
        ["as released", "64", "1000", "1010", "+10 (+1.00%)"],
        ["as released", "64", "1000", "out of memory", ""],
        ["none stays within", "", "", "1010", ""],
        ["none stays within", "", "", "out of memory", ""],
    ]


def test_utilization_is_lowered_and_the_budget_is_not() -> None:
    case = Row("8B, LoRA", "V2", "graphs", 0.5).case(48, steps=7)
    assert case["llm"] == {"gpu_memory_utilization": 0.5 - 48 / 49152}
    assert (case["share"], case["steps"], case["lora"]) == (0.5, 7, True)

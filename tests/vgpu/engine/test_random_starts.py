"""Starts that are drawn at random, official beside ours (bench/random_starts.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import random_starts
from tests.vgpu.engine.harness import HOOKS, run


@pytest.mark.parametrize(
    ("seed", "first", "count"),
    [
        pytest.param(4, 0, 4, marks=pytest.mark.full),
        pytest.param(5, 0, 40, marks=pytest.mark.long),
    ],
)
def test_patched_is_not_worse(
    seed: int, first: int, count: int, tmp_path: Path
) -> None:
    device = random_starts.device(seed)
    starts = [
        random_starts.draw(seed, number, device)
        for number in range(first, first + count)
    ]
    worse = []
    for scenario, some in random_starts.of_scenario(starts):
        official, ours = (
            random_starts.of_each(
                some,
                run(
                    scenario,
                    random_starts.cases(some, vllm),
                    vllm=vllm,
                    device=device | {"devices": 2 if scenario == "ranks" else 1},
                    hooks=HOOKS,
                    folder=tmp_path,
                    timeout=400 + 60 * count,
                )["every"],
            )
            for vllm in ("official", "envelope")
        )
        for start, *pair in zip(some, official, ours, strict=True):
            print(random_starts.line(start, *pair))
            worse += [start.seed] if random_starts.worse(start, *pair) else []
    assert not worse


def test_convolution_is_warmed_up_with_its_own_length(tmp_path: Path) -> None:
    """Not with one of whatever the memory held that no kernel writes."""
    result = run(
        "convolution",
        {"model": "hybrid"},
        vllm="official",
        device={"memory": 1 << 30},
        folder=tmp_path,
    )
    assert result["peak"] < 1 << 20

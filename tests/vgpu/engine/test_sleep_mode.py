"""Loading in the sleep-mode pool takes what the weights and one conversion take.

The official cases document the bugs: when upstream mends one, its test fails.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, run

SCRIPT = ROOT / "scripts/sleep_load.py"
SEGMENT = 2 << 20
# What the official release ends with where ours loads.
CASES = {
    "churn": "OutOfMemoryError",
    "growing": "OutOfMemoryError",
    "experts": "OutOfMemoryError",
    "nvfp4": "OutOfMemoryError",
    "dense": "loaded",
}
SMALL = {"memory": "96MiB"}
cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.topic if c == "experts" else pytest.mark.full)
        for c in CASES
    ],
)


def load(case: str, vllm: str, memory: int | str, folder: Path) -> dict[str, Any]:
    device = {"memory": memory}
    return run(SCRIPT, [case], vllm=vllm, device=device, folder=folder)


@cache
def needed(case: str, folder: Path) -> int:
    """The most that tensors hold at once, on a device where nothing is short."""
    result = load(case, "envelope", "80GiB", folder)
    assert result["outcome"] == "loaded", result
    return int(result["needed"])


@pytest.fixture(scope="session")
def ample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ample")


@cases
def test_official_loads_only_with_memory_to_spare(
    case: str, ample: Path, tmp_path: Path
) -> None:
    """vllm #43951, #48680, #52511."""
    memory = needed(case, ample) * 105 // 100 // SEGMENT * SEGMENT
    result = load(case, "official", memory, tmp_path)
    assert result["outcome"] == CASES[case], result
    if CASES[case] == "OutOfMemoryError":
        assert "CUDA out of memory" in result["error"]


@cases
def test_envelope_loads_in_five_percent_more_than_tensors_hold(
    case: str, ample: Path, tmp_path: Path
) -> None:
    memory = needed(case, ample) * 105 // 100 // SEGMENT * SEGMENT
    result = load(case, "envelope", memory, tmp_path)
    assert result["outcome"] == "loaded", result
    assert result["needed"] == needed(case, ample)
    assert result["needed"] <= result["peak"] <= memory
    # Afterwards PyTorch counts what the device lends.
    assert result["reserved"] == result["after"]


def test_official_allocator_disagrees_with_the_driver(tmp_path: Path) -> None:
    case = {"sequences": 50, "shrink": False}
    result = run("allocator", case, vllm="official", device=SMALL, folder=tmp_path)
    assert result["outcome"] != "agreed"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sequences", [100, pytest.param(400, marks=pytest.mark.full)])
def test_envelope_allocator_agrees_with_the_driver(
    sequences: int, tmp_path: Path
) -> None:
    """Any sequence of allocate, free, sweep, sleep, wake, discard and failures."""
    case = {"sequences": sequences, "shrink": True}
    result = run(
        "allocator", case, vllm="envelope", device=SMALL, folder=tmp_path, timeout=1400
    )
    assert result["outcome"] == "agreed", result
    assert result["steps"] > 10 * sequences


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_reloading_over_swept_pools_does_not_grow(tmp_path: Path) -> None:
    case = {"rounds": 50, "sweep": True}
    device = {"memory": "4GiB"}
    result = run(
        "reload", case, vllm="envelope", device=device, folder=tmp_path, timeout=1400
    )
    first, *later = result["rounds"]
    assert len(later) == 49 and all(later_round == first for later_round in later)
    assert first["asleep"] < first["awake"] // 4
    assert result["reloaded"]

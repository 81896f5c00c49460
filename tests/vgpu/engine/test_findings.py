"""Bugs of stock vLLM, to the byte, and the patched behaviour.

The official cases document the bugs: when upstream fixes one, its test fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vgpu.engine.harness import run

MIB = 2**20
DEVICE = {"memory": "8GiB"}
WEIGHT = 100 * MIB


@pytest.mark.topic
def test_stock_churn_loses_memory_and_fails(tmp_path: Path) -> None:
    """vllm #43951: after one failed allocation nothing can be allocated or freed."""
    result = run("churn", {}, vllm="official", device=DEVICE, folder=tmp_path)
    assert result["outcome"] == "OOM"
    within, after = result["within"], result["after"]
    assert within["live"] == 4 * WEIGHT
    # One transient is unmapped but never released: PyTorch does not count it, the
    # device does.
    assert within["used"] - within["reserved"] == 1900 * MIB
    assert within["used"] == 8030 * MIB
    # The allocation that failed is on record next to those that exist.
    assert within["recorded"] == within["reserved"] + 1830 * MIB
    # The error stays: leaving the pool raises it, and its trim does not happen.
    assert "out of memory" in result["exit"]
    assert after["used"] == within["used"]
    assert result["freed"]["used"] > 0


@pytest.mark.topic
def test_patched_churn_is_bounded_and_returns_all(tmp_path: Path) -> None:
    result = run("churn", {}, vllm="envelope", device=DEVICE, folder=tmp_path)
    assert result["outcome"] == "loaded" and "exit" not in result
    assert result["after"] == dict.fromkeys(
        ("used", "recorded", "reserved", "live"), 24 * WEIGHT
    )
    within = result["within"]
    assert within["used"] == within["recorded"] == within["reserved"] <= 8192 * MIB
    assert not any(result["freed"].values())
    assert "CUDA Error" not in result["stderr"]


@pytest.mark.parametrize(
    "v2", [True, pytest.param(False, marks=pytest.mark.full)], ids=["v2", "v1"]
)
def test_stock_utilization_is_inert_while_graphs_are_profiled(
    v2: bool, tmp_path: Path
) -> None:
    """vllm #40937: the peak of start-up does not depend on the request."""
    memory = 2560 * MIB
    peaks = set()
    for utilization in (0.60, 0.45):
        result = run(
            "start",
            {
                "model": "hybrid",
                "v2": v2,
                "graphs": True,
                "llm": {
                    "gpu_memory_utilization": utilization,
                    "max_num_seqs": 512,
                    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
                },
            },
            vllm="official",
            device={"memory": memory},
            folder=tmp_path,
        )
        # Found only after the profile that the budget was broken for.
        assert "max_num_seqs (512) exceeds available Mamba" in result["error"]
        peaks.add(result["peak"])
    (peak,) = peaks
    assert peak > 0.45 * memory

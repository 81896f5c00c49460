"""The official vLLM starts whole engines on the device, and so does ours.

Peaks are compared with the budget; tokens are noise, their number is not: kernels that
compute give it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import COUNTS, run

GIB = 2**30
DEVICE = {"memory": "8GiB"}
BUDGET = 4 * GIB  # gpu_memory_utilization 0.5
full = pytest.mark.full
TOPIC = ("moe-v2-sleep2", "envelope")

CASES: dict[str, tuple[dict[str, Any], tuple[pytest.MarkDecorator, ...]]] = {
    "dense-v1-sleep1": (
        {"model": "dense", "v2": False, "generate": 4, "sleep": 1},
        (),
    ),
    # Its prompts take several steps.
    "dense-v2-graphs": (
        {
            "model": "dense",
            "graphs": True,
            "generate": 4,
            "llm": {"max_num_batched_tokens": 16},
        },
        (),
    ),
    "moe-v2-sleep2": ({"model": "moe", "sleep": 2, "generate": 4}, ()),
    "hybrid-v2": ({"model": "hybrid"}, ()),
    "dense-v1-graphs": (
        {"model": "dense", "v2": False, "graphs": True, "generate": 4},
        (full,),
    ),
    "dense-v2-compile": (
        {"model": "dense", "graphs": True, "compile": True, "generate": 4},
        (full,),
    ),
    "moe-v1-graphs": (
        {"model": "moe", "v2": False, "graphs": True, "generate": 4},
        (full,),
    ),
    "hybrid-v2-graphs": (
        {
            "model": "hybrid",
            "graphs": True,
            "llm": {"gdn_prefill_backend": "triton"},
        },
        (full,),
    ),
    "hybrid-v1-graphs": (
        {"model": "hybrid", "v2": False, "graphs": True},
        (full,),
    ),
}


# Of starts without sleep mode the series changes the budget: see test_budget.py.
@pytest.mark.parametrize(
    ("case", "vllm"),
    [
        pytest.param(
            case,
            vllm,
            id=f"{name}-{vllm}",
            marks=(*marks, pytest.mark.topic) if (name, vllm) == TOPIC else marks,
        )
        for name, (case, marks) in CASES.items()
        for vllm in (["official", "envelope"] if case.get("sleep") else ["official"])
    ],
)
def test_engine_starts(case: dict[str, Any], vllm: str, tmp_path: Path) -> None:
    result = run("start", case, vllm=vllm, device=DEVICE, hooks=COUNTS, folder=tmp_path)
    assert result["outcome"] == "started", result
    assert result["v2"] == case.get("v2", True)
    assert result["blocks"] > 0 and result["kernels"] > 0
    assert result["used"] <= BUDGET + GIB // 8
    if tokens := case.get("generate"):
        assert result["tokens"] == [tokens] * 4
    if case.get("sleep"):
        sleep = result["sleep"]
        assert sleep["asleep"] <= sleep["awake"] - sleep["pooled"]
        assert sleep["weights"] > sleep["asleep"]
        # All of the pool is back; nothing else came with it.
        assert sleep["pooled"] <= sleep["awake again"] <= sleep["awake"]

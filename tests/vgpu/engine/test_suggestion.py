"""The --kv-cache-memory that vLLM suggests: true and never negative (vllm #57936)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import run

GIB = 2**30
# Three graphs of 650 MiB: once they fit into the request, twice they do not.
DEVICE = {"memory": "8GiB", "graph": "650MiB"}
REQUESTED = 4 * GIB
RUNNERS = [
    pytest.param(False, id="v1", marks=pytest.mark.topic),
    pytest.param(True, id="v2", marks=pytest.mark.long),
]


def start(
    v2: bool, vllm: str, folder: Path, caches: Path | None = None, **llm: Any
) -> dict[str, Any]:
    llm = {"gpu_memory_utilization": REQUESTED / (8 * GIB)} | llm
    # The path of the model is in the name of a plan.
    case = {"v2": v2, "graphs": True, "folder": str(folder / "model"), "llm": llm}
    result = run("start", case, vllm=vllm, device=DEVICE, folder=folder, caches=caches)
    assert result["outcome"] == "started", result
    return result


@pytest.mark.parametrize("v2", RUNNERS)
def test_stock_suggests_too_little(v2: bool, tmp_path: Path) -> None:
    measured = start(v2, "official", tmp_path)
    requested, _ = measured["suggested"]
    assert requested < 0 < measured["kv"]


@pytest.mark.parametrize("v2", RUNNERS)
def test_patched_starts_with_what_it_suggests(v2: bool, tmp_path: Path) -> None:
    measured = start(v2, "envelope", tmp_path)
    limits = REQUESTED, 8 * GIB
    for size, limit in zip(measured["suggested"], limits, strict=True):
        again = start(v2, "envelope", tmp_path, kv_cache_memory_bytes=size)
        assert again["peak"] <= limit
        assert again["blocks"] >= measured["blocks"]


@pytest.mark.long
def test_startup_plan_applies_what_was_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    caches = tmp_path / "caches"
    first, again = (start(False, "envelope", tmp_path, caches) for _ in range(2))
    assert f"kv_cache_memory_bytes={first['suggested'][0]} " in again["stdout"]
    assert again["blocks"] >= first["blocks"]
    assert again["peak"] <= REQUESTED

"""Where the memory went: the report of a start, against the device's own account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import run

MIB, GIB = 2**20, 2**30
MEMORY = 2560 * MIB
# The driver's memory for the context and for a graph is outside of PyTorch.
DEVICE = {"memory": MEMORY, "context": "300MiB", "graph": 700 << 10}
V1 = pytest.param(False, id="v1", marks=(pytest.mark.long, pytest.mark.topic))
LESS_GRAPHS = "--max-cudagraph-capture-size"
MORE_BUDGET = "increase --gpu-memory-utilization"
MORE_LIMIT = "increase --gpu-memory-limit-bytes"
# Another process takes all that is free of the request as a phase begins.
LESS_BUDGET = "decrease --gpu-memory-utilization"


def case(v2: bool, percent: int = 50, **llm: Any) -> dict[str, Any]:
    arguments = {
        "gpu_memory_utilization": percent / 100,
        "max_num_seqs": 128,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
    }
    return {"v2": v2, "graphs": True, "report": True, "llm": arguments | llm}


def fills(v2: bool, phase: str, **llm: Any) -> dict[str, Any]:
    return case(v2, **llm) | {"moved": "2560MiB", "moved_at": phase}


SIZED_FIRST: dict[str, Any] = {"enable_extensible_kv_cache": False}
EAGER: dict[str, Any] = {"enforce_eager": True, "compilation_config": {}}
# The engine, the phase that fails, and two flags of the advice.
FAILURES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "load beyond the limit": (
        case(True, gpu_memory_limit_bytes=440 << 20),
        "load", MORE_LIMIT, "--quantization",
    ),
    "profile beyond the limit": (
        case(True, gpu_memory_limit_bytes=470 << 20),
        "profile", MORE_LIMIT, "--max-num-batched-tokens",
    ),
    "graphs beyond the limit": (
        case(True, gpu_memory_limit_bytes=570 << 20),
        "profile", MORE_LIMIT, LESS_GRAPHS,
    ),
    "graphs beyond the budget": (
        case(True, 9), "kv_cache", MORE_BUDGET, LESS_GRAPHS,
    ),
    "nothing left for the KV cache": (
        case(True, 10, fragmentation_buffer_bytes=128 << 20, **EAGER),
        "kv_cache", MORE_BUDGET, "--max-num-batched-tokens",
    ),
    "load on a full device": (
        fills(True, "load"), "load", "--tensor-parallel-size", "--quantization",
    ),
    "graphs profiled on a full device": (
        fills(True, "profile_graphs", **SIZED_FIRST),
        "profile_graphs", LESS_GRAPHS, "--enforce-eager",
    ),
    "graphs captured on a full device": (
        fills(True, "capture"), "capture", LESS_GRAPHS, "--enforce-eager",
    ),
    "graphs captured next to a KV cache on a full device": (
        fills(True, "capture", **SIZED_FIRST), "capture", LESS_BUDGET, LESS_GRAPHS,
    ),
    "a KV cache larger than the device": (
        case(True, kv_cache_memory_bytes=8 * GIB),
        "kv_cache", "kv_cache_memory_bytes", "at most",
    ),
}  # fmt: skip


def starts(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run(
        "start_each", cases, vllm="envelope", device=DEVICE, folder=folder, timeout=900
    )["every"]
    assert len(results) == len(cases)
    return results


def check_sums(result: dict[str, Any]) -> None:
    """To the byte, whether or not the start succeeded."""
    report = result["report"]
    in_use = sum(size or 0 for size in report["in_use"].values())
    assert report["held_before"] + in_use == result["used_at_report"]
    set_aside = sum(size or 0 for size in report["set_aside"].values())
    assert in_use + set_aside + report["left"] == report["requested"]


@pytest.mark.parametrize("v2", [V1, True])
def test_start_accounts_for_every_byte(v2: bool, tmp_path: Path) -> None:
    limited = case(v2, 90, gpu_memory_limit_bytes=GIB)
    # Graphs are captured once: a device that is full as they are profiled is not met.
    once = fills(v2, "profile_graphs")
    for result in starts([once, limited], tmp_path):
        assert result["outcome"] == "started", result
        check_sums(result)
        report = result["report"]
        assert report["failed_phase"] is None and report["advice"] is None
        assert report["held_before"] == 300 * MIB
        assert report["kv_cache_blocks"] == result["blocks"]
        assert report["kv_cache_tokens"] == 16 * result["blocks"]
        # V1 measures them with a segment that its capture leaves unused.
        unused = result["graphs"] - report["in_use"]["cuda_graphs"]
        assert unused in ((0,) if v2 else (0, 2 * MIB))
        assert not report["cuda_graphs_estimated"]
        # The driver's part of the graphs is in their row.
        assert report["in_use"]["outside_torch"] == 0


def check_failures(names: list[str], v2: bool, folder: Path) -> None:
    cases = [FAILURES[name][0] | {"v2": v2} for name in names]
    for name, result in zip(names, starts(cases, folder), strict=True):
        _, phase, *flags = FAILURES[name]
        assert result["outcome"] in ("ValueError", "OutOfMemoryError"), (name, result)
        report = result["report"]
        assert report["failed_phase"] == phase, (name, report)
        assert all(flag in report["advice"] for flag in flags), (name, report)
        if "full device" not in name:
            check_sums(result)


@pytest.mark.parametrize("v2", [V1, True])
def test_phase_and_advice_beyond_the_budget(v2: bool, tmp_path: Path) -> None:
    check_failures([name for name in FAILURES if "full" not in name], v2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_phase_and_advice_on_a_full_device(v2: bool, tmp_path: Path) -> None:
    check_failures([name for name in FAILURES if "full" in name], v2, tmp_path)

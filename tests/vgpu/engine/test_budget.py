"""Whole starts on shares of a device: the instance stays within its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import run

MIB, GIB = 2**20, 2**30
full, topic = pytest.mark.full, pytest.mark.topic

CONTEXT = {"context": "300MiB", "cublas_handle": "64MiB"}
# cuBLAS's workspace: held before the budget is taken, as a context is.
BEFORE = 32 * MIB
# name: the device, the case, the bytes that the process may have at any time, and how
# the official release ends where it does not leave them.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "limit next to a co-tenant": (
        {"memory": "8GiB", "other": "4GiB"} | CONTEXT,
        {"llm": {"gpu_memory_limit_bytes": 3 * GIB}},
        3 * GIB,
        "",
    ),
    "limit on MIG, NVML refused": (
        {"memory": "8GiB", "mig_uuid": "MIG-a0000000-0000-0000-0000-000000000001"}
        | CONTEXT,
        {"v2": False, "llm": {"gpu_memory_limit_bytes": 3 * GIB}},
        3 * GIB,
        "",
    ),
    # As in most containers: NVML does not know the process.
    "limit, process unknown, a co-tenant that takes 2 GiB": (
        {"memory": "8GiB", "other": "1GiB"} | CONTEXT,
        {
            "moved": "2GiB",
            "moved_at": "connect",
            "llm": {"gpu_memory_limit_bytes": 3 * GIB},
        },
        3 * GIB,
        "",
    ),
    "limit, process unknown, a co-tenant that releases 1 GiB": (
        {"memory": "8GiB", "other": "1GiB"} | CONTEXT,
        {
            "moved": "-1GiB",
            "moved_at": "connect",
            "llm": {"gpu_memory_limit_bytes": 3 * GIB},
        },
        3 * GIB,
        "",
    ),
    "slice that only NVML knows, next to a co-tenant": (
        # As HAMi-core's NVML tells it: others' memory is not the container's.
        {"memory": "8GiB", "nvml_total": "3GiB", "nvml_own_use": True, "other": "4GiB"}
        | CONTEXT,
        {"llm": {"gpu_memory_utilization": 0.8}},
        3 * GIB,
        "is less than desired GPU memory utilization (0.8, 6.4 GiB)",
    ),
    "stale free memory": (
        {"memory": "4GiB", "meminfo_free_stale": True},
        {"llm": {"gpu_memory_utilization": 0.9}},
        int(0.9 * 4 * GIB) + BEFORE,
        "",
    ),
    "co-tenant that releases": (
        {"memory": "8GiB", "other": "4GiB"},
        {"moved": "-2GiB", "llm": {"gpu_memory_utilization": 0.4}},
        int(0.4 * 8 * GIB) + BEFORE,
        "Error in memory profiling. Initial free memory",
    ),
}
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"
REFUSED = {"process unknown": [PROCESSES]}
REFUSED["NVML refused"] = ["nvmlDeviceGetMemoryInfo", PROCESSES]


def cases(*topics: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=topic) if n in topics else n for n in CASES]
    )


def start(name: str, llm: dict[str, Any], vllm: str, folder: Path) -> dict[str, Any]:
    device, case, *_ = CASES[name]
    refused = [call for how in REFUSED if how in name for call in REFUSED[how]]
    return run(
        "start",
        case | {"llm": llm},
        vllm=vllm,
        device=device,
        hooks="".join(
            f'[[inject]]\ncall = "{call}"\nerror = "NoPermission"\ntimes = 1000\n'
            for call in refused
        ),
        folder=folder,
    )


@cases(
    "limit next to a co-tenant",
    "limit, process unknown, a co-tenant that takes 2 GiB",
    "co-tenant that releases",
)
def test_start_stays_in_its_share(name: str, tmp_path: Path) -> None:
    _, case, share, _ = CASES[name]
    # The limit alone decides.
    llm = {"gpu_memory_utilization": 1.0} | case["llm"]
    result = start(name, llm, "envelope", tmp_path)
    assert result["outcome"] == "started", result
    # And uses it.
    assert share - 384 * MIB < result["process_peak"] <= share


@full
@cases("co-tenant that releases")
def test_stock_start_does_not(name: str, tmp_path: Path) -> None:
    _, case, share, error = CASES[name]
    llm = case["llm"]
    if "gpu_memory_limit_bytes" in llm:  # as a fraction: there is no limit
        llm = {"gpu_memory_utilization": share / (8 * GIB)}
    result = start(name, llm, "official", tmp_path)
    if error:
        assert error in result["error"]
    else:
        assert result["outcome"] == "started", result
        assert result["process_peak"] > share


def test_limit_beside_a_neighbour_where_nvml_says_nothing(tmp_path: Path) -> None:
    """Of the used memory, 4 GiB may be the process's, not all: the start was
    refused."""
    calls = "nvmlDeviceGetMemoryInfo*", "nvmlDeviceGet*RunningProcesses*"
    silent = {f'nvml_errors."{call}"': "NoPermission" for call in calls}
    official, ours = (
        run(
            "start",
            {"held": 14 * GIB, "llm": {"gpu_memory_utilization": 10 / 32} | limit},
            vllm=vllm,
            device={"memory": "32GiB"} | CONTEXT | silent,
            folder=tmp_path,
        )
        for vllm, limit in (
            ("official", {}),
            ("envelope", {"gpu_memory_limit_bytes": 10 * GIB}),
        )
    )
    assert official["outcome"] == ours["outcome"] == "started", (official, ours)
    assert official["kv"] - ours["kv"] <= 4 * GIB + 128 * MIB
    assert ours["process_peak"] <= 10 * GIB


@full
@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_two_engines_in_a_slice(vllm: str, tmp_path: Path) -> None:
    """The slice is known to NVML alone, whose free memory is the slice's minus that of
    the container's processes, as HAMi-core's: 1.5 of 4 GiB are left."""
    results = {
        utilization: run(
            "start",
            {
                "neighbour": 5 * GIB // 2,
                "llm": {"gpu_memory_utilization": utilization},
            },
            vllm=vllm,
            device={
                "memory": "10GiB",
                "other": "2GiB",
                "nvml_total": "4GiB",
                "nvml_own_use": True,
            },
            folder=tmp_path,
        )
        for utilization in (0.3, 0.45)
    }
    if vllm == "official":
        # A share of the device, not of the slice.
        peaks = [result["process_peak"] for result in results.values()]
        assert min(peaks) > 3 * GIB // 2
        return
    assert results[0.3]["outcome"] == "started", results
    assert results[0.3]["process_peak"] <= 3 * GIB // 2
    assert results[0.45]["outcome"] == "ValueError"
    assert "Free memory on device" in results[0.45]["error"]


@full
def test_kv_cache_that_breaks_the_limit_is_refused(tmp_path: Path) -> None:
    """Before, it was accepted, and skipped every measurement."""
    limit, kv_cache = 3 * GIB, 3 * GIB - 512 * MIB
    result = run(
        "start",
        {"llm": {"gpu_memory_limit_bytes": limit, "kv_cache_memory_bytes": kv_cache}},
        vllm="envelope",
        device={"memory": "8GiB"} | CONTEXT,
        folder=tmp_path,
    )
    assert result["outcome"] == "ValueError"
    wanted = f"kv_cache_memory_bytes ({kv_cache}) does not fit into what is free"
    assert wanted in result["error"]
    assert result["process_peak"] < limit


@pytest.mark.parametrize("v2", [False, pytest.param(True, marks=full)])
@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_later_pass_peaks_no_higher(vllm: str, v2: bool, tmp_path: Path) -> None:
    """The sampler of the first one makes buffers that it keeps: a row of float32 logits
    for each of 128 programs."""
    llm = {
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "max_num_seqs": 128,
    }
    case = {"model": "llama-8b", "v2": v2, "llm": llm}
    sizes = [
        run(
            "start",
            case | {"profiles": profiles},
            vllm=vllm,
            device={"memory": "24GiB"},
            folder=tmp_path,
        )["kv"]
        for profiles in (1, 2)
    ]
    more = 128 * 128256 * 4 if vllm == "official" else 0
    assert more <= sizes[0] - sizes[1] <= more + 2 * MIB * bool(more)

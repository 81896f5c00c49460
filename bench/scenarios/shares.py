"""What vLLM makes of the memory of each device: total, free, request, consumption.

The argument is a JSON object: "cases", for each device of the run its utilization and,
if any, its limit, memory that another process holds, and memory that it moves during
the load; "platform" names vLLM's platform class where vLLM would find none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from bench.scenarios.result import print_result

HELD = 64 << 20  # before the first snapshot, as a worker holds workspaces
LOAD = 1 << 30


def main() -> None:
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    asked = json.loads(sys.argv[1])
    import vllm.platforms

    from bench.scenarios.device import other_process  # before CUDA is initialized

    if name := asked.get("platform"):
        from vllm.platforms import cuda

        vllm.platforms.current_platform = getattr(cuda, name)()
    # Before CUDA is initialized, as defaults are chosen.
    told = [total(i) for i in range(len(asked["cases"]))]
    results = [measure(i, c, other_process) for i, c in enumerate(asked["cases"])]
    for result, total_before_cuda in zip(results, told, strict=True):
        result["total_before_cuda"] = total_before_cuda
    print_result({"results": results})


def total(device: int) -> int | str:
    from vllm.platforms import current_platform

    try:
        return int(current_platform.get_device_total_memory(device))
    except Exception as error:  # an outcome, not an accident
        return type(error).__name__


def measure(
    device: int, case: dict[str, Any], other_process: Callable[[int, int], None]
) -> dict[str, Any]:
    import torch
    from vllm.config import CacheConfig
    from vllm.utils import mem_utils
    from vllm.utils.mem_utils import MemorySnapshot, memory_profiling
    from vllm.v1.worker.utils import request_memory

    result: dict[str, Any] = {}
    limit: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if case.get("limit"):
        limit = {"gpu_memory_limit_bytes": case["limit"]}
        seen = mem_utils.MemoryOutsideTorch(device)
        with seen.taken_by("CUDA"):
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)
        before = {"outside_torch": seen.bytes}
    if case.get("held"):
        other_process(case["held"], device)
    torch.cuda.set_device(device)
    held = torch.empty(HELD, dtype=torch.uint8, device=device)
    try:
        snapshot = MemorySnapshot(device=f"cuda:{device}", **before)
        result |= {"total": snapshot.total_memory, "free": snapshot.free_memory}
        with memory_profiling(snapshot) as profile:
            load = torch.empty(LOAD, dtype=torch.uint8, device=device)
            if case.get("moved"):
                other_process(case["moved"], device)
        result["consumed"] = profile.non_kv_cache_memory  # there are no activations
        del load
        cache = CacheConfig(gpu_memory_utilization=case["utilization"], **limit)
        result["requested"] = request_memory(snapshot, cache)
    except (RuntimeError, ValueError) as error:  # an outcome, not an accident
        result["error"] = str(error)
    del held
    return result


if __name__ == "__main__":
    main()

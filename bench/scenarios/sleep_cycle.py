"""Put the sleep-mode pool to sleep and wake it up, without an engine.

The argument is a JSON object; DEFAULTS lists its keys. The first line tells what there
is. Each order is a level, and a line answers a cycle of it: seconds of wall clock and
processor, page faults, calls of the virtual device, and bytes of host memory that it
has pinned (on a GPU: by which the machine has less).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

MIB = 1 << 20
DEFAULTS: dict[str, Any] = {
    "bytes": 2 << 30,  # of weights
    "layer": [12 * MIB, 8 * MIB, 64 * MIB, 32 * MIB, 4096, 4096],
    "kv_cache": 512 * MIB,
    "huge_pages": True,
    "orders": [],  # else each line of stdin is one
}
# Tags that are offloaded, as gpu_worker has it.
OFFLOADED = {1: ("weights", "runtime", "cudagraph"), 2: ("runtime", "cudagraph")}
NO_HUGE_PAGES = 41  # PR_SET_THP_DISABLE of Linux's prctl.h


def main() -> None:
    case = DEFAULTS | json.loads(sys.argv[1])
    assert case.keys() == DEFAULTS.keys(), case
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if not case["huge_pages"]:
        assert ctypes.CDLL(None).prctl(NO_HUGE_PAGES, 1, 0, 0, 0) == 0
    import torch
    from vllm.device_allocator import get_mem_allocator_instance

    from bench.scenarios import device, serve

    # As the worker has it while loading.
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    torch.cuda.mem_get_info()
    allocator = get_mem_allocator_instance()
    with allocator.use_memory_pool("weights"):
        weights = load(case["bytes"], case["layer"])
    with allocator.use_memory_pool("kv_cache"):
        kv_cache = torch.empty(case["kv_cache"], dtype=torch.uint8, device="cuda")
    # As a started engine core does: `sleep` and `wake_up` collect garbage.
    gc.collect()
    gc.freeze()
    available = host_available()

    def host() -> int:
        pinned = device.pinned()
        return available - host_available() if pinned is None else pinned

    serve.answer(
        {
            "outcome": "loaded",
            "bytes": sum(t.numel() for t in weights),
            "tensors": len(weights),
            "allocations": len(allocator.pointer_to_data),
        }
    )
    for order in case["orders"] or sys.stdin:
        level = int(order)
        sleep = partial(allocator.sleep, OFFLOADED[level])
        result: dict[str, Any] = {"sleep": measured(sleep) | {"host": host()}}
        result["wake"] = measured(allocator.wake_up) | {"host": host()}
        if level == 1:
            result["kept"] = all(is_filled(t, i) for i, t in enumerate(weights))
        serve.answer(result)
    del kv_cache


def load(size: int, layer: list[int]) -> list[Any]:
    """Weights, each filled from the host with its number: without a kernel."""
    import torch

    host = torch.empty(max(layer), dtype=torch.uint8)
    weights: list[Any] = []
    while sum(t.numel() for t in weights) < size:
        for part in layer:
            weight = torch.empty(part, dtype=torch.uint8, device="cuda")
            weight.copy_(host[:part].fill_(len(weights) % 251))
            weights.append(weight)
    return weights


def is_filled(weight: Any, number: int) -> bool:
    return bool(int(weight[0]) == number % 251 == int(weight[-1]))


def measured(act: Callable[[], object]) -> dict[str, Any]:
    from bench.scenarios import device

    calls = device.calls()
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    act()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result: dict[str, Any] = {"wall": wall, "processor": used}
    result["faults"] = after.ru_minflt - before.ru_minflt
    if calls is not None:
        made = device.calls() or {}
        result["calls"] = {k: made[k] - calls[k] for k in made if made[k] - calls[k]}
    return result


def host_available() -> int:
    """Bytes of the machine's memory that are left."""
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) << 10


if __name__ == "__main__":
    main()

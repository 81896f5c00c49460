"""Transients of varied size next to small weights that stay, in the weights pool.

What loading a quantised mixture of experts does (vllm #43951), without the model.
The argument is a JSON object: "free", if given, is what another process leaves.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from bench.scenarios.result import print_result

MIB = 2**20
ROUNDS = 24


def main() -> None:
    case = json.loads(sys.argv[1])
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    from bench.scenarios import device

    torch.cuda.mem_get_info()  # a context
    if "free" in case:
        device.leave(case["free"])
    before = device.used()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    allocator = CuMemAllocator.get_instance()

    def figures() -> dict[str, int]:
        return {
            "used": device.used() - before,
            "recorded": allocator.get_current_usage(),
            "reserved": torch.cuda.memory_reserved(),
            "live": sum(weight.nbytes for weight in weights),
        }

    weights: list[Any] = []
    result: dict[str, Any] = {"outcome": "loaded"}
    try:
        with allocator.use_memory_pool("weights"):
            try:
                for i in range(ROUNDS):
                    size = 1900 * MIB - i * 40 * MIB + (i % 3) * 90 * MIB
                    transient = torch.empty(size, dtype=torch.uint8, device="cuda")
                    weights.append(
                        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
                    )
                    del transient
            except torch.OutOfMemoryError as error:
                result |= {"outcome": "OOM", "error": str(error)}
            result["within"] = figures()
    except RuntimeError as error:
        result["exit"] = str(error)
    result["after"] = figures()
    weights.clear()
    gc.collect()
    torch.cuda.empty_cache()
    result["freed"] = figures()
    print_result(result)


if __name__ == "__main__":
    main()

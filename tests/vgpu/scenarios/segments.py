"""Memory of a pool in use that PyTorch reclaims when an allocation does not fit.

The device has 3000 MiB, of which 1000 stay allocated. Tensors of the sizes in ROWS
(MiB) are freed. Then an allocation asks for 400 MiB more than is free: in a MemPool
with references, and in use_memory_pool().
"""

from __future__ import annotations

from typing import Any

from bench.scenarios.result import print_result
from tests.vgpu.scenarios import pools

MIB = 2**20
ROWS = {
    "300 and 500": [300, 500],
    "240 of 4": 240 * [4],
    "60 of 16": 60 * [16],
    "50 of 18": 50 * [18],
    "900 of 1": 900 * [1],
}


def main() -> None:
    import torch

    allocator = pools.loading_allocator()

    def empty(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def idle_after_failing(sizes: list[int]) -> int:
        """Idle MiB after the request failed; 0 if it was served."""
        kept = empty(1000 * MIB)
        freed = [empty(size * MIB) for size in sizes]
        freed.clear()
        try:
            empty(torch.cuda.mem_get_info()[0] + 400 * MIB)
        except torch.OutOfMemoryError:
            idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return int(idle // MIB)
        finally:
            del kept
        return 0

    result: dict[str, dict[str, int]] = {"held": {}, "pool": {}}
    for row, sizes in ROWS.items():
        with pools.plain_pool(allocator):
            result["held"][row] = idle_after_failing(sizes)
        torch.cuda.empty_cache()
        with allocator.use_memory_pool("weights"):
            result["pool"][row] = idle_after_failing(sizes)
        torch.cuda.empty_cache()
    print_result(result)


if __name__ == "__main__":
    main()

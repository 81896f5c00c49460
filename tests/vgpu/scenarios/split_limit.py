"""PyTorch alone: a split limit that is set late frees memory in use.

A cached segment is split, and one of its blocks is free. The argument says where that
block lies: at the "start" of the segment or at its "end". Then an allocation does not
fit. Prints a RESULT line: how the allocation ended, the bytes that PyTorch then counts
as allocated, and the process's memory on the device. See docs/upstream.md, "Reports for
PyTorch".
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from bench.scenarios.result import print_result

MIB = 2**20


def allocate(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def main() -> None:
    from vgpu import control

    segment = allocate(512)
    del segment  # cached; the next ones are its parts
    parts = [allocate(mib) for mib in (60, 64, 388)]
    parts.pop({"start": 0, "end": -1}[sys.argv[1]])
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    result: dict[str, Any] = {"outcome": "allocated"}
    try:
        allocate(torch.cuda.mem_get_info()[0] // MIB + 30)
        torch.cuda.empty_cache()  # of that, too
    except RuntimeError as error:
        result = {"outcome": type(error).__name__, "error": str(error).splitlines()[0]}
    result["allocated"] = torch.cuda.memory_allocated() // MIB
    result["held"] = control.process_used() // MIB
    print_result(result)


if __name__ == "__main__":
    main()

"""Two threads: one enters and leaves sleep-mode pools, one empties PyTorch's cache.

The argument is a JSON object: "rounds", and "seconds" after which it counts as hung. A
process that waits for a lock for ever cannot say so: the line that it printed first
then remains its result, when the alarm ends the process.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from bench.scenarios.result import print_result


def main() -> None:
    case = json.loads(sys.argv[1])
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    torch.cuda.mem_get_info()  # a context
    allocator = CuMemAllocator.get_instance()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    print_result({"outcome": "hangs"})
    signal.alarm(case["seconds"])

    done = threading.Event()
    emptied = 0

    def empty_cache() -> None:
        nonlocal emptied
        while not done.is_set():
            torch.cuda.empty_cache()
            emptied += 1

    other = threading.Thread(target=empty_cache)
    other.start()
    for _ in range(case["rounds"]):
        with allocator.use_memory_pool("weights"):
            kept = torch.empty(2**20, device="cuda")
            freed = [torch.empty(2**22, device="cuda") for _ in range(4)]
            del freed
        del kept
    done.set()
    other.join()
    torch.cuda.empty_cache()
    result = {
        "outcome": "finished",
        "emptied": emptied,
        "records": len(allocator.pointer_to_data),
    }
    print_result(result)


if __name__ == "__main__":
    main()

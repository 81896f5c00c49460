"""Memory of a sleep-mode pool is freed while its stream writes it and another thread
captures a graph, in which nothing may wait for the device."""

from __future__ import annotations

import os
import threading

from bench.scenarios.result import print_result


def main() -> None:
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        kept = torch.ones(4 << 20, device="cuda")
    source = torch.ones(8 << 20, device="cuda")
    torch.cuda.synchronize()
    begun, end = threading.Event(), threading.Event()
    result = {"capture": "fine", "free": "fine", "device": "fine"}

    def capture() -> None:
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                begun.set()
                end.wait()
        except RuntimeError as error:
            result["capture"] = str(error)

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait()
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream), allocator.use_memory_pool("weights"):
            written = torch.empty_like(source)
            written.copy_(source, non_blocking=True)
            del written
    except RuntimeError as error:
        result["free"] = str(error)
    end.set()
    thread.join()
    try:
        stream.synchronize()
        torch.cuda.synchronize()
        kept.fill_(2)
        torch.cuda.synchronize()
    except RuntimeError as error:
        result["device"] = str(error)
    print_result(result)
    os._exit(0)  # Memory of a device that failed cannot be freed.


if __name__ == "__main__":
    main()

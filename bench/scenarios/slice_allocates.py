"""How much a process can allocate below a library that slices a GPU, in one JSON line.

The argument is a JSON object: "how" is one of WAYS, "neighbour" the bytes that another
process of the slice takes first, "late" those that one takes once this one has all.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from bench.scenarios.result import print_result
from bench.scenarios.start import HELD, start_neighbour
from vgpu import control

MIB = 2**20
BLOCK = 64 * MIB
OUT_OF_MEMORY = 2
ALLOCATORS = {
    "torch": "",
    "torch, expandable segments": "expandable_segments:True",
    "torch, cudaMallocAsync": "backend:cudaMallocAsync",
}


class Refused(Exception):
    """What the program was told when it could allocate no more."""


def malloc(cuda: ctypes.CDLL) -> Any:
    address = c_void_p()
    if error := cuda.cudaMalloc(byref(address), c_size_t(BLOCK)):
        raise Refused(error)
    return address


def malloc_async(cuda: ctypes.CDLL) -> Any:
    address = c_void_p()
    if error := cuda.cudaMallocAsync(byref(address), c_size_t(BLOCK), None):
        raise Refused(error)
    return address


def create(cuda: ctypes.CDLL) -> Any:
    # CUmemAllocationProp: pinned, of device 0.
    handle, properties = c_uint64(), (c_int * 8)(1, 0, 1, 0)
    if error := cuda.cuMemCreate(
        byref(handle), c_size_t(BLOCK), byref(properties), c_uint64(0)
    ):
        raise Refused(error)
    return handle


WAYS: dict[str, Callable[[ctypes.CDLL], Any]] = {
    "cudaMalloc": malloc,
    "cudaMallocAsync": malloc_async,
    "cuMemCreate": create,
}


def tensor(_: ctypes.CDLL) -> Any:
    import torch

    try:
        return torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        raise Refused(OUT_OF_MEMORY) from None
    except RuntimeError as error:
        raise Refused(str(error).splitlines()[0]) from None


def sources() -> dict[str, Any]:
    """The figure of each source, in bytes, and the true one."""
    import pynvml as n
    import torch

    said: dict[str, Any] = {"held": control.process_used(), "run": control.used()}
    try:
        free, total = torch.cuda.mem_get_info()
        said["mem_get_info"] = {"free": free, "total": total}
    except RuntimeError as error:
        said["mem_get_info"] = {"error": str(error).splitlines()[0]}
    properties = torch.cuda.get_device_properties(0)
    said["properties"] = {"total": properties.total_memory}
    try:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        memory = n.nvmlDeviceGetMemoryInfo(handle)
        said["NVML"] = {"free": memory.free, "total": memory.total}
        listed = n.nvmlDeviceGetComputeRunningProcesses(handle)
        said["NVML"]["processes"] = [p.usedGpuMemory for p in listed]
    except n.NVMLError as error:
        said["NVML"] = {"error": str(error)}
    return said


def main() -> None:
    asked = json.loads(sys.argv[1])
    result: dict[str, Any] = {}
    take = WAYS.get(asked["how"], tensor)
    if neighbour := asked.get("neighbour", 0):
        start_neighbour(neighbour)
    cuda = ctypes.CDLL("libcuda.so.1")
    result["context"] = cuda.cudaFree(None)
    result["first"] = sources()
    held = []
    try:
        while True:
            held.append(take(cuda))
            result["held"] = control.process_used()
    except Refused as why:
        (result["refused"],) = why.args
    result["full"] = sources()
    if late := asked.get("late", 0):
        try:
            start_neighbour(late)
            result["late"] = "started"
        except AssertionError:
            result["late"] = "refused"
        result["beside"] = sources()
    for process in HELD:
        process.communicate()
    print_result(result)


if __name__ == "__main__":
    main()

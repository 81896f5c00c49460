"""A library that slices a GPU by overriding dlsym bounds what runs on the device.

Each test runs a program of this file in a process that is started with slice.c.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.device import slicing
from tests.vgpu.device.ctypes_cuda import GIB, MIB, OK, OUT_OF_MEMORY, Cuda
from vgpu import config, launch

HERE = "tests.vgpu.device.test_slicing"  # run as a program, too
SLICE = GIB


def run(
    program: Callable[[], None],
    library: Path,
    folder: Path,
    *,
    order: int | None = None,
    **more: str,
) -> None:
    """`order`: the library's place among preloaded ones, if not the launcher's."""
    device = config.load(settings=["memory=8GiB", "other=2GiB", "context=64MiB"])
    base = os.environ | slicing.environment(library, SLICE, folder) | more
    with launch.device(device, base) as env:
        if order is not None:
            preload = [p for p in env["LD_PRELOAD"].split(":") if p != str(library)]
            preload.insert(order, str(library))
            env["LD_PRELOAD"] = ":".join(preload)
        done = subprocess.run(
            [sys.executable, "-m", HERE, program.__name__],
            env=env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def driver_info(gpu: Cuda) -> tuple[int, int]:
    free, total = c_size_t(), c_size_t()
    assert gpu.call("cuMemGetInfo_v2", byref(free), byref(total)) == OK
    return free.value, total.value


def driver_malloc(gpu: Cuda, size: int) -> tuple[int, int]:
    address = c_uint64()
    error = gpu.call("cuMemAlloc_v2", byref(address), c_size_t(size))
    return error, address.value


def runtime_and_driver() -> None:
    gpu = Cuda()

    def free() -> int:
        assert gpu.info() == driver_info(gpu)
        left, total = gpu.info()
        assert total == SLICE
        return left

    total = c_size_t()
    assert gpu.call("cuDeviceTotalMem_v2", byref(total), c_int(0)) == OK
    assert free() == total.value == SLICE

    error, first = gpu.malloc(SLICE - 4 * MIB)
    assert (error, free()) == (OK, 4 * MIB)
    over = 4 * MIB + 1
    assert gpu.malloc(over)[0] == driver_malloc(gpu, over)[0] == OUT_OF_MEMORY
    assert gpu.create(6 * MIB)[0] == OUT_OF_MEMORY
    slot = c_void_p()
    asynchronous = gpu.call("cudaMallocAsync", byref(slot), c_size_t(over), None)
    assert (asynchronous, free()) == (OUT_OF_MEMORY, 4 * MIB)

    error, second = driver_malloc(gpu, 2 * MIB)
    assert (error, free()) == (OK, 2 * MIB)
    error, handle = gpu.create(2 * MIB)
    assert (error, free()) == (OK, 0)
    assert gpu.malloc(1)[0] == OUT_OF_MEMORY

    assert gpu.release(handle) == gpu.free(second) == OK
    assert gpu.call("cuMemFree_v2", c_uint64(first)) == OK
    assert gpu.call("cudaMallocAsync", byref(slot), c_size_t(SLICE), None) == OK
    assert free() == 0
    assert gpu.call("cudaFreeAsync", slot, None) == OK
    assert free() == SLICE


# As vLLM's allocator for sleep mode does, which is linked with the driver.
LINKED = """
#include <cuda.h>
CUresult info(size_t* free, size_t* total) { return cuMemGetInfo(free, total); }
"""


def linked_and_looked_up() -> None:
    gpu, linked = Cuda(), ctypes.CDLL(os.environ["LINKED"])
    free, total = c_size_t(), c_size_t()
    assert gpu.call("cudaFree", None) == linked.info(byref(free), byref(total)) == OK
    assert free.value == total.value == SLICE
    asked = ctypes.cast(gpu.lib.cuMemGetInfo_v2, c_void_p).value
    for call in "cuGetProcAddress_v2", "cudaGetDriverEntryPointByVersion":
        found = c_void_p()
        arguments = byref(found), c_int(13000), c_uint64(0), None
        assert gpu.call(call, b"cuMemGetInfo", *arguments) == OK
        assert found.value == asked


def held(size: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process that holds bytes until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", HERE, "hold", str(size)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout and process.stdout.readline() == "0\n"
    return process


def hold() -> None:
    print(Cuda().malloc(int(sys.argv[2]))[0], flush=True)
    sys.stdin.read()


def nvml() -> None:
    import pynvml as n

    n.nvmlInit()
    handle = n.nvmlDeviceGetHandleByIndex(0)

    def memory(**version: Any) -> tuple[int, int, int]:
        found = n.nvmlDeviceGetMemoryInfo(handle, **version)
        return found.total, found.used, found.free

    def processes() -> dict[int, int]:
        found = n.nvmlDeviceGetComputeRunningProcesses(handle)
        return {p.pid: p.usedGpuMemory for p in found}

    assert memory() == (SLICE, 0, SLICE)
    preloaded = os.environ["LD_PRELOAD"].split(":")
    outside = os.environ | {
        "LD_PRELOAD": ":".join(p for p in preloaded if not p.endswith("slice.so"))
    }
    beside = held(2 * GIB, outside)  # on the device, in no slice
    within = held(300 * MIB, dict(os.environ))
    gpu = Cuda()
    assert gpu.malloc(500 * MIB)[0] == OK
    left = SLICE - 800 * MIB
    assert memory() == (SLICE, 800 * MIB, left)
    assert memory(version=n.nvmlMemory_v2) == (SLICE, 800 * MIB, left)
    assert processes() == {os.getpid(): 500 * MIB, within.pid: 300 * MIB}
    assert gpu.malloc(left + 1)[0] == OUT_OF_MEMORY
    for process in beside, within:
        process.communicate()
    assert memory() == (SLICE, 500 * MIB, SLICE - 500 * MIB)


def torch_allocates() -> None:
    import torch

    assert torch.cuda.mem_get_info() == (SLICE, SLICE)
    assert torch.cuda.get_device_properties(0).total_memory == SLICE
    most = SLICE - 64 * MIB
    tensor = torch.empty(most, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (SLICE - torch.cuda.memory_reserved(), SLICE)
    with pytest.raises(torch.OutOfMemoryError, match="total capacity of 1024.00 MiB"):
        torch.empty(66 * MIB, dtype=torch.uint8, device="cuda")
    rest = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    del tensor, rest
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (SLICE, SLICE)


@pytest.mark.parametrize("order", [0, 99])
def test_runtime_and_driver_calls_share_the_slice(
    library: Path, tmp_path: Path, order: int
) -> None:
    run(runtime_and_driver, library, tmp_path, order=order)


def test_calls_that_are_linked_or_looked_up_are_the_slices(
    library: Path, tmp_path: Path
) -> None:
    source = tmp_path / "linked.c"
    source.write_text(LINKED)
    linked = slicing.compiled(tmp_path, source)
    run(linked_and_looked_up, library, tmp_path, LINKED=str(linked))


def test_nvml_tells_of_the_slice_and_its_processes(
    library: Path, tmp_path: Path
) -> None:
    run(nvml, library, tmp_path)


@pytest.mark.parametrize("expandable", [False, True])
def test_pytorch_is_bounded(library: Path, tmp_path: Path, expandable: bool) -> None:
    settings = f"expandable_segments:{expandable}"
    run(torch_allocates, library, tmp_path, PYTORCH_CUDA_ALLOC_CONF=settings)


if __name__ == "__main__":
    globals()[sys.argv[1]]()

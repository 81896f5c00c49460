"""NVML, MIG and the errors that slices answer with."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import byref
from typing import Any

import pytest

MIB, GIB = 2**20, 2**30
MIG = "MIG-11111111-2222-3333-4444-555555555555"
GPU = "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"


def nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


@pytest.mark.vgpu(profile="rtx5090", other="1GiB", devices=2)
def test_nvml_reports_devices_and_memory() -> None:
    n = nvml()
    assert n.nvmlDeviceGetCount() == 2
    handle = n.nvmlDeviceGetHandleByIndex(1)
    assert n.nvmlDeviceGetName(handle) == "NVIDIA GeForce RTX 5090"
    assert n.nvmlDeviceGetCudaComputeCapability(handle) == (12, 0)
    memory = n.nvmlDeviceGetMemoryInfo(handle)
    assert (memory.total, memory.used) == (32607 * MIB, GIB)
    uuid = n.nvmlDeviceGetUUID(handle)
    assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(uuid)) == 1
    pci = n.nvmlDeviceGetPciInfo(handle)
    assert pci.bus == 2
    assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(pci.busId)) == 1


@pytest.mark.vgpu(
    memory="8GiB", other="4GiB", nvml_total="3GiB", nvml_own_use=True, context="1MiB"
)
def test_nvml_of_a_slice_counts_its_own_processes() -> None:
    from tests.vgpu.device.ctypes_cuda import Cuda

    n = nvml()
    handle = n.nvmlDeviceGetHandleByIndex(0)
    assert n.nvmlDeviceGetMemoryInfo(handle).free == 3 * GIB
    gpu = Cuda()
    gpu.malloc(GIB)
    used = GIB + MIB
    memory = n.nvmlDeviceGetMemoryInfo(handle)
    assert (memory.total, memory.used, memory.free) == (3 * GIB, used, 3 * GIB - used)
    assert gpu.info() == (4 * GIB - used, 8 * GIB)
    beside = [sys.executable, "-c", BESIDE]
    done = subprocess.run(beside, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(3 * GIB - 2 * used)]


# Another process of the same slice: what NVML tells it is free.
BESIDE = """
import ctypes, pynvml
cuda, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(1 << 30)) == 0
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)
"""


@pytest.mark.vgpu(memory="1GiB")
def test_every_version_of_a_call_exists() -> None:
    """As in the real library, where a loader looks them up by any."""
    import ctypes
    import re
    from pathlib import Path

    import pynvml

    known = set(re.findall(r'"(nvml[A-Z]\w+)"', Path(pynvml.__file__).read_text()))
    library = ctypes.CDLL("libnvidia-ml.so.1")
    for name in known:
        call, _, newest = name.rpartition("_v")
        older = range(2, int(newest)) if newest.isdecimal() else range(0)
        first = [call] if older else []
        for each in (name, *first, *(f"{call}_v{n}" for n in older)):
            assert hasattr(library, each), each
    count, handle = ctypes.c_uint(), ctypes.c_void_p()
    assert library.nvmlInit() == library.nvmlDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == 1
    assert library.nvmlDeviceGetHandleByIndex(0, ctypes.byref(handle)) == 0
    kind = ctypes.c_int()
    link = library.nvmlDeviceGetNvLinkRemoteDeviceType
    assert link(handle, 0, ctypes.byref(kind)) == pynvml.NVML_ERROR_NOT_SUPPORTED
    # What follows the first struct of each call belongs to the caller.
    info = (ctypes.c_uint * 64)(*[7] * 64)
    for call, words in ("", 8), ("_v2", 9), ("_v3", 17):
        info[:] = [7] * 64
        assert getattr(library, f"nvmlDeviceGetPciInfo{call}")(handle, info) == 0
        assert (info[5], set(info[words:])) == (1, {7})  # the bus


@pytest.mark.vgpu(memory="8GiB")
def test_processes_are_listed_in_the_struct_of_the_version() -> None:
    import ctypes

    from tests.vgpu.device.ctypes_cuda import Cuda

    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, n = ctypes.c_void_p(), ctypes.c_uint(0)
    assert library.nvmlInit() == 0
    assert library.nvmlDeviceGetHandleByIndex(0, ctypes.byref(handle)) == 0
    call = "nvmlDeviceGetComputeRunningProcesses"
    assert getattr(library, call)(handle, ctypes.byref(n), None) == 0 == n.value
    Cuda().info()  # a context, of 0 bytes unless the configuration says more
    for version, words in ("", 2), ("_v2", 3), ("_v3", 3):
        processes = (ctypes.c_uint64 * 8)(*[7] * 8)
        n.value = 8
        assert getattr(library, call + version)(handle, ctypes.byref(n), processes) == 0
        pid = processes[0] & 0xFFFFFFFF
        assert (n.value, pid, processes[1]) == (1, os.getpid(), 0)
        assert set(processes[words:]) == {7}


@pytest.mark.vgpu(memory="8GiB")
def test_processes_are_listed_with_what_they_use() -> None:
    from tests.vgpu.device.ctypes_cuda import Cuda

    n = nvml()
    Cuda().malloc(GIB)
    handle = n.nvmlDeviceGetHandleByIndex(0)
    (process,) = n.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (os.getpid(), GIB)
    assert n.nvmlDeviceGetMPSComputeRunningProcesses(handle) == []


@pytest.mark.vgpu(memory="8GiB", mps=True)
def test_clients_of_mps_are_listed_as_such() -> None:
    from tests.vgpu.device.ctypes_cuda import Cuda

    n = nvml()
    Cuda().malloc(GIB)
    handle = n.nvmlDeviceGetHandleByIndex(0)
    (process,) = n.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (os.getpid(), GIB)
    assert n.nvmlDeviceGetComputeRunningProcesses(handle) == []


@pytest.mark.vgpu(
    memory="20GiB",
    mig_uuid=MIG,
    uuid=GPU,
    mig_parent_total="80GiB",
    env={"CUDA_VISIBLE_DEVICES": MIG},
)
def test_mig_instance_and_its_parent() -> None:
    n = nvml()
    parent = n.nvmlDeviceGetHandleByIndex(0)
    assert n.nvmlDeviceGetMemoryInfo(parent).total == 80 * GIB
    assert n.nvmlDeviceGetMigMode(parent) == [1, 1]
    assert n.nvmlDeviceGetUUID(parent) == GPU
    instance = n.nvmlDeviceGetHandleByUUID(MIG)
    assert n.nvmlDeviceGetMemoryInfo(instance).total == 20 * GIB
    assert n.nvmlDeviceIsMigDeviceHandle(instance)
    again = n.nvmlDeviceGetMigDeviceHandleByIndex(parent, 0)
    assert n.nvmlDeviceGetUUID(again) == MIG
    up = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
    assert n.nvmlDeviceGetUUID(up) == GPU
    import torch

    assert torch.cuda.mem_get_info()[1] == 20 * GIB


@pytest.mark.vgpu(
    memory="20GiB",
    mig_uuid=MIG,
    nvml_errors={"nvmlDeviceGetMemoryInfo@parent": "NoPermission"},
)
def test_error_may_be_the_parents_alone() -> None:
    n = nvml()
    with pytest.raises(n.NVMLError_NoPermission):
        n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0))
    assert n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByUUID(MIG)).total


@pytest.mark.vgpu(profile="gb10")
def test_gb10_does_not_tell_its_memory_by_nvml() -> None:
    n = nvml()
    with pytest.raises(n.NVMLError_NotSupported):
        n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0))
    import torch

    assert torch.cuda.get_device_properties(0).is_integrated


@pytest.mark.vgpu(devices=2, device={"0": {"memory": "8GiB"}, "1": {"profile": "gb10"}})
def test_errors_of_a_profile_are_those_of_its_device() -> None:
    n = nvml()
    first, second = map(n.nvmlDeviceGetHandleByIndex, range(2))
    assert n.nvmlDeviceGetMemoryInfo(first).total == 8 << 30
    with pytest.raises(n.NVMLError_NotSupported):
        n.nvmlDeviceGetMemoryInfo(second)


@pytest.mark.vgpu(memory="8GiB", nvml_errors="NoPermission")
def test_every_call_may_fail() -> None:
    import pynvml

    with pytest.raises(pynvml.NVMLError_NoPermission):
        pynvml.nvmlInit()


@pytest.mark.vgpu(memory="8GiB", nvml="absent")
def test_nvml_may_be_absent() -> None:
    import pynvml

    with pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()


@pytest.mark.vgpu(memory="8GiB")
def test_nvml_error_may_be_injected_once() -> None:
    from vgpu import control

    n = nvml()
    handle = n.nvmlDeviceGetHandleByIndex(0)
    control.inject("nvmlDeviceGetMemoryInfo", error="GpuIsLost")
    with pytest.raises(n.NVMLError_GpuIsLost):
        n.nvmlDeviceGetMemoryInfo(handle)
    assert n.nvmlDeviceGetMemoryInfo(handle).total == 8 * GIB


@pytest.mark.vgpu(memory="8GiB")
def test_no_device_has_a_fabric() -> None:
    n = nvml()
    handle = n.nvmlDeviceGetHandleByIndex(0)
    for version in (2, 3):
        info = getattr(n, f"c_nvmlGpuFabricInfo_v{version}_t")()
        info.state, asked = n.NVML_GPU_FABRIC_STATE_COMPLETED, info.version
        n.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
        assert info.version == asked
        assert info.state == n.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    info.version = 1
    with pytest.raises(n.NVMLError):
        n.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))


@pytest.mark.vgpu
def test_calls_of_nvml_are_counted() -> None:
    from vgpu import control

    n = nvml()
    n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0))
    n.nvmlInit()
    assert control.made("nvmlInit*") == 2
    assert control.made("nvmlDevice*") == 2

"""Contexts: what needs one, how long it lives, and the errors where there is none."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import pytest

from tests.vgpu.device.ctypes_cuda import GIB, MIB, OK, Cuda

NOT_INITIALIZED, INVALID_CONTEXT = 3, 201


@pytest.mark.vgpu(memory="1GiB")
def test_nothing_goes_before_the_driver_is_initialized() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    n, address = c_int(), c_uint64()
    size, context = c_size_t(2 * MIB), c_void_p()
    nothing = [c_uint64(0)] * 3
    for call, *arguments in [
        ("cuDeviceGetCount", byref(n)),
        ("cuDevicePrimaryCtxRetain", byref(context), 0),
        ("cuMemAlloc_v2", byref(address), size),
        ("cuMemAddressReserve", byref(address), size, *nothing),
    ]:
        assert getattr(cuda, call)(*arguments) == NOT_INITIALIZED, call
    assert cuda.cuDriverGetVersion(byref(n)) == cuda.cuInit(0) == OK
    assert cuda.cuDeviceGetCount(byref(n)) == OK
    # Virtual memory needs no context; a thread's allocations are its context's.
    assert cuda.cuMemAddressReserve(byref(address), size, *nothing) == OK
    assert cuda.cuMemAlloc_v2(byref(address), size) == INVALID_CONTEXT
    assert cuda.cuDevicePrimaryCtxRetain(byref(context), 0) == OK
    assert cuda.cuMemAlloc_v2(byref(address), size) == INVALID_CONTEXT
    assert cuda.cuCtxSetCurrent(context) == OK
    assert cuda.cuMemAlloc_v2(byref(address), size) == OK


@pytest.mark.vgpu(memory="1GiB", context="100MiB")
def test_context_ends_with_its_last_release() -> None:
    from vgpu import control

    gpu = Cuda()
    context, flags, active = c_void_p(), c_int(), c_int()

    def state() -> tuple[int, int]:
        call = "cuDevicePrimaryCtxGetState"
        assert gpu.call(call, 0, byref(flags), byref(active)) == OK
        return active.value, control.used() // MIB

    assert state() == (0, 0)
    for _ in range(2):
        assert gpu.call("cuDevicePrimaryCtxRetain", byref(context), 0) == OK
    assert gpu.call("cuCtxSetCurrent", context) == OK
    assert gpu.call("cuDevicePrimaryCtxRelease_v2", 0) == OK
    assert state() == (1, 100)
    assert gpu.call("cuDevicePrimaryCtxRelease_v2", 0) == OK
    assert state() == (0, 0)
    assert gpu.call("cuDevicePrimaryCtxRelease_v2", 0) == INVALID_CONTEXT
    free, total = c_size_t(), c_size_t()
    assert gpu.call("cuMemGetInfo_v2", byref(free), byref(total)) == INVALID_CONTEXT
    assert gpu.info() == (GIB - 100 * MIB, GIB)  # the runtime makes it again
    assert state() == (1, 100)
    for _ in range(3):  # and holds it once
        assert gpu.set_device(0) == OK
    assert gpu.call("cuDevicePrimaryCtxRelease_v2", 0) == OK
    assert state() == (0, 0)


@pytest.mark.vgpu(memory="1GiB")
def test_either_kind_of_memory_is_given_back_by_either_call() -> None:
    gpu = Cuda()
    slot = c_void_p()
    assert gpu.call("cudaMallocAsync", byref(slot), c_size_t(64 * MIB), None) == OK
    assert (gpu.used(), gpu.free(slot.value or 0), gpu.used()) == (64 * MIB, OK, 0)
    _, address = gpu.malloc(64 * MIB)
    assert gpu.call("cudaFreeAsync", c_void_p(address), None) == OK
    assert gpu.used() == 0

"""Single calls: those that the contract calls exact, and those that it refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

import pytest

from tests.vgpu.device.ctypes_cuda import (
    GIB,
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    NONE,
    NOT_SUPPORTED,
    OK,
    OUT_OF_MEMORY,
    READ,
    Cuda,
)
from vgpu import control

G = 2 * MIB


@pytest.mark.vgpu(memory="1GiB")
def test_capacity_is_exact_to_the_byte() -> None:
    gpu = Cuda()
    error, address = gpu.malloc(GIB)
    assert error == OK
    assert gpu.info() == (0, GIB)
    assert gpu.malloc(1) == (OUT_OF_MEMORY, 0)
    assert gpu.create(G)[0] == OUT_OF_MEMORY
    assert gpu.free(address) == OK
    assert gpu.info() == (GIB, GIB)


@pytest.mark.vgpu(memory="1GiB", malloc_block=512)
def test_malloc_block_is_a_parameter() -> None:
    gpu = Cuda()
    assert gpu.malloc(1)[0] == OK
    assert gpu.used() == 512


@pytest.mark.vgpu(memory="184GiB")
def test_huge_device_costs_no_host_memory() -> None:
    import resource

    gpu = Cuda()
    error, address = gpu.malloc(183 * GIB)
    assert error == OK
    assert gpu.memset(address, 0, 183 * GIB) == OK
    assert gpu.write(address + 100 * GIB, b"x") == OK
    assert gpu.memset(address, 0, 183 * GIB) == OK
    assert gpu.read(address + 100 * GIB, 1) == (OK, b"\0")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**20  # KiB


@pytest.mark.vgpu(memory="1GiB")
def test_virtual_memory_refuses_what_the_driver_refuses() -> None:
    gpu = Cuda()
    _, base = gpu.reserve(8 * G)
    _, handle = gpu.create(2 * G)
    assert gpu.reserve(G + 4096)[0] == INVALID_VALUE
    assert gpu.create(G + 4096)[0] == INVALID_VALUE
    assert gpu.create(G, device=7)[0] == 101
    assert gpu.map(base + 4096, 2 * G, handle) == INVALID_VALUE
    assert gpu.map(base, 3 * G, handle) == INVALID_VALUE
    assert gpu.map(base + 7 * G, 2 * G, handle) == INVALID_VALUE
    assert gpu.map(base, 2 * G, handle + 1) == INVALID_VALUE
    assert gpu.allow(base, 2 * G) == INVALID_VALUE
    assert gpu.map(base, 2 * G, handle) == OK
    assert gpu.map(base + G, 2 * G, handle) == INVALID_VALUE  # overlaps
    assert gpu.unmap(base, G) == INVALID_VALUE  # half a mapping
    assert gpu.unreserve(base, 8 * G) == INVALID_VALUE  # still mapped
    assert gpu.free(base) == INVALID_VALUE  # not cudaMalloc's
    exported = c_int()
    assert (
        gpu.call(
            "cuMemExportToShareableHandle",
            byref(exported),
            c_uint64(handle),
            c_int(1),
            c_uint64(0),
        )
        == NOT_SUPPORTED
    )
    granularity = c_size_t()
    from tests.vgpu.device.ctypes_cuda import Location, Properties

    properties = Properties(type=1, location=Location(1, 0))
    gpu.call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), 0)
    assert granularity.value == G
    error, aligned = gpu.reserve(G, 1 << 30)
    assert error == OK and aligned % (1 << 30) == 0


@pytest.mark.vgpu(memory="1GiB", strict=True)
def test_strict_refuses_an_offset_into_a_handle() -> None:
    gpu = Cuda()
    _, base = gpu.reserve(4 * G)
    _, handle = gpu.create(2 * G)
    assert gpu.map(base, G, handle, G) == INVALID_VALUE


@pytest.mark.vgpu(memory="1GiB")
def test_memory_lives_until_released_and_unmapped() -> None:
    gpu = Cuda()
    _, base = gpu.reserve(2 * G)
    _, handle = gpu.create(G)
    assert gpu.map(base, G, handle) == gpu.allow(base, G) == OK
    assert gpu.write(base, b"kept") == OK
    assert gpu.release(handle) == OK
    assert gpu.used() == G
    assert gpu.retain(base) == (OK, handle)
    assert gpu.unmap(base, G) == OK
    assert gpu.used() == G
    assert gpu.map(base + G, G, handle) == gpu.allow(base + G, G) == OK
    assert gpu.read(base + G, 4) == (OK, b"kept")
    assert gpu.unmap(base + G, G) == gpu.release(handle) == OK
    assert gpu.used() == 0


CASES = {
    "unmapped": "gpu.unmap(base, G); error = gpu.memset(base, 0, 16)",
    "partly mapped": "error = gpu.memset(base + G - 8, 1, 16)",
    "reserved only": "error = gpu.write(base + 2 * G, b'x' * 16)",
    "freed": "a = gpu.malloc(G)[1]; gpu.free(a); error = gpu.read(a, 16)[0]",
    "no access": "gpu.allow(base, G, NONE); error = gpu.read(base, 16)[0]",
    "read only": "gpu.allow(base, G, READ); error = gpu.write(base, b'x' * 16)",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.vgpu(memory="1GiB")
def test_illegal_address_is_named_and_sticks(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = Cuda()
    base = gpu.reserve(4 * G)[1]
    handle = gpu.create(G)[1]
    assert gpu.map(base, G, handle) == gpu.allow(base, G) == OK
    scope = {"gpu": gpu, "base": base, "G": G, "NONE": NONE, "READ": READ}
    exec(CASES[case], scope)
    assert scope["error"] == ILLEGAL_ADDRESS
    assert gpu.malloc(G)[0] == ILLEGAL_ADDRESS
    assert gpu.call("cudaDeviceSynchronize") == ILLEGAL_ADDRESS
    for _ in range(2):
        assert gpu.call("cudaGetLastError") == ILLEGAL_ADDRESS
    errors = capfd.readouterr().err
    assert "illegal address 0x" in errors and "16 bytes" in errors
    if case not in ("unmapped",):
        assert f"nearest mapping {hex(base)}, {G} bytes" in errors


@pytest.mark.vgpu(memory="1GiB")
def test_copies_move_contents_and_cross_mappings() -> None:
    gpu = Cuda()
    _, base = gpu.reserve(3 * G)
    for i in (2, 0, 1):  # physical memory in another order than addresses
        _, handle = gpu.create(G)
        assert gpu.map(base + i * G, G, handle) == OK
    assert gpu.allow(base, 3 * G) == OK
    data = os.urandom(2 * G)
    assert gpu.write(base + G // 2, data) == OK
    assert gpu.read(base + G // 2, 2 * G) == (OK, data)
    _, other = gpu.malloc(2 * G)
    assert gpu.copy(other, base + G // 2, 2 * G) == OK
    assert gpu.read(other, 2 * G) == (OK, data)
    assert gpu.memset(base + G - 1, 7, 2) == OK
    assert gpu.read(base + G - 1, 2) == (OK, b"\7\7")
    error = gpu.call("cuMemsetD32_v2", c_uint64(other), c_uint(0x01020304), c_size_t(3))
    assert error == OK
    assert gpu.read(other, 13)[1] == bytes([4, 3, 2, 1] * 3) + data[12:13]


@pytest.mark.vgpu(memory="1GiB")
def test_new_memory_does_not_keep_old_contents() -> None:
    gpu = Cuda()
    _, address = gpu.malloc(G)
    gpu.write(address, b"secret")
    gpu.free(address)
    _, again = gpu.malloc(G)
    assert gpu.write(again + 8, b"new") == OK
    assert gpu.read(again, 11) == (OK, bytes(8) + b"new")


@pytest.mark.vgpu(memory="1GiB")
def test_handles_that_are_gone_are_invalid() -> None:
    gpu = Cuda()
    stream, event = gpu.stream(), gpu.event()
    other = gpu.event()
    milliseconds = c_float()
    assert gpu.call("cudaEventElapsedTime", byref(milliseconds), event, other) == 400
    assert gpu.call("cudaEventRecord", event, stream) == OK
    assert gpu.call("cudaEventRecord", other, stream) == OK
    assert gpu.call("cudaEventElapsedTime", byref(milliseconds), event, other) == OK
    assert milliseconds.value >= 0
    assert gpu.call("cudaStreamDestroy", stream) == OK
    assert gpu.call("cudaStreamDestroy", stream) == INVALID_HANDLE
    assert gpu.call("cudaStreamSynchronize", stream) == INVALID_HANDLE
    assert gpu.call("cudaEventDestroy", event) == OK
    assert gpu.call("cudaEventQuery", event) == INVALID_HANDLE


@pytest.mark.vgpu(memory="1GiB", devices=2)
def test_no_time_is_between_events_of_two_devices() -> None:
    gpu = Cuda()
    milliseconds = ctypes.c_float()

    def recorded(device: int) -> c_void_p:
        assert gpu.set_device(device) == OK
        event = gpu.event()
        assert gpu.call("cudaEventRecord", event, None) == OK
        return event

    first, other, second = recorded(0), recorded(1), recorded(0)
    elapsed = "cudaEventElapsedTime"
    assert gpu.call(elapsed, byref(milliseconds), first, second) == OK
    assert gpu.call(elapsed, byref(milliseconds), first, other) == INVALID_HANDLE


@pytest.mark.vgpu(memory="1GiB")
def test_pools_keep_what_their_threshold_allows() -> None:
    gpu = Cuda()
    pool = gpu.new("cudaDeviceGetDefaultMemPool", c_int(0))

    def allocate() -> c_void_p:
        return gpu.new("cudaMallocAsync", c_size_t(4 * G), None)

    address = allocate()
    assert gpu.used() == 4 * G
    assert gpu.call("cudaFreeAsync", address, None) == OK
    assert gpu.used() == 0
    threshold = c_uint64(2**63)
    gpu.call("cudaMemPoolSetAttribute", pool, c_int(4), byref(threshold))
    gpu.call("cudaFreeAsync", allocate(), None)
    assert gpu.used() == 4 * G
    gpu.call("cudaFreeAsync", allocate(), None)
    assert gpu.used() == 4 * G
    assert gpu.call("cudaMemPoolTrimTo", pool, c_size_t(0)) == OK
    assert gpu.used() == 0


@pytest.mark.vgpu(devices=2, memory="1GiB", device={"1": {"memory": "2GiB"}})
def test_each_device_has_its_own_memory() -> None:
    gpu = Cuda()
    assert gpu.malloc(GIB)[0] == OK
    assert gpu.info() == (0, GIB)
    assert gpu.set_device(1) == OK
    assert gpu.info() == (2 * GIB, 2 * GIB)
    assert gpu.malloc(2 * GIB)[0] == OK
    assert gpu.set_device(2) == 101


@pytest.mark.vgpu(devices=2, memory="1GiB", context="100MiB")
def test_thread_that_asks_for_an_event_makes_no_context() -> None:
    """As PyTorch's NCCL watchdogs of all ranks do, on device 0."""
    gpu = Cuda()
    assert gpu.set_device(1) == OK
    event = gpu.event()
    calls = ("cudaEventQuery", "cudaEventSynchronize", "cuEventQuery")
    with ThreadPoolExecutor(1) as thread:
        errors = list(thread.map(lambda call: gpu.call(call, event), calls))
    assert errors == [OK] * 3
    assert [control.used(device) for device in (0, 1)] == [0, 100 * MIB]


@pytest.mark.vgpu(memory="1GiB")
def test_entry_points_by_name_and_version() -> None:
    gpu = Cuda()

    def find(name: str, version: int) -> int | None:
        function, status = c_void_p(), c_int()
        gpu.call(
            "cuGetProcAddress_v2",
            name.encode(),
            byref(function),
            c_int(version),
            c_uint64(0),
            byref(status),
        )
        return function.value

    new = ctypes.cast(gpu.lib.cuMemAlloc_v2, c_void_p).value
    old = ctypes.cast(gpu.lib.cuMemAlloc, c_void_p).value
    assert find("cuMemAlloc", 13000) == new != old
    assert find("cuMemAlloc", 2000) == old
    unknown = find("cuNobodyKnowsThis", 13000)
    assert unknown
    assert ctypes.CFUNCTYPE(c_int)(unknown)() == NOT_SUPPORTED
    from vgpu import control

    assert control.calls("cuNobodyKnowsThis") == 1
    for call in "cuLaunchKernel_ptsz", "cudaMemcpyAsync_ptsz", "cuMemcpyHtoD_v2_ptds":
        plain = ctypes.cast(getattr(gpu.lib, call[:-5]), c_void_p).value
        assert ctypes.cast(getattr(gpu.lib, call), c_void_p).value == plain


@pytest.mark.vgpu(memory="1GiB")
def test_forked_child_may_not_go_on_and_costs_nothing() -> None:
    gpu = Cuda()
    assert gpu.malloc(G)[0] == OK
    child = os.fork()
    if child == 0:
        os._exit(gpu.malloc(G)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert gpu.used() == G


@pytest.mark.vgpu(memory="1GiB")
def test_processes_of_a_run_share_a_device_and_a_killed_one_gives_back() -> None:
    gpu = Cuda()
    assert gpu.malloc(G)[0] == OK
    script = (
        "import ctypes, sys; c = ctypes.CDLL('libcuda.so.1'); p = ctypes.c_void_p();"
        "print(c.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(512 << 20)), flush=True);"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "0\n"
    assert gpu.used() == G + 512 * MIB
    assert gpu.malloc(600 * MIB)[0] == OUT_OF_MEMORY
    child.kill()
    child.wait()
    assert gpu.malloc(600 * MIB)[0] == OK
    assert gpu.used() == G + 600 * MIB


@pytest.mark.vgpu(memory="1GiB")
def test_attributes_that_pools_lack_are_refused() -> None:
    gpu = Cuda()
    pool = gpu.new("cudaDeviceGetDefaultMemPool", c_int(0))

    def get(attribute: int) -> tuple[int, int]:
        value = c_uint64(2**64 - 1)
        call = "cuMemPoolGetAttribute"
        return gpu.call(call, pool, c_int(attribute), byref(value)), value.value

    def put(attribute: int, value: int) -> int:
        number = byref(c_uint64(value))
        return gpu.call("cuMemPoolSetAttribute", pool, c_int(attribute), number)

    for reuse in (1, 2, 3):  # of 32 bits
        assert get(reuse) == (OK, (2**32 - 1) << 32 | 1)
        assert put(reuse, 0) == OK
        assert get(reuse) == (OK, (2**32 - 1) << 32)
    assert (put(4, 3 * GIB), get(4)) == (OK, (OK, 3 * GIB))
    for current in (5, 7):
        assert (put(current, 0), get(current)) == (INVALID_VALUE, (OK, 0))
    for highest in (6, 8):  # may only be reset
        assert (put(highest, 0), put(highest, 1)) == (OK, INVALID_VALUE)
        assert get(highest) == (OK, 0)
    for absent in (-5, 0, 9, 10, 99):
        assert get(absent) == (INVALID_VALUE, 2**64 - 1)
        assert put(absent, 1) == INVALID_VALUE


@pytest.mark.vgpu(memory="1GiB")
def test_callbacks_of_the_log_are_known_until_they_are_unregistered() -> None:
    gpu = Cuda()
    called = ctypes.CFUNCTYPE(None, c_void_p, c_int, ctypes.c_char_p, c_size_t)
    callback, handle = called(lambda *_: None), c_void_p()
    register, unregister = "cuLogsRegisterCallback", "cuLogsUnregisterCallback"
    assert gpu.call(register, None, None, byref(handle)) == INVALID_VALUE
    assert gpu.call(register, callback, None, None) == OK
    assert gpu.call(register, callback, None, byref(handle)) == OK
    assert gpu.call(unregister, handle) == OK
    assert gpu.call(unregister, handle) == INVALID_VALUE
    assert not control.calls("cuLogs*")

"""An integrated device and its host share one memory."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p, string_at
from pathlib import Path

import psutil
import pytest

from tests.vgpu.device.ctypes_cuda import GIB, MIB, OK, OUT_OF_MEMORY, Cuda

# Between two looks, Python allocates for itself, too.
ABOUT = 8 * MIB
EXACT = MIB


def near(value: int, wanted: int, within: int = ABOUT) -> bool:
    return abs(value - wanted) <= within


def touch(size: int) -> mmap.mmap:
    """Plain host memory, every page written."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, mmap.PAGESIZE):
        block[at] = 1
    return block


@pytest.mark.vgpu(memory="16GiB", integrated=True, other="2GiB")
def test_allocations_of_cuda_are_the_hosts() -> None:
    from vgpu import control

    gpu = Cuda()
    before = gpu.info()[0]
    _, block = gpu.malloc(GIB)
    assert control.used() == 3 * GIB
    pinned = gpu.new("cudaHostAlloc", c_size_t(GIB), c_uint(0))
    assert control.used() == 4 * GIB
    managed = gpu.new("cudaMallocManaged", c_size_t(GIB), c_uint(1))
    assert control.used() == 5 * GIB
    assert near(gpu.info()[0], before - 3 * GIB, EXACT)
    # Written or not, they are counted once.
    for address in block, pinned.value, managed.value:
        assert (
            gpu.call("cudaMemset", c_void_p(address), c_int(7), c_size_t(256 * MIB))
            == OK
        )
    assert near(gpu.info()[0], before - 3 * GIB)
    assert gpu.call("cudaFreeHost", pinned) == OK
    assert control.used() == 4 * GIB
    gpu.free(block)
    assert control.used() == 3 * GIB


@pytest.mark.vgpu(memory="4GiB", integrated=True)
def test_new_memory_is_zero_on_an_integrated_device_too() -> None:
    gpu = Cuda()
    _, block = gpu.malloc(64 * MIB)
    assert gpu.write(block, b"x" * (64 * MIB)) == OK
    gpu.free(block)
    _, block = gpu.malloc(64 * MIB)
    assert gpu.read(block, 64 * MIB)[1] == bytes(64 * MIB)
    pinned = gpu.new("cudaHostAlloc", c_size_t(MIB), c_uint(0))
    assert string_at(pinned, MIB) == bytes(MIB)


@pytest.mark.vgpu(memory="16GiB", integrated=True)
def test_plain_memory_of_a_process_is_counted_when_it_is_touched() -> None:
    gpu = Cuda()
    before = gpu.info()[0]
    untouched = mmap.mmap(-1, GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert near(gpu.info()[0], before)
    block = touch(256 * MIB)
    assert near(gpu.info()[0], before - 256 * MIB)
    assert near(psutil.virtual_memory().available, before - 256 * MIB)
    block.close()
    untouched.close()
    assert near(gpu.info()[0], before)


@pytest.mark.vgpu(memory="16GiB", integrated=True)
def test_registered_memory_is_counted_once() -> None:
    from vgpu import control

    gpu = Cuda()
    before = gpu.info()[0]
    block = touch(256 * MIB)
    start = (c_size_t * 1).from_buffer(block)
    size = c_size_t(256 * MIB)
    assert gpu.call("cudaHostRegister", byref(start), size, c_uint(0)) == OK
    assert control.pinned() == 256 * MIB
    assert control.used() == 0
    assert near(gpu.info()[0], before - 256 * MIB)


@pytest.mark.vgpu(memory="4GiB", integrated=True)
def test_allocation_without_host_memory_is_out_of_memory() -> None:
    from vgpu import control

    gpu = Cuda()
    # Two whole allocations fit, but not next to the process's own memory.
    assert gpu.malloc(2 * GIB)[0] == OK
    assert gpu.malloc(2 * GIB)[0] == OUT_OF_MEMORY
    free = gpu.info()[0]
    assert 1 * GIB < free < 2 * GIB
    block = touch(256 * MIB)
    size = c_size_t(free - 128 * MIB)
    for call in "cudaHostAlloc", "cudaMallocManaged":
        address = c_void_p()
        assert gpu.call(call, byref(address), size, c_uint(1)) == OUT_OF_MEMORY
    block.close()
    assert gpu.malloc(free - 128 * MIB)[0] == OK
    control.other_process("1GiB")
    assert gpu.info()[0] < ABOUT


@pytest.mark.vgpu(memory="16GiB", integrated=True, other="2GiB", page_cache="4GiB")
def test_page_cache_is_available_but_not_free() -> None:
    from vgpu import control

    gpu = Cuda()
    host = psutil.virtual_memory()
    assert host.total == gpu.info()[1] == 16 * GIB
    assert host.available - host.free == 4 * GIB
    assert near(gpu.info()[0], host.free)
    assert near(control.available(), host.available)
    # It makes room.
    assert gpu.malloc(12 * GIB)[0] == OK
    host = psutil.virtual_memory()
    assert gpu.info()[0] == host.free == 0
    assert near(control.available(), host.available)
    assert near(host.cached, host.available, EXACT)


@pytest.mark.vgpu(memory="16GiB", integrated=True)
def test_least_available_is_kept() -> None:
    from vgpu import control

    gpu = Cuda()
    before = gpu.info()[0]
    _, block = gpu.malloc(4 * GIB)
    gpu.free(block)
    assert near(control.least_available(), before - 4 * GIB)
    control.other_process("5GiB")
    control.other_process("-5GiB")
    assert near(control.least_available(), before - 5 * GIB)
    control.reset_peak()
    assert near(control.least_available(), before)
    held = touch(256 * MIB)
    psutil.virtual_memory()
    held.close()
    assert near(control.least_available(), before - 256 * MIB)


CHILD = """
import ctypes, mmap, sys
cuda = ctypes.CDLL("libcuda.so.1")
size = ctypes.c_size_t(1 << 30)
cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), size)
plain = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 256 << 20, 4096):
    plain[at] = 1
open("/proc/meminfo").close()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.vgpu(memory="16GiB", integrated=True)
def test_processes_share_the_host() -> None:
    gpu = Cuda()
    before = gpu.info()[0]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout and child.stdout.readline() == b"ready\n"
    taken = before - gpu.info()[0]
    interpreter = 64 * MIB
    assert 1280 * MIB < taken < 1280 * MIB + interpreter
    child.kill()
    child.wait()
    assert near(gpu.info()[0], before)


def test_report_has_the_least_that_was_available(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    subprocess.run(
        [
            *(sys.executable, "-m", "vgpu", "--memory", "4GiB", "--set"),
            *("integrated=true", "--report", str(report), "--"),
            *(sys.executable, "-c", CHILD),
        ],
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[3],
        check=True,
    )
    (process,) = map(json.loads, report.read_text().splitlines())
    (device,) = process["devices"]
    assert 2688 * MIB < device["least_available"] < 2816 * MIB


@pytest.mark.vgpu(devices=2, device={"1": {"memory": "4GiB", "integrated": True}})
def test_only_the_host_of_an_integrated_device_is_virtual() -> None:
    gpu = Cuda()
    free = gpu.info()[0]
    real = psutil.virtual_memory().total
    held = touch(256 * MIB)
    assert gpu.info()[0] == free
    held.close()
    assert gpu.call("cudaSetDevice", c_int(1)) == OK
    assert psutil.virtual_memory().total == 4 * GIB != real

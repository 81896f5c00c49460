"""Memory and events of another process, by their handles."""

from __future__ import annotations

import ctypes
import socket
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import pytest

from tests.vgpu.device.ctypes_cuda import (
    GIB,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    OK,
    Cuda,
)
from tests.vgpu.device.test_nccl import in_ranks

INVALID_CONTEXT, PEER_ACCESS_UNSUPPORTED = 201, 217
LAZY_ENABLE_PEER_ACCESS = 1
IS_LEGACY_CUDA_IPC_CAPABLE = 10
DISABLE_TIMING, INTERPROCESS = 2, 4


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def raw(handle: Handle) -> bytes:
    return ctypes.string_at(byref(handle), 64)


def export(gpu: Cuda, address: int) -> tuple[int, Handle]:
    handle = Handle()
    return gpu.call("cudaIpcGetMemHandle", byref(handle), c_void_p(address)), handle


def take(gpu: Cuda, handle: Handle, flags: int = 1) -> tuple[int, int]:
    address = c_void_p()
    error = gpu.call("cudaIpcOpenMemHandle", byref(address), handle, c_uint(flags))
    return error, address.value or 0


def leave(gpu: Cuda, address: int) -> int:
    return gpu.call("cudaIpcCloseMemHandle", c_void_p(address))


def capable(gpu: Cuda, address: int) -> bool:
    found = ctypes.c_bool()
    assert not gpu.call(
        "cuPointerGetAttribute",
        byref(found),
        c_int(IS_LEGACY_CUDA_IPC_CAPABLE),
        c_uint64(address),
    )
    return found.value


OWNER, USER = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def tell(rank: int, data: bytes = b"x") -> None:
    (USER if rank else OWNER).sendall(data)


def told(rank: int, size: int = 1) -> bytes:
    return (USER if rank else OWNER).recv(size, socket.MSG_WAITALL)


def received() -> Handle:
    return Handle.from_buffer_copy(told(1, 64))


def contents(rank: int, ranks: int, meet: str) -> None:
    from vgpu import control

    gpu = Cuda()
    gpu.set_device(0)
    error, small = gpu.malloc(1000)
    assert error == OK
    if rank == 0:
        held = control.process_used()
        _, block = gpu.malloc(4 * MIB)
        for address, content in ((block, b"first"), (small, b"small")):
            assert gpu.write(address, content) == OK
            error, handle = export(gpu, address)
            assert error == OK
            assert raw(export(gpu, address + 8)[1]) == raw(handle)  # its block's
            tell(0, raw(handle))
        told(0)
        assert gpu.read(block, 6) == (OK, b"write\0")
        assert gpu.memset(block, 0, 4 * MIB) == OK
        tell(0)
        told(0)
        assert gpu.read(block + MIB, 4) == (OK, b"more")
        assert gpu.free(block) == OK
        assert control.process_used() == held
        tell(0)
        # Other memory at the same address is not what was shared.
        error, again = gpu.malloc(4 * MIB)
        assert (error, again) == (OK, block)
        assert gpu.read(block + MIB, 4) == (OK, bytes(4))
        error, other = export(gpu, again)
        assert error == OK
        assert raw(other) != raw(handle)
        told(0)
        return
    held = control.process_used()
    handle, of_small = received(), received()
    error, block = take(gpu, handle)
    assert error == OK
    assert control.process_used() == held
    assert gpu.read(block, 5) == (OK, b"first")
    error, theirs = take(gpu, of_small)
    assert error == OK
    assert gpu.read(theirs, 5) == (OK, b"small")
    # Opened twice, it is closed twice.
    assert take(gpu, handle) == (OK, block)
    assert leave(gpu, block) == OK
    assert gpu.write(block, b"write") == OK
    tell(1)
    told(1)
    assert gpu.read(block, 5) == (OK, bytes(5))
    assert gpu.write(block + MIB, b"more") == OK
    assert gpu.free(block) == INVALID_VALUE  # it is closed, not freed
    assert export(gpu, block)[0] == INVALID_VALUE
    tell(1)
    told(1)
    assert gpu.read(block + MIB, 4) == (OK, b"more")
    assert leave(gpu, block) == OK
    assert leave(gpu, block) == INVALID_VALUE
    assert leave(gpu, small) == INVALID_VALUE
    assert take(gpu, handle)[0] == INVALID_HANDLE  # freed by now
    tell(1)


@pytest.mark.vgpu(memory="1GiB")
def test_contents_are_shared_and_charged_to_who_allocated() -> None:
    assert in_ranks(2, contents) == [0, 0]


@pytest.mark.vgpu(memory="8GiB", integrated=True)
def test_contents_are_shared_on_unified_memory() -> None:
    assert in_ranks(2, contents) == [0, 0]


def devices(rank: int, ranks: int, meet: str) -> None:
    gpu = Cuda()
    gpu.set_device(rank)
    _, block = gpu.malloc(2 * MIB)
    if rank == 0:
        tell(0, raw(export(gpu, block)[1]))
        told(0)
        return
    handle = received()
    assert take(gpu, handle)[0] == PEER_ACCESS_UNSUPPORTED
    assert take(gpu, handle, flags=0)[0] == INVALID_VALUE
    assert take(gpu, Handle())[0] == INVALID_VALUE
    tell(1)


@pytest.mark.vgpu(memory="1GiB", devices=2)
def test_no_device_reaches_another() -> None:
    assert in_ranks(2, devices) == [0, 0]


@pytest.mark.vgpu(memory="1GiB")
def test_memory_of_another_kind_is_refused() -> None:
    gpu = Cuda()
    gpu.set_device(0)
    _, block = gpu.malloc(2 * MIB)
    error, handle = export(gpu, block)
    assert error == OK
    assert capable(gpu, block)
    # In the process that has it.
    assert take(gpu, handle)[0] == INVALID_CONTEXT
    _, mapped = gpu.reserve(2 * MIB)
    gpu.map(mapped, 2 * MIB, gpu.create(2 * MIB)[1])
    gpu.allow(mapped, 2 * MIB)
    pooled, host = c_void_p(), c_void_p()
    assert not gpu.call("cudaMallocAsync", byref(pooled), c_size_t(2 * MIB), None)
    assert not gpu.call("cudaMallocHost", byref(host), c_size_t(2 * MIB))
    for address in (mapped, pooled.value, host.value, 4096):
        assert export(gpu, address or 0)[0] == INVALID_VALUE
    assert not capable(gpu, mapped)
    assert not capable(gpu, pooled.value or 0)


def events(rank: int, ranks: int, meet: str) -> None:
    gpu = Cuda()
    gpu.set_device(0)
    stream = gpu.stream()
    event = c_void_p()
    make = "cudaEventCreateWithFlags"
    assert gpu.call(make, byref(event), c_uint(INTERPROCESS)) == INVALID_VALUE
    if rank == 0:
        _, block = gpu.malloc(2 * MIB)
        tell(0, raw(export(gpu, block)[1]))
        handle = Handle()
        plain = gpu.event()
        refused = gpu.call("cudaIpcGetEventHandle", byref(handle), plain)
        assert refused == INVALID_HANDLE
        flags = c_uint(INTERPROCESS | DISABLE_TIMING)
        assert gpu.call(make, byref(event), flags) == OK
        # With its event, the work before it is done.
        gpu.fill_async(block, 7, 2 * MIB, stream)
        assert gpu.call("cudaEventRecord", event, stream) == OK
        assert gpu.call("cudaIpcGetEventHandle", byref(handle), event) == OK
        own = c_void_p()
        opened = gpu.call("cudaIpcOpenEventHandle", byref(own), handle)
        assert opened == INVALID_CONTEXT
        tell(0, raw(handle))
        told(0)
        return
    _, block = take(gpu, received())
    assert gpu.call("cudaIpcOpenEventHandle", byref(event), received()) == OK
    assert gpu.call("cudaStreamWaitEvent", stream, event, c_uint(0)) == OK
    assert gpu.call("cudaEventQuery", event) == OK
    assert gpu.read(block, 3) == (OK, b"\7\7\7")
    assert gpu.call("cudaEventDestroy", event) == OK
    tell(1)


@pytest.mark.vgpu(memory="1GiB", streams_behind=True)
def test_event_of_another_process() -> None:
    assert in_ranks(2, events) == [0, 0]


def send(queue: Any, done: Any) -> None:
    import torch

    kept = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    tensor = torch.arange(1000).cuda()
    queue.put(tensor)
    done.wait()
    assert tensor[0].item() == 41
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    mapped = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    # PyTorch exports the segment as a file descriptor, which the device does not.
    with pytest.raises(RuntimeError, match="not supported"):
        mapped.untyped_storage()._share_cuda_()
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch.cuda.check_error(export(Cuda(), mapped.data_ptr())[0])
    del kept


@pytest.mark.vgpu(memory="1GiB", timeout=120)
def test_torch_shares_tensors() -> None:
    import torch

    spawn = torch.multiprocessing.get_context("spawn")
    queue, done = spawn.Queue(), spawn.Event()
    sender = spawn.Process(target=send, args=(queue, done))
    sender.start()
    tensor = queue.get(timeout=60)
    assert torch.equal(tensor.cpu(), torch.arange(1000))
    assert torch.cuda.memory_reserved() == 0
    tensor[0:1].copy_(torch.tensor([41]))
    del tensor
    done.set()
    sender.join(60)
    assert sender.exitcode == 0
    assert torch.cuda.mem_get_info()[0] == GIB

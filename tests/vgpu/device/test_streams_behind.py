"""Streams whose work is done only when somebody waits for it."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

import pytest

from tests.vgpu.device.ctypes_cuda import (
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    MIB,
    OK,
    OUT_OF_MEMORY,
    Cuda,
    Location,
)

NOT_READY = 600
HOST_TO_DEVICE, DEVICE_TO_HOST = c_int(1), c_int(2)


class Pinned:
    """A byte of pinned memory, and its value."""

    def __init__(self, gpu: Cuda) -> None:
        self.address = gpu.new("cudaHostAlloc", c_size_t(MIB), ctypes.c_uint(0))
        self.byte = ctypes.c_ubyte.from_address(self.address.value or 0)

    def read_of(self, gpu: Cuda, address: int, stream: c_void_p) -> int:
        return gpu.call(
            "cudaMemcpyAsync", self.address, c_void_p(address), c_size_t(1),
            DEVICE_TO_HOST, stream,
        )  # fmt: skip


@pytest.mark.vgpu(memory="1GiB")
def test_off_all_is_done_at_once() -> None:
    gpu = Cuda()
    stream, pinned = gpu.stream(), Pinned(gpu)
    _, address = gpu.malloc(2 * MIB)
    assert gpu.fill_async(address, 5, 8, stream) == OK
    assert pinned.read_of(gpu, address, stream) == OK
    assert (gpu.call("cudaStreamQuery", stream), pinned.byte.value) == (OK, 5)


@pytest.mark.vgpu(memory="1GiB", streams_behind=True, behind_queries=0)
@pytest.mark.parametrize(
    "wait", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaFree", "finish"]
)
def test_work_is_done_when_somebody_waits(wait: str) -> None:
    from vgpu import control

    gpu = Cuda()
    stream, pinned = gpu.stream(), Pinned(gpu)
    _, address = gpu.malloc(2 * MIB)
    _, other = gpu.malloc(2 * MIB)
    assert gpu.fill_async(address, 5, 8, stream) == OK
    assert pinned.read_of(gpu, address, stream) == OK
    for _ in range(100):
        assert gpu.call("cudaStreamQuery", stream) == NOT_READY
    assert pinned.byte.value == 0
    if wait == "finish":
        control.finish(stream.value or 0)
    else:
        arguments = {"cudaStreamSynchronize": [stream], "cudaFree": [c_void_p(other)]}
        assert gpu.call(wait, *arguments.get(wait, [])) == OK
    assert (gpu.call("cudaStreamQuery", stream), pinned.byte.value) == (OK, 5)


@pytest.mark.vgpu(memory="1GiB", streams_behind=True, behind_queries=3)
def test_enough_queries_are_a_wait() -> None:
    gpu = Cuda()
    stream, event = gpu.stream(), gpu.event()
    _, address = gpu.malloc(2 * MIB)
    assert gpu.call("cudaEventQuery", event) == OK  # never recorded
    for _ in range(2):
        assert gpu.fill_async(address, 5, 8, stream) == OK
        assert gpu.call("cudaEventRecord", event, stream) == OK
        asked = [gpu.call("cudaEventQuery", event) for _ in range(4)]
        assert asked == [NOT_READY, NOT_READY, OK, OK]


@pytest.mark.vgpu(memory="1GiB", streams_behind=True, behind_queries=0, behind_us=1000)
def test_work_is_done_after_a_set_time() -> None:
    import time

    gpu = Cuda()
    stream, pinned = gpu.stream(), Pinned(gpu)
    _, address = gpu.malloc(2 * MIB)
    assert gpu.fill_async(address, 5, 8, stream) == OK
    assert pinned.read_of(gpu, address, stream) == OK
    time.sleep(0.002)
    assert pinned.byte.value == 0  # nobody has looked
    assert (gpu.call("cudaStreamQuery", stream), pinned.byte.value) == (OK, 5)


@pytest.mark.vgpu(memory="1GiB", streams_behind=True)
def test_stream_follows_what_it_waits_for() -> None:
    gpu = Cuda()
    one, two, event = gpu.stream(), gpu.stream(), gpu.event()
    pinned = Pinned(gpu)
    _, address = gpu.malloc(2 * MIB)
    assert gpu.fill_async(address, 5, 8, one) == OK
    assert gpu.call("cudaEventRecord", event, one) == OK
    assert gpu.fill_async(address, 6, 8, one) == OK  # after the event
    assert gpu.call("cudaStreamWaitEvent", two, event, 0) == OK
    assert pinned.read_of(gpu, address, two) == OK
    assert gpu.call("cudaStreamSynchronize", two) == OK
    assert pinned.byte.value == 5
    assert gpu.call("cudaStreamQuery", one) == NOT_READY
    assert gpu.read(address, 1) == (OK, b"\5")  # the default stream waits for none
    assert gpu.call("cudaEventSynchronize", event) == OK
    assert gpu.call("cudaStreamSynchronize", one) == OK
    assert gpu.read(address, 1) == (OK, b"\6")


@pytest.mark.vgpu(memory="1GiB", streams_behind=True)
def test_default_stream_waits_for_those_that_block() -> None:
    gpu = Cuda()
    blocking = gpu.stream(0)
    _, address = gpu.malloc(2 * MIB)
    assert gpu.fill_async(address, 5, 8, blocking) == OK
    assert gpu.read(address, 1) == (OK, b"\5")


@pytest.mark.vgpu(memory="1GiB", streams_behind=True)
def test_memory_that_is_unmapped_too_early_is_seen() -> None:
    gpu = Cuda()
    stream = gpu.stream()
    error, handle = gpu.create(2 * MIB)
    _, address = gpu.reserve(2 * MIB)
    assert error == gpu.map(address, 2 * MIB, handle) == gpu.allow(address, 2 * MIB)
    assert gpu.fill_async(address, 5, 8, stream) == OK
    assert gpu.unmap(address, 2 * MIB) == OK
    assert gpu.call("cudaStreamSynchronize", stream) == ILLEGAL_ADDRESS


@pytest.mark.vgpu(memory="1GiB", streams_behind=True)
@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_unregistered_too_early_is_seen(waits: bool) -> None:
    gpu = Cuda()
    stream = gpu.stream()
    _, address = gpu.malloc(2 * MIB)
    memory = ctypes.create_string_buffer(MIB)
    assert gpu.call("cudaHostRegister", memory, c_size_t(MIB), 0) == OK
    assert (
        gpu.call(
            "cudaMemcpyAsync", c_void_p(address), memory, c_size_t(MIB),
            HOST_TO_DEVICE, stream,
        )
        == OK
    )  # fmt: skip
    if waits:
        assert gpu.call("cudaStreamSynchronize", stream) == OK
    assert gpu.call("cudaHostUnregister", memory) == OK
    expected = OK if waits else ILLEGAL_ADDRESS
    assert gpu.call("cudaStreamSynchronize", stream) == expected


@pytest.mark.vgpu(memory="8GiB", streams_behind=True)
def test_pytorch_keeps_what_a_stream_still_uses() -> None:
    """As on a card: the block of a tensor that was recorded is taken again only after
    its event; so is pinned memory after a copy."""
    import torch

    def made() -> torch.Tensor:
        return torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")

    def pinned() -> torch.Tensor:
        return torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)

    stream = torch.cuda.Stream()
    x, host = made(), pinned()
    with torch.cuda.stream(stream):
        x[: 64 * MIB].copy_(host, non_blocking=True)
    x.record_stream(stream)
    addresses = x.data_ptr(), host.data_ptr()
    del x, host
    y, other = made(), pinned()
    assert y.data_ptr() != addresses[0] and other.data_ptr() != addresses[1]
    assert torch.cuda.memory_reserved() == 1024 * MIB
    stream.synchronize()
    assert (made().data_ptr(), pinned().data_ptr()) == addresses
    assert torch.cuda.memory_reserved() == 1024 * MIB


@pytest.mark.vgpu(memory="1GiB", streams_behind=True)
def test_host_functions_come_in_their_order() -> None:
    gpu = Cuda()
    stream, called = gpu.stream(), list[int]()
    note = ctypes.CFUNCTYPE(None, c_void_p)(lambda n: called.append(n or 0))
    for n in range(3):
        assert gpu.call("cudaLaunchHostFunc", stream, note, c_void_p(n)) == OK
    assert called == []
    status = c_int()
    assert gpu.call("cudaStreamIsCapturing", stream, byref(status)) == OK
    assert gpu.call("cudaStreamDestroy", stream) == OK
    assert called == [0, 1, 2]


@pytest.mark.vgpu(memory="1GiB", streams_behind=True, behind_queries=0)
@pytest.mark.parametrize(
    "wait", ["cudaStreamSynchronize", "cudaStreamQuery", "cudaDeviceSynchronize"]
)
def test_work_that_another_thread_does_is_not_done_yet(wait: str) -> None:
    gpu = Cuda()
    stream, ended = gpu.stream(), list[str]()
    begun, waited = threading.Event(), threading.Event()

    def last_work(_: object) -> None:
        begun.set()
        waited.wait(0.2)  # as long as it may take, where the other thread does wait
        ended.append("work")

    def other() -> None:
        begun.wait()
        assert gpu.call(wait, *[stream][: "Device" not in wait]) == OK
        ended.append("wait")
        waited.set()

    function = ctypes.CFUNCTYPE(None, c_void_p)(last_work)
    assert gpu.call("cudaLaunchHostFunc", stream, function, None) == OK
    thread = threading.Thread(target=other)
    thread.start()
    assert gpu.call("cudaStreamSynchronize", stream) == OK
    thread.join()
    assert ended == ["work", "wait"]


@pytest.mark.vgpu(memory="64MiB", streams_behind=True, behind_queries=0)
def test_memory_freed_in_a_stream_lasts_until_the_stream_gets_there() -> None:
    gpu = Cuda()
    stream, other, pinned = gpu.stream(), gpu.stream(), Pinned(gpu)

    def allocate(stream: c_void_p, size: int = 40 * MIB) -> tuple[int, c_void_p]:
        address = c_void_p()
        call = "cudaMallocAsync"
        return gpu.call(call, byref(address), c_size_t(size), stream), address

    def write_and_free(address: c_void_p, value: int) -> None:
        assert gpu.fill_async(address.value or 0, value, 8, stream) == OK
        assert pinned.read_of(gpu, address.value or 0, stream) == OK
        assert gpu.call("cudaFreeAsync", address, stream) == OK

    write_and_free(allocate(stream)[1], 5)
    assert (pinned.byte.value, gpu.used()) == (0, 40 * MIB)
    # The stream's own request gets memory that it freed, and another's, where nothing
    # is left.
    error, address = allocate(stream)
    assert (error, pinned.byte.value, gpu.used()) == (OK, 5, 40 * MIB)
    write_and_free(address, 6)
    assert gpu.call("cudaFreeAsync", address, stream) == INVALID_VALUE
    error, address = allocate(other)
    assert (error, pinned.byte.value, gpu.used()) == (OK, 6, 40 * MIB)
    assert allocate(other)[0] == OUT_OF_MEMORY
    assert gpu.call("cudaFreeAsync", address, other) == OK  # has nothing else to do
    assert gpu.used() == 0


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("order", c_int),
        ("from_hint", Location),
        ("to_hint", Location),
        ("flags", c_uint),
    ]


IN_STREAM_ORDER, DURING_CALL, ANY = 1, 2, 3


def batch(
    gpu: Cuda, version: int, to: list[int], from_: list[int], stream: c_void_p,
    order: int = IN_STREAM_ORDER, first: tuple[int, ...] = (0,),
) -> tuple[int, int | None]:  # fmt: skip
    """The error of copying 8 bytes for each pair, and the index that failed."""
    n, failed = len(to), c_size_t(7)
    function = c_void_p()
    name = ctypes.c_char_p(b"cuMemcpyBatchAsync")
    find = "cuGetProcAddress_v2"
    assert (
        gpu.call(find, name, byref(function), version, ctypes.c_uint64(0), None) == OK
    )
    addresses = [(ctypes.c_uint64 * n)(*a) for a in (to, from_)]
    attributes = (Attributes * len(first))(*[Attributes(order=order)] * len(first))
    arguments = [
        *addresses, (c_size_t * n)(*[8] * n), c_size_t(n),
        attributes, (c_size_t * len(first))(*first), c_size_t(len(first)),
    ]  # fmt: skip
    if version < 13000:
        arguments.append(byref(failed))
    copy = ctypes.CFUNCTYPE(c_int)(function.value or 0)
    return int(copy(*arguments, stream)), failed.value if version < 13000 else None


@pytest.mark.vgpu(memory="1GiB", streams_behind=True, behind_queries=0)
@pytest.mark.parametrize("version", [12080, 13000])
def test_batch_of_copies_is_work_of_its_stream(version: int) -> None:
    gpu = Cuda()
    stream, pinned = gpu.stream(), Pinned(gpu)
    host = pinned.address.value or 0
    _, address = gpu.malloc(2 * MIB)
    assert gpu.fill_async(address, 5, 16, stream) == OK
    pairs = [host, host + 16], [address, address + 8]
    none = 2**64 - 1 if version < 13000 else None
    assert batch(gpu, version, *pairs, stream) == (OK, none)
    second = ctypes.c_ubyte.from_address(host + 16)
    assert (pinned.byte.value, second.value) == (0, 0)
    assert gpu.call("cudaStreamSynchronize", stream) == OK
    assert (pinned.byte.value, second.value) == (5, 5)

    # Sources that are read during the call, and those of memory that is not pinned.
    pinned.byte.value = 9
    back = [address], [host]
    assert batch(gpu, version, *back, stream, DURING_CALL) == (OK, none)
    pinned.byte.value = 1
    pageable = ctypes.create_string_buffer(8)
    there = [ctypes.addressof(pageable)], [address]
    assert batch(gpu, version, *there, stream, ANY) == (OK, none)
    assert pageable.raw[0] == 9

    # Attributes that do not cover the batch, no order, the legacy stream: refused.
    for arguments in (
        (stream, IN_STREAM_ORDER, (1,)),
        (stream, IN_STREAM_ORDER, (0, 2)),
        (stream, IN_STREAM_ORDER, (0, 0)),
        (stream, IN_STREAM_ORDER, ()),
        (stream, 0, (0,)),
        (stream, 4, (0,)),
        (c_void_p(), ANY, (0,)),
        (c_void_p(1), ANY, (0,)),
    ):
        assert batch(gpu, version, *pairs, *arguments) == (INVALID_VALUE, none)


@pytest.mark.vgpu(memory="1GiB")
@pytest.mark.parametrize("version", [12080, 13000])
def test_batch_of_copies_says_which_fails(version: int) -> None:
    gpu = Cuda()
    stream, pinned = gpu.stream(), Pinned(gpu)
    host = pinned.address.value or 0
    _, address = gpu.malloc(2 * MIB)
    assert gpu.free(address) == OK
    found = batch(gpu, version, [host, host], [host + 8, address], stream)
    assert found == (ILLEGAL_ADDRESS, 1 if version < 13000 else None)


@pytest.mark.vgpu(memory="1GiB")
def test_batch_of_copies_is_captured() -> None:
    gpu = Cuda()
    stream, pinned = gpu.stream(), Pinned(gpu)
    host = pinned.address.value or 0
    _, address = gpu.malloc(2 * MIB)
    assert gpu.call("cudaStreamBeginCapture", stream, 0) == OK
    assert batch(gpu, 13000, [host], [address], stream)[0] == OK
    graph = c_void_p()
    assert gpu.call("cudaStreamEndCapture", stream, byref(graph)) == OK
    assert pinned.byte.value == 0
    launchable = gpu.new("cudaGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
    for value in (5, 6):
        assert gpu.fill_async(address, value, 8, stream) == OK
        assert gpu.call("cudaGraphLaunch", launchable, stream) == OK
        assert pinned.byte.value == value

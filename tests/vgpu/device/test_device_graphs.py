"""Captures, graphs and kernels: their effects, and their memory."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint64, c_void_p

import pytest

from tests.vgpu.device.ctypes_cuda import (
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    MIB,
    OK,
    OUT_OF_MEMORY,
    Cuda,
)

G = 2 * MIB


@pytest.mark.vgpu(memory="1GiB")
def test_capture_records_and_a_launch_does_it() -> None:
    gpu = Cuda()
    stream = gpu.stream()
    _, address = gpu.malloc(G)
    assert gpu.begin(stream) == OK
    assert gpu.fill_async(address, 5, 8, stream) == OK
    status, identity = c_int(), c_uint64()
    gpu.call(
        "cudaStreamGetCaptureInfo", stream, byref(status), byref(identity), *[None] * 4
    )
    assert status.value == 1 and identity.value > 0
    error, graph = gpu.end(stream)
    assert error == OK and gpu.node_count(graph) == 1
    assert gpu.read(address, 8) == (OK, bytes(8))
    executable = gpu.new("cudaGraphInstantiateWithFlags", graph, c_uint64(0))
    assert gpu.call("cudaGraphLaunch", executable, stream) == OK
    assert gpu.read(address, 8) == (OK, b"\5" * 8)
    gpu.free(address)
    assert gpu.call("cudaGraphLaunch", executable, stream) == ILLEGAL_ADDRESS


@pytest.mark.vgpu(memory="1GiB")
def test_capture_is_kept_per_stream_and_joins_by_events() -> None:
    gpu = Cuda()
    one, two, third = gpu.stream(), gpu.stream(), gpu.stream()
    _, address = gpu.malloc(G)
    event, back = gpu.event(), gpu.event()

    def capturing(stream: c_void_p) -> bool:
        status = c_int()
        assert gpu.call("cudaStreamIsCapturing", stream, byref(status)) == OK
        return status.value == 1

    assert gpu.begin(one) == OK
    assert gpu.call("cudaEventRecord", event, one) == OK
    assert gpu.call("cudaStreamWaitEvent", two, event, 0) == OK
    assert (capturing(one), capturing(two), capturing(third)) == (True, True, False)
    assert gpu.fill_async(address, 1, 8, two) == OK
    assert gpu.fill_async(address, 2, 8, third) == OK  # done at once
    assert gpu.read(address, 8) == (OK, b"\2" * 8)
    assert gpu.call("cudaEventRecord", back, two) == OK
    assert gpu.call("cudaStreamWaitEvent", one, back, 0) == OK
    error, graph = gpu.end(one)
    assert error == OK and gpu.node_count(graph) == 1
    assert not capturing(two)
    # left unjoined
    assert gpu.begin(one) == OK
    assert gpu.call("cudaEventRecord", event, one) == OK
    assert gpu.call("cudaStreamWaitEvent", two, event, 0) == OK
    assert gpu.fill_async(address, 1, 8, two) == OK
    assert gpu.end(one)[0] == 904
    assert not capturing(two)


@pytest.mark.vgpu(memory="1GiB")
def test_unsafe_calls_end_a_capture() -> None:
    gpu = Cuda()
    stream = gpu.stream()
    relaxed = c_int(2)
    assert gpu.begin(stream) == OK
    assert gpu.call("cudaThreadExchangeStreamCaptureMode", byref(relaxed)) == OK
    assert gpu.malloc(G)[0] == OK
    assert gpu.call("cudaThreadExchangeStreamCaptureMode", byref(relaxed)) == OK
    assert gpu.end(stream)[0] == OK
    assert gpu.begin(stream) == OK
    assert gpu.malloc(G)[0] == 900
    assert gpu.fill_async(0, 0, 1, stream) == 901
    assert gpu.end(stream)[0] == 901
    assert gpu.begin(stream) == OK
    assert gpu.call("cudaStreamSynchronize", stream) == 900
    assert gpu.end(stream)[0] == 901
    blocking = gpu.stream(0)
    assert gpu.begin(blocking) == OK
    _, address = 0, 0
    assert gpu.memset(address, 0, 1) == 906  # the legacy stream
    assert gpu.end(blocking)[0] == 901


@pytest.mark.vgpu(memory="1GiB", graph="1MiB", graph_node="4KiB", context="256MiB")
def test_modelled_costs_are_charged_and_given_back() -> None:
    gpu = Cuda()
    stream = gpu.stream()
    assert gpu.used() == 256 * MIB
    _, address = gpu.malloc(G)
    gpu.begin(stream)
    for _ in range(3):
        gpu.fill_async(address, 1, 8, stream)
    _, graph = gpu.end(stream)
    before = gpu.used()
    executable = gpu.new("cudaGraphInstantiateWithFlags", graph, c_uint64(0))
    assert gpu.used() - before == MIB + 3 * 4096
    assert gpu.call("cudaGraphExecDestroy", executable) == OK
    assert gpu.used() == before


@pytest.mark.vgpu(memory="1GiB", cublas_handle="8MiB", module="2MiB")
def test_math_handles_and_modules_cost_what_is_configured() -> None:
    gpu = Cuda()
    handle = gpu.new("cublasCreate_v2")
    assert gpu.used() == 8 * MIB
    assert gpu.set_device(0) == OK
    module = gpu.new("cuModuleLoadData", b"image")
    assert gpu.used() == 10 * MIB
    assert gpu.call("cuModuleUnload", module) == OK
    assert gpu.call("cublasDestroy_v2", handle) == OK
    assert gpu.used() == 0


def graph_of_a_fill(gpu: Cuda) -> c_void_p:
    """A captured fill; its memory is one allocation of G bytes."""
    stream = gpu.stream()
    _, address = gpu.malloc(G)
    gpu.begin(stream)
    gpu.fill_async(address, 1, 8, stream)
    return gpu.end(stream)[1]


@pytest.mark.vgpu(memory="1GiB", graph="1MiB", first_graph="64MiB")
def test_first_graph_of_a_process_costs_more_and_once() -> None:
    gpu = Cuda()
    graph = graph_of_a_fill(gpu)
    before = gpu.used()
    first, second = (
        gpu.new("cudaGraphInstantiateWithFlags", graph, c_uint64(0)) for _ in range(2)
    )
    assert gpu.used() - before == 66 * MIB
    for executable in (first, second):
        assert gpu.call("cudaGraphExecDestroy", executable) == OK
    assert gpu.used() - before == 64 * MIB


@pytest.mark.vgpu(memory="128MiB", first_graph="128MiB")
def test_first_graph_that_does_not_fit_is_refused() -> None:
    gpu = Cuda()
    graph = graph_of_a_fill(gpu)
    executable = c_void_p()
    for _ in range(2):
        assert (
            gpu.call(
                "cudaGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0)
            )
            == OUT_OF_MEMORY
        )
    assert gpu.used() == G


@pytest.mark.vgpu(memory="1GiB", module="2MiB", kernel="1MiB")
def test_kernel_is_charged_when_it_is_first_launched() -> None:
    gpu = Cuda()
    assert gpu.set_device(0) == OK
    module = gpu.new("cuModuleLoadData", b"image")
    first, second = (
        gpu.new("cuModuleGetFunction", module, name) for name in (b"a", b"b")
    )
    assert gpu.used() == 2 * MIB
    for kernel, used in ((first, 3), (first, 3), (second, 4)):
        arguments = (kernel, *[1] * 6, 0, None, None, None)
        assert gpu.call("cuLaunchKernel", *arguments) == OK
        assert gpu.used() == used * MIB
    assert gpu.call("cuModuleUnload", module) == OK
    assert gpu.used() == 0


@pytest.mark.vgpu(memory="1GiB")
def test_kernel_hook_is_off_by_default() -> None:
    assert launch_with_argument() == bytes(16)


@pytest.mark.vgpu(
    memory="1GiB",
    hooks=[
        {
            "kernel": "_count_*",
            "argument": 0,
            "value": 1,
            "bytes": 4,
            "count_argument": 1,
        }
    ],
)
def test_kernel_hook_writes_through_an_argument() -> None:
    one = (1).to_bytes(4, "little")
    assert launch_with_argument() == one * 3 + bytes(4)


@pytest.mark.vgpu(
    memory="1GiB",
    hooks=[{"kernel": "_count_*", "argument": 0, "value_argument": 1, "bytes": 8}],
)
def test_kernel_hook_writes_the_value_of_an_argument() -> None:
    three = (3).to_bytes(4, "little")
    assert launch_with_argument() == three * 2 + bytes(8)


@pytest.mark.vgpu(
    memory="1GiB",
    hooks=[{"kernel": "_count_*", "argument": 0, "value": 1, "per_block": True}],
)
def test_kernel_hook_writes_for_each_block() -> None:
    one = (1).to_bytes(4, "little")
    assert launch_with_argument(blocks=2) == one * 2 + bytes(8)


def launch_with_argument(blocks: int = 1) -> bytes:
    gpu = Cuda()
    _, address = gpu.malloc(G)
    assert gpu.set_device(0) == OK
    module = gpu.new("cuModuleLoadData", b"image")
    kernel = gpu.new("cuModuleGetFunction", module, b"_count_tokens")
    pointer, count = c_uint64(address), c_int(3)
    arguments = (c_void_p * 2)(
        ctypes.cast(byref(pointer), c_void_p), ctypes.cast(byref(count), c_void_p)
    )
    grid = (blocks, 1, 1)
    error = gpu.call("cuLaunchKernel", kernel, *grid, *[1] * 4, None, arguments, None)
    assert error == OK
    return gpu.read(address, 16)[1]


@pytest.mark.vgpu(memory="1GiB")
def test_user_objects_live_as_long_as_the_last_graph_that_keeps_them() -> None:
    """PyTorch 2.15 keeps the resources of a captured collective alive with one."""
    gpu = Cuda()
    ended: list[int] = []
    destroy = ctypes.CFUNCTYPE(None, c_void_p)(ended.append)

    def made(references: int = 1) -> c_void_p:
        return gpu.new(
            "cudaUserObjectCreate", c_void_p(7), destroy, references, c_int(1)
        )

    graph = gpu.new("cudaGraphCreate", 0)
    moved, shared = made(), made(2)
    assert gpu.call("cudaGraphRetainUserObject", graph, moved, 1, 1) == OK
    assert gpu.call("cudaGraphRetainUserObject", graph, shared, 1, 0) == OK
    executable = gpu.new("cudaGraphInstantiateWithFlags", graph, c_uint64(0))
    assert gpu.call("cudaUserObjectRelease", shared, 2) == OK
    assert gpu.call("cudaGraphReleaseUserObject", graph, shared, 1) == OK
    assert gpu.call("cudaGraphDestroy", graph) == OK
    assert ended == []
    assert gpu.call("cudaGraphExecDestroy", executable) == OK
    assert ended == [7, 7]
    assert gpu.call("cudaUserObjectRelease", shared, 1) == INVALID_VALUE

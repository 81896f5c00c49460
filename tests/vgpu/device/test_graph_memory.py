"""cudaMallocAsync and cudaFreeAsync in a capture: nodes of its graph, to the byte."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import pytest

from tests.vgpu.device.ctypes_cuda import (
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    MIB,
    NOT_SUPPORTED,
    OK,
    OUT_OF_MEMORY,
    Cuda,
)

BLOCK = 2 * MIB
ALLOCATE, FREE, FILL = 10, 11, 2  # cudaGraphNodeType
FREE_ON_LAUNCH = 1
INVALIDATED = 901


class Graphs(Cuda):
    """Graphs of one stream's captures."""

    def __init__(self) -> None:
        super().__init__()
        self.s = self.stream()

    def allocate(self, size: int, stream: c_void_p | None = None) -> int:
        address = c_void_p()
        stream = stream or self.s
        error = self.call("cudaMallocAsync", byref(address), c_size_t(size), stream)
        assert error == OK
        return address.value or 0

    def free_async(self, address: int, stream: c_void_p | None = None) -> int:
        return self.call("cudaFreeAsync", c_void_p(address), stream or self.s)

    def captured(self, *sizes: int, freed: bool) -> tuple[c_void_p, list[int]]:
        """A graph that allocates and writes each, and frees each at last."""
        assert self.begin(self.s) == OK
        addresses = [self.allocate(size) for size in sizes]
        for address in addresses:
            assert self.fill_async(address, 7, 8, self.s) == OK
        for address in addresses if freed else ():
            assert self.free_async(address) == OK
        error, graph = self.end(self.s)
        assert error == OK
        return graph, addresses

    def instance(self, graph: c_void_p, flags: int = 0) -> c_void_p:
        return self.new("cudaGraphInstantiateWithFlags", graph, c_uint64(flags))

    def instances(self, *sizes: int, freed: bool) -> tuple[c_void_p, list[int]]:
        """As captured, instantiated, with the graph destroyed."""
        graph, addresses = self.captured(*sizes, freed=freed)
        executable = self.instance(graph)
        assert self.call("cudaGraphDestroy", graph) == OK
        return executable, addresses

    def launch(self, executable: c_void_p, stream: c_void_p | None = None) -> int:
        return self.call("cudaGraphLaunch", executable, stream or self.s)

    def destroy(self, executable: c_void_p) -> int:
        return self.call("cudaGraphExecDestroy", executable)

    def trim(self) -> int:
        return self.call("cudaDeviceGraphMemTrim", 0)

    def attribute(self, which: int) -> int:
        value = c_uint64()
        call = "cudaDeviceGetGraphMemAttribute"
        assert self.call(call, 0, which, byref(value)) == OK
        return value.value

    def graph_memory(self) -> tuple[int, int]:
        """Bytes that graphs map, and that are reserved for them: all that is used."""
        reserved = self.attribute(2)
        assert reserved == self.used()
        return self.attribute(0), reserved

    def kinds(self, graph: c_void_p) -> list[int]:
        count = c_size_t(self.node_count(graph))
        nodes = (c_void_p * count.value)()
        assert self.call("cudaGraphGetNodes", graph, nodes, byref(count)) == OK
        found = []
        for node in nodes:
            kind = c_int()
            error = self.call("cudaGraphNodeGetType", c_void_p(node), byref(kind))
            assert error == OK
            found.append(kind.value)
        return found


@pytest.mark.vgpu(memory="64MiB")
def test_memory_is_there_from_the_first_launch_until_it_is_trimmed() -> None:
    gpu = Graphs()
    graph, _ = gpu.captured(3 * MIB, freed=True)
    assert gpu.kinds(graph) == [ALLOCATE, FILL, FREE]
    executable = gpu.instance(graph)
    assert gpu.graph_memory() == (0, 0)
    for _ in range(3):
        assert gpu.launch(executable) == OK
        assert gpu.graph_memory() == (4 * MIB, 4 * MIB)
    assert gpu.trim() == OK
    assert gpu.graph_memory() == (0, 0)
    assert gpu.launch(executable) == OK
    assert gpu.graph_memory() == (4 * MIB, 4 * MIB)
    # It is a pool's: memory of a destroyed graph is not returned.
    assert gpu.destroy(executable) == gpu.call("cudaGraphDestroy", graph) == OK
    assert gpu.graph_memory() == (0, 4 * MIB)
    assert gpu.trim() == OK
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB")
def test_upload_maps_what_a_launch_needs() -> None:
    gpu = Graphs()
    executable, _ = gpu.instances(BLOCK, freed=True)
    assert gpu.call("cudaGraphUpload", executable, gpu.s) == OK
    assert gpu.graph_memory() == (BLOCK, BLOCK)
    assert gpu.launch(executable) == OK
    assert gpu.graph_memory() == (BLOCK, BLOCK)


@pytest.mark.vgpu(memory="64MiB")
@pytest.mark.parametrize("free", ["cudaFree", "cudaFreeAsync", "a graph"])
def test_unfreed_allocation_outlives_the_launch_and_prevents_another(
    free: str,
) -> None:
    gpu = Graphs()
    executable, (address,) = gpu.instances(BLOCK, freed=False)
    assert gpu.begin(gpu.s) == OK
    assert gpu.free_async(address) == OK
    freeing, graph = gpu.end(gpu.s)
    assert freeing == OK and gpu.kinds(graph) == [FREE]
    other = gpu.instance(graph)

    def freed() -> int:
        if free == "a graph":
            return gpu.launch(other)
        return gpu.free(address) if free == "cudaFree" else gpu.free_async(address)

    for _ in range(2):
        assert gpu.launch(executable) == OK
        assert gpu.read(address, 9) == (OK, b"\7" * 8 + b"\0")
        assert gpu.launch(executable) == INVALID_VALUE
        assert gpu.trim() == OK  # takes nothing that is not freed
        assert gpu.graph_memory() == (BLOCK, BLOCK)
        assert freed() == OK
        assert freed() == INVALID_VALUE
        # "Memory currently mapped by at least one graph", so still used.
        assert gpu.graph_memory() == (BLOCK, BLOCK)
    assert gpu.trim() == OK
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB")
def test_launch_frees_what_the_last_one_left_if_it_was_told_to() -> None:
    gpu = Graphs()
    graph, (kept, also) = gpu.captured(BLOCK, 2 * BLOCK, freed=False)
    executable = gpu.instance(graph, FREE_ON_LAUNCH)
    for _ in range(3):
        assert gpu.launch(executable) == OK
        assert gpu.read(kept, 9) == (OK, b"\7" * 8 + b"\0")
        assert gpu.write(kept, b"\1" * 9) == OK
        assert gpu.graph_memory() == (3 * BLOCK, 3 * BLOCK)
    assert gpu.free_async(also) == OK
    assert gpu.launch(executable) == OK
    # Destroyed, it frees nothing.
    assert gpu.destroy(executable) == gpu.call("cudaGraphDestroy", graph) == OK
    assert gpu.read(kept, 8) == (OK, b"\7" * 8)
    assert gpu.free_async(kept) == OK
    assert gpu.graph_memory() == (2 * BLOCK, 3 * BLOCK)
    assert gpu.trim() == OK
    assert gpu.graph_memory() == (2 * BLOCK, 2 * BLOCK)
    assert gpu.free(also) == gpu.trim() == OK
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB")
def test_memory_freed_in_the_graph_is_gone_after_it() -> None:
    gpu = Graphs()
    executable, (address,) = gpu.instances(BLOCK, freed=True)
    assert gpu.launch(executable) == OK
    assert gpu.free(address) == gpu.free_async(address) == INVALID_VALUE
    assert gpu.read(address, 1)[0] == ILLEGAL_ADDRESS


@pytest.mark.vgpu(memory="64MiB")
def test_nodes_have_the_addresses_again_that_earlier_ones_freed() -> None:
    """Of the same stream; so one graph needs as much as it has at most at a time."""
    gpu = Graphs()
    assert gpu.begin(gpu.s) == OK
    large = gpu.allocate(4 * BLOCK)
    assert gpu.free_async(large) == OK
    halves = [gpu.allocate(2 * BLOCK) for _ in range(2)]
    assert halves == [large, large + 2 * BLOCK]
    more = gpu.allocate(BLOCK)
    for address in (*halves, more):
        assert gpu.fill_async(address, 3, 8, gpu.s) == OK
        assert gpu.free_async(address) == OK
    error, graph = gpu.end(gpu.s)
    assert error == OK
    executable = gpu.instance(graph)
    for _ in range(2):
        assert gpu.launch(executable) == OK
        assert gpu.graph_memory() == (5 * BLOCK, 5 * BLOCK)


@pytest.mark.vgpu(memory="64MiB")
def test_graphs_share_memory_that_they_free_and_no_other() -> None:
    """As in the sample graphMemoryFootprint of CUDA."""
    gpu = Graphs()
    freeing = [gpu.instances(n * BLOCK, freed=True) for n in (2, 3, 1)]
    assert len({addresses[0] for _, addresses in freeing}) == 3
    for (executable, _), blocks in zip(freeing, (2, 3, 3), strict=True):
        assert gpu.launch(executable) == OK
        assert gpu.graph_memory() == (blocks * BLOCK, blocks * BLOCK)
    assert gpu.destroy(freeing[1][0]) == OK
    assert gpu.graph_memory() == (2 * BLOCK, 3 * BLOCK)

    keeping = [gpu.instances(2 * BLOCK, freed=False) for _ in range(3)]
    for (executable, addresses), blocks in zip(keeping, (3, 4, 6), strict=True):
        assert gpu.launch(executable) == OK
        assert gpu.attribute(2) == gpu.used() == blocks * BLOCK
        assert gpu.write(addresses[0], bytes([blocks]) * 8) == OK
    for executable, _ in (freeing[0], freeing[2]):
        assert gpu.launch(executable) == OK  # remapped, beside all three
        assert gpu.graph_memory() == (8 * BLOCK, 8 * BLOCK)
    for (_, (address,)), blocks in zip(keeping, (3, 4, 6), strict=True):
        assert gpu.read(address, 8) == (OK, bytes([blocks]) * 8)
        assert gpu.free(address) == OK
    assert gpu.graph_memory() == (8 * BLOCK, 8 * BLOCK)
    assert gpu.trim() == OK
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB")
def test_high_watermarks_are_reset_to_what_there_is() -> None:
    gpu = Graphs()
    executable, _ = gpu.instances(BLOCK, 2 * BLOCK, freed=True)
    assert gpu.launch(executable) == gpu.trim() == OK
    other, _ = gpu.instances(BLOCK, freed=True)
    assert gpu.launch(other) == OK
    assert [gpu.attribute(n) // BLOCK for n in range(4)] == [1, 3, 1, 3]
    call = "cudaDeviceSetGraphMemAttribute"
    assert gpu.call(call, 0, 1, byref(c_uint64(1))) == INVALID_VALUE
    assert gpu.call(call, 0, 0, byref(c_uint64(0))) == INVALID_VALUE
    for high in (1, 3):
        assert gpu.call(call, 0, high, byref(c_uint64(0))) == OK
    assert [gpu.attribute(n) // BLOCK for n in range(4)] == [1, 1, 1, 1]
    # The driver's names for the same, and a device that there is not.
    value = c_uint64()
    assert gpu.call("cuDeviceGetGraphMemAttribute", 0, 2, byref(value)) == OK
    assert value.value == BLOCK
    assert gpu.call("cuDeviceGraphMemTrim", 1) == 101
    assert gpu.call("cuDeviceGraphMemTrim", 0) == OK
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB")
def test_out_of_memory_is_met_by_the_launch() -> None:
    gpu = Graphs()
    _, taken = gpu.malloc(40 * MIB)
    executable, (address,) = gpu.instances(30 * MIB, freed=False)
    assert gpu.launch(executable) == OUT_OF_MEMORY
    assert (gpu.attribute(0), gpu.attribute(2), gpu.used()) == (0, 0, 40 * MIB)
    assert gpu.free(taken) == OK
    assert gpu.launch(executable) == OK
    assert gpu.graph_memory() == (30 * MIB, 30 * MIB)
    # Reserved memory is nobody else's until it is trimmed.
    assert gpu.free(address) == OK
    assert gpu.malloc(40 * MIB)[0] == OUT_OF_MEMORY
    assert gpu.trim() == OK
    assert gpu.malloc(40 * MIB)[0] == OK


@pytest.mark.vgpu(memory="64MiB")
def test_more_than_the_device_has_is_refused_in_the_capture() -> None:
    gpu = Graphs()
    assert gpu.begin(gpu.s) == OK
    address = c_void_p()
    size = c_size_t(64 * MIB + 1)
    assert gpu.call("cudaMallocAsync", byref(address), size, gpu.s) == OUT_OF_MEMORY
    assert gpu.end(gpu.s)[0] == OK


@pytest.mark.vgpu(memory="64MiB")
@pytest.mark.parametrize("what", ["a pool's", "freed", "freed elsewhere", "unknown"])
def test_capture_frees_only_what_graphs_allocate_and_once(what: str) -> None:
    gpu = Graphs()
    address = gpu.allocate(BLOCK)
    if what == "freed":
        address = gpu.captured(BLOCK, freed=True)[1][0]
    elif what == "freed elsewhere":
        address = gpu.captured(BLOCK, freed=False)[1][0]
        assert gpu.begin(gpu.s) == gpu.free_async(address) == OK
        assert gpu.end(gpu.s)[0] == OK
    elif what == "unknown":
        address += 512
    assert gpu.begin(gpu.s) == OK
    assert gpu.free_async(address) == INVALID_VALUE
    assert gpu.end(gpu.s)[0] == INVALIDATED
    assert gpu.used() == BLOCK  # the pool's


@pytest.mark.vgpu(memory="64MiB")
def test_capture_that_fails_leaves_no_allocation() -> None:
    gpu = Graphs()
    assert gpu.begin(gpu.s) == OK
    address = gpu.allocate(BLOCK)
    assert gpu.call("cudaStreamSynchronize", gpu.s) == 900
    assert gpu.end(gpu.s)[0] == INVALIDATED
    assert gpu.free_async(address) == INVALID_VALUE
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB")
def test_graph_that_allocates_has_one_instance_and_is_part_of_no_other() -> None:
    gpu = Graphs()
    graph, _ = gpu.captured(BLOCK, freed=True)
    executable, second = gpu.instance(graph), c_void_p()
    call = "cudaGraphInstantiateWithFlags"
    assert gpu.call(call, byref(second), graph, c_uint64(0)) == INVALID_VALUE
    assert gpu.begin(gpu.s) == OK
    assert gpu.launch(executable) == NOT_SUPPORTED
    assert gpu.end(gpu.s)[0] == INVALIDATED
    assert gpu.destroy(executable) == OK
    assert gpu.launch(gpu.instance(graph)) == OK
    assert gpu.graph_memory() == (BLOCK, BLOCK)


@pytest.mark.vgpu(memory="64MiB")
@pytest.mark.parametrize("freed", [False, True])
def test_address_is_known_as_long_as_its_graph(freed: bool) -> None:
    """vLLM asks what pointers are before a launch, and after the capture freed them."""
    gpu = Graphs()
    executable, (address,) = gpu.instances(BLOCK + 1, freed=freed)
    start, size = c_void_p(), c_size_t()

    def known() -> int:
        call = "cuMemGetAddressRange_v2"
        return gpu.call(call, byref(start), byref(size), c_void_p(address + 5))

    assert known() == OK
    assert (start.value, size.value) == (address, BLOCK + 1)
    assert gpu.destroy(executable) == OK
    assert known() == 500


@pytest.mark.vgpu(memory="64MiB")
def test_memory_that_no_launch_has_allocated_may_be_freed() -> None:
    """As PyTorch does with tensors of a graph that it never replays."""
    gpu = Graphs()
    executable, (address,) = gpu.instances(BLOCK + 1, freed=False)
    assert gpu.free_async(address) == OK
    assert gpu.launch(executable) == OK
    assert gpu.graph_memory() == (2 * BLOCK, 2 * BLOCK)


@pytest.mark.vgpu(memory="64MiB", streams_behind=True, behind_queries=0)
def test_graphs_that_are_under_way_in_two_streams_share_nothing() -> None:
    gpu = Graphs()
    other = gpu.stream()
    one, two = (gpu.instances(BLOCK, freed=True)[0] for _ in range(2))
    assert gpu.launch(one) == OK
    assert gpu.launch(two) == OK  # in the same stream, so after it
    assert gpu.graph_memory() == (BLOCK, BLOCK)
    assert gpu.launch(two, other) == OK  # both are done by now
    assert gpu.graph_memory() == (BLOCK, BLOCK)
    assert gpu.launch(one) == OK
    assert gpu.graph_memory() == (2 * BLOCK, 2 * BLOCK)
    assert gpu.trim() == OK
    assert gpu.graph_memory() == (2 * BLOCK, 2 * BLOCK)
    assert gpu.call("cudaDeviceSynchronize") == gpu.trim() == OK
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB", streams_behind=True, behind_queries=0)
def test_allocation_is_held_until_the_stream_gets_to_its_free() -> None:
    gpu = Graphs()
    other = gpu.stream()
    keeping, (address,) = gpu.instances(BLOCK, freed=False)
    freeing, _ = gpu.instances(BLOCK, freed=True)
    pinned = gpu.new("cudaMallocHost", c_size_t(8))
    assert gpu.launch(keeping) == OK
    arguments = pinned, c_void_p(address), c_size_t(8), c_int(2), gpu.s
    assert gpu.call("cudaMemcpyAsync", *arguments) == OK
    assert gpu.free_async(address) == OK
    assert gpu.launch(freeing, other) == OK
    assert gpu.graph_memory() == (2 * BLOCK, 2 * BLOCK)
    assert gpu.launch(keeping) == OK  # in the order of calls, it is freed
    assert ctypes.string_at(pinned, 8) == b"\7" * 8
    assert gpu.call("cudaDeviceSynchronize") == gpu.trim() == OK
    assert gpu.graph_memory() == (BLOCK, BLOCK)
    assert gpu.destroy(keeping) == gpu.free(address) == gpu.trim() == OK
    assert gpu.graph_memory() == (0, 0)


@pytest.mark.vgpu(memory="64MiB", streams_behind=True, behind_queries=0)
def test_instance_can_be_destroyed_while_its_launch_is_under_way() -> None:
    gpu = Graphs()
    executable, _ = gpu.instances(BLOCK, freed=True)
    assert gpu.launch(executable) == gpu.destroy(executable) == gpu.trim() == OK
    assert gpu.graph_memory() == (BLOCK, BLOCK)
    assert gpu.call("cudaStreamSynchronize", gpu.s) == OK
    assert gpu.graph_memory() == (0, BLOCK)


@pytest.mark.vgpu(memory="64MiB", devices=2)
def test_each_device_has_its_own_graph_memory() -> None:
    gpu = Graphs()
    assert gpu.set_device(1) == OK
    gpu.s = gpu.stream()
    executable, _ = gpu.instances(3 * BLOCK, freed=True)
    assert gpu.launch(executable) == OK
    assert (gpu.used(), gpu.attribute(2)) == (3 * BLOCK, 0)
    assert gpu.set_device(0) == gpu.trim() == OK
    assert gpu.used() == 0
    assert gpu.call("cudaDeviceGraphMemTrim", 1) == gpu.set_device(1) == OK
    assert gpu.used() == 0


def replays() -> None:
    """In a process of its own: PyTorch reads the allocator when it is imported."""
    import torch

    from vgpu import control

    def used() -> int:
        assert control.used() == torch.cuda.memory_reserved()
        return control.used()

    x = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a = x + 1
        b = a * 2
        del a
        result = b + 3  # where `a` was
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            c = result + 1
            del c
        torch.cuda.current_stream().wait_stream(side)
        del b
    assert used() == 4 * MIB
    for _ in range(2):  # the result is not freed between them
        graph.replay()
        assert used() == 16 * MIB
        assert result.cpu().shape == x.shape
    del result
    graph.replay()
    assert used() == 16 * MIB
    graph.reset()
    torch.cuda.synchronize()
    assert Cuda().call("cudaDeviceGraphMemTrim", 0) == OK
    # Nobody has freed the allocations of the last replay.
    assert used() == 8 * MIB


@pytest.mark.parametrize("behind", ["false", "true"])
def test_pytorch_captures_and_replays_with_cuda_malloc_async(behind: str) -> None:
    device = [sys.executable, "-m", "vgpu", "--memory", "64MiB"]
    script = f"from {__name__} import replays; replays()"
    done = subprocess.run(
        [*device, "--set", f"streams_behind={behind}", "--", sys.executable]
        + ["-c", script],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

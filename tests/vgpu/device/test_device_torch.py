"""Unmodified PyTorch on the device, memory asserted as exact byte counts."""

from __future__ import annotations

import gc

import pytest

MIB, GIB = 2**20, 2**30


def used() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.vgpu(memory="8GiB", name="A Card", compute_capability="8.6", sm_count=82)
def test_torch_reads_properties_and_contents() -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.total_memory) == ("A Card", 8 * GIB)
    assert (properties.major, properties.minor) == (8, 6)
    assert properties.multi_processor_count == 82
    data = torch.arange(1000)
    assert torch.equal(data.cuda().cpu(), data)
    assert torch.equal(data.cuda().clone().cpu(), data)


def sorts_and_counts() -> None:
    """CUB asks what its kernels were compiled for, and knows those architectures."""
    import torch

    data = torch.empty(100_000, device="cuda")
    assert data.sort().values.shape == data.cumsum(0).shape == data.shape
    torch.cuda.synchronize()


@pytest.mark.vgpu(memory="8GiB", compute_capability="8.9")
def test_cub_between_two_compiled_architectures() -> None:
    sorts_and_counts()


@pytest.mark.vgpu(memory="8GiB", compute_capability="12.1")
def test_cub_above_all_compiled_architectures() -> None:
    sorts_and_counts()


@pytest.mark.vgpu(memory="8GiB", meminfo_total="4GiB", properties_total="6GiB")
def test_sources_may_disagree() -> None:
    import torch

    free, total = torch.cuda.mem_get_info()
    assert (free, total) == (4 * GIB, 4 * GIB)
    assert torch.cuda.get_device_properties(0).total_memory == 6 * GIB
    torch.cuda.memory.set_per_process_memory_fraction(0.5)
    keep = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")  # of 6 GiB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    assert used() == 3 * GIB
    del keep


@pytest.mark.vgpu(memory="8GiB", meminfo_free_stale=True)
def test_free_may_be_stale() -> None:
    import torch

    keep = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (8 * GIB, 8 * GIB)
    from vgpu import control

    assert control.used() == GIB
    del keep


@pytest.mark.vgpu(memory="1GiB", other="256MiB")
def test_out_of_memory_says_what_pytorch_says_on_a_gpu() -> None:
    import torch

    torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    keep = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    text = str(caught.value)
    assert "Tried to allocate 300.00 MiB" in text
    assert "GPU 0 has a total capacity of 1024.00 MiB" in text
    assert "of which 256.00 MiB is free" in text
    assert "512.00 MiB is allocated by PyTorch" in text
    del keep
    torch.cuda.empty_cache()
    assert used() == 256 * MIB


@pytest.mark.vgpu(memory="8GiB")
def test_segments_and_empty_cache_are_exact() -> None:
    import torch

    small = torch.empty(1, device="cuda")
    assert used() == torch.cuda.memory_reserved() == 2 * MIB
    middle = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert used() == torch.cuda.memory_reserved() == 22 * MIB
    large = torch.empty(101 * MIB + 1, dtype=torch.uint8, device="cuda")
    assert used() == torch.cuda.memory_reserved() == (22 + 102) * MIB
    del small, middle, large
    assert used() == 124 * MIB
    torch.cuda.empty_cache()
    assert used() == torch.cuda.memory_reserved() == 0


@pytest.mark.vgpu(
    memory="8GiB", env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
)
def test_expandable_segments_grow_and_shrink_by_granules() -> None:
    import torch

    one = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    two = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert used() == torch.cuda.memory_reserved() == 80 * MIB
    del one
    torch.cuda.empty_cache()
    assert used() == torch.cuda.memory_reserved() == 40 * MIB  # 20 MiB granules
    del two
    torch.cuda.empty_cache()
    assert used() == 0


@pytest.mark.vgpu(memory="8GiB")
def test_memory_pool_is_returned_when_dropped() -> None:
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    assert used() == 140 * MIB
    del inside, pool
    gc.collect()
    torch.cuda.empty_cache()
    assert used() == 40 * MIB
    del outside


@pytest.mark.vgpu(memory="8GiB", kernel="1MiB")
def test_kernels_of_pytorch_are_charged_when_they_are_first_launched() -> None:
    import torch

    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    before = used()
    x.add_(1)
    assert used() == before + MIB
    x.add_(1)
    assert used() == before + MIB
    x.mul_(2)
    assert used() == before + 2 * MIB


@pytest.mark.vgpu(memory="8GiB", graph="3MiB")
def test_graph_keeps_its_private_pool_and_replays_copies() -> None:
    import torch

    source = torch.ones(MIB, device="cuda")
    source.copy_(torch.arange(MIB, dtype=torch.float32))
    target = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    before, reserved = used(), torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        target.copy_(source)
    private = torch.cuda.memory_reserved() - reserved
    assert private >= 64 * MIB
    assert used() == before + private + 3 * MIB
    assert target.cpu().sum() == 0
    graph.replay()
    assert torch.equal(target.cpu(), torch.arange(MIB, dtype=torch.float32))
    torch.cuda.empty_cache()
    assert used() == before + private + 3 * MIB
    del kept, graph
    gc.collect()
    torch.cuda.empty_cache()
    assert used() <= before


@pytest.mark.vgpu(memory="8GiB")
def test_failed_allocation_frees_the_cache_and_tries_again() -> None:
    import torch

    from vgpu import control

    torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    rule = control.inject("cudaMalloc", over="150MiB")
    keep = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    assert rule.fired == 1
    assert used() == 200 * MIB
    control.inject("cudaMalloc", times=4)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    control.clear_injections()
    assert torch.empty(300 * MIB, dtype=torch.uint8, device="cuda").numel()
    del keep


@pytest.mark.vgpu(memory="8GiB")
def test_use_after_unmap_is_an_illegal_access() -> None:
    import torch

    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    import ctypes

    assert ctypes.CDLL("libcuda.so.1").cudaFree(ctypes.c_void_p(address)) == 0
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        tensor.cpu()


@pytest.mark.vgpu(memory="1GiB", devices=2, device={"1": {"memory": "2GiB"}})
def test_torch_uses_two_devices() -> None:
    import torch

    assert torch.cuda.device_count() == 2
    keep = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.mem_get_info(1) == (2 * GIB - 2 * MIB, 2 * GIB)
    assert torch.cuda.mem_get_info(0) == (GIB, GIB)
    assert not torch.cuda.can_device_access_peer(0, 1)
    assert torch.equal(keep.to("cuda:0").cpu(), keep.cpu())


@pytest.mark.vgpu(memory="8GiB", env={"CUDA_VISIBLE_DEVICES": "1"}, devices=2)
def test_visible_devices_are_counted_as_cuda_counts_them() -> None:
    import torch

    from vgpu import control

    torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.device_count() == 1
    assert (control.used(0), control.used(1)) == (0, 20 * MIB)


@pytest.mark.vgpu(memory="8GiB")
def test_streams_events_and_pinned_memory() -> None:
    import torch

    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        start.record()
        host = torch.arange(1000).pin_memory()
        assert host.is_pinned()
        device = host.to("cuda", non_blocking=True)
        end.record()
    stream.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.equal(device.cpu(), host)
    assert used() == 2 * MIB


@pytest.mark.vgpu(memory="8GiB")
def test_copies_of_what_nobody_wrote_take_no_host_memory() -> None:
    """Weights without a checkpoint that are offloaded: bytes are counted, all zero."""
    import mmap
    import resource

    import torch

    from vgpu import control

    def resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    size = GIB
    first, second = torch.empty(2, size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    shared = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), size, 0)
    before = resident()
    for host in pinned, shared:
        host.copy_(first)
    for host in pinned, shared:
        second.copy_(host)
        host.copy_(second)
    assert resident() - before < size // 16
    assert control.pinned() == 2 * size

    part = slice(MIB + 5, 4 * MIB + 7)
    for host in pinned, shared:
        host[: 5 * MIB] = 7
        second[part].copy_(host[part])
        assert second[: 5 * MIB].cpu().sum() == 7 * (part.stop - part.start)
        second[part].copy_(first[part])
        host[part].copy_(first[part])
        assert not second[part].cpu().any() and not host[part].any()
        assert host[part.start - 1] == host[part.stop] == 7


@pytest.mark.vgpu(memory="8GiB")
def test_matmul_and_kernels_run_as_nothing() -> None:
    import torch

    from vgpu import control

    a = torch.ones(64, 64, device="cuda")
    before = control.kernels()
    (a @ a + 1).cpu()
    assert control.kernels() >= before + 2


@pytest.mark.vgpu(memory="1GiB")
def test_kernel_of_cute_dsl_is_launched() -> None:
    """The runtime that it brings asks the driver for tables that are not public."""
    import torch

    from vgpu import control

    cute = pytest.importorskip("cutlass.cute")

    @cute.kernel
    def nothing() -> None:
        pass

    @cute.jit
    def start() -> None:
        nothing().launch(grid=[1, 1, 1], block=[32, 1, 1])

    torch.zeros(1, device="cuda")
    compiled = cute.compile(start, options="--enable-tvm-ffi")
    before = control.kernels()
    compiled()
    assert control.kernels() == before + 1

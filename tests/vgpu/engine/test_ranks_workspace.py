"""FlashInfer's workspace of an all-reduce: its own Python allocates it, and ranks share
it. On a card with multicast it is rounded up to the multicast granularity."""

from __future__ import annotations

import pytest

from tests.vgpu.device.test_nccl import MIB, in_ranks, join


@pytest.mark.vgpu(memory="1GiB", graph_node="4KiB")
def test_silent_function_is_a_kernel_of_a_graph() -> None:
    import torch

    from bench.plan_engine import Silent
    from vgpu import control

    module, graph = Silent(), torch.cuda.CUDAGraph()
    module.allreduce(1, 2)
    held = torch.cuda.memory_reserved()
    with torch.cuda.graph(graph):
        before = control.used()
        module.allreduce(1, 2)
        module.allreduce(1, 2)
    assert control.used() - before == 2 * 4096
    assert torch.cuda.memory_reserved() == held


def workspace(rank: int, ranks: int, meet: str) -> None:
    import torch

    from bench.plan_engine import (
        broadcast_objects_without_kernels,
        sample_without_kernels,
    )
    from vgpu import control

    dist = join(rank, ranks, meet)
    dist.all_reduce(torch.zeros(1, device="cuda"))
    sample_without_kernels()
    broadcast_objects_without_kernels()
    told = [{"rank": rank}]
    dist.broadcast_object_list(told, src=1)
    assert told == [{"rank": 1}]

    comm = pytest.importorskip("flashinfer.comm")
    mnnvl = pytest.importorskip("flashinfer.comm.mnnvl")
    held = control.process_used(rank)
    kept = comm.create_allreduce_fusion_workspace(
        backend="mnnvl", world_size=ranks, rank=rank, max_token_num=8192,
        hidden_dim=3584, dtype=torch.bfloat16,
        comm_backend=mnnvl.TorchDistBackend(group=dist.group.WORLD),
    )  # fmt: skip
    assert kept.mc_ptr
    # Three buffers of two stages, 337 MiB; and a block for pointers to them.
    assert 0 <= control.process_used(rank) - held - 512 * MIB <= 4 * MIB


@pytest.mark.full
@pytest.mark.vgpu(memory="2GiB", devices=2, multicast_granularity="512MiB", timeout=300)
def test_it_takes_whole_multicast_units() -> None:
    assert in_ranks(2, workspace) == [0, 0]

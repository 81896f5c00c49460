"""vLLM's own all-reduce, for GPUs that reach each other: a node of a graph for each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vgpu.device.test_nccl import MIB, in_ranks, join

NODE = 4096


def reducer(rank: int, ranks: int, meet: str) -> Any:
    import torch
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    from bench.plan_engine import reduce_by_own_kernel

    group = join(rank, ranks, meet).new_group(backend="gloo")
    torch.zeros(1, device="cuda")
    reduce_by_own_kernel()
    return CustomAllreduce(group=group, device=rank, max_size=8 * MIB)


def in_a_graph(rank: int, ranks: int, meet: str) -> None:
    import torch

    from vgpu import control

    own, graph = reducer(rank, ranks, meet), torch.cuda.CUDAGraph()
    outside = control.process_used(rank) - torch.cuda.memory_reserved()
    assert outside >= 16 * MIB  # its two buffers
    given = torch.zeros(64, 4096, dtype=torch.bfloat16, device="cuda")
    with own.capture(), torch.cuda.graph(graph):
        for _ in range(3):
            assert own.custom_all_reduce(given).shape == given.shape
    now = control.process_used(rank) - torch.cuda.memory_reserved()
    assert now - outside == 3 * NODE
    own.close()


def off(rank: int, ranks: int, meet: str) -> None:
    assert reducer(rank, ranks, meet).disabled


@pytest.mark.full
@pytest.mark.vgpu(
    memory="2GiB",
    devices=4,
    graph_node=NODE,
    multicast_granularity="2MiB",
    timeout=300,
)
def test_with_multicast_it_is_one_node() -> None:
    assert in_ranks(4, in_a_graph) == [0] * 4


@pytest.mark.full
@pytest.mark.vgpu(memory="2GiB", devices=4, timeout=300)
def test_without_multicast_it_stays_off() -> None:
    assert in_ranks(4, off) == [0] * 4

"""Memory of NCCL's communicators: when they are made, and as they are first used."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import pytest

from tests.vgpu.device.test_nccl import MIB, Nccl, in_ranks

# Of 2 MiB: the communicator and its ranks; three tables a channel, of 32.
MADE = 2 * (2 + 3 * 32)
# 24 channels: a send buffer of a rank takes a page, a receive buffer 9.19 MiB.
RING = 24 * (2 + 10)


def used(rank: int) -> int:
    """MiB that this process holds."""
    from vgpu import control

    return control.process_used(rank) // MIB


def told(nccl: Nccl, comm: c_void_p) -> list[int]:
    """NCCL's figures: memory that can be suspended, whether it is, the rest, and
    all."""
    told = [c_uint64(9) for _ in range(4)]
    for stat, value in enumerate(told):
        assert nccl.call("ncclCommMemStats", comm, c_int(stat), byref(value)) == 0
    assert nccl.call("ncclCommMemStats", comm, c_int(4), byref(told[0])) == 4
    return [value.value for value in told]


def suspended(rank: int, ranks: int, meet: str) -> None:
    nccl = Nccl()
    error, comm = nccl.init(ranks, rank)
    assert error == 0
    for call, is_suspended in ("ncclCommSuspend", 1), ("ncclCommResume", 0):
        flags = [c_int(1)] if is_suspended else []
        assert nccl.call(call, comm, *flags) == 0
        assert told(nccl, comm) == [MADE * MIB, is_suspended, 0, MADE * MIB]


@pytest.mark.vgpu(memory="2GiB", devices=2, nccl_channels=24, nccl_p2p_channels=32)
def test_it_tells_what_it_holds() -> None:
    assert in_ranks(2, suspended) == [0, 0]


def of_two(rank: int, ranks: int, meet: str) -> None:
    import torch

    nccl = Nccl()
    error, first = nccl.init(ranks, rank)
    assert error == 0
    tensor = torch.zeros(4 * MIB, device="cuda")
    held = used(rank)
    error, comm = nccl.init(ranks, rank, 2)
    assert error == 0
    assert used(rank) == held + MADE
    for count in 1, 1, 4 * MIB:  # the first of them connects; two cards have no NVLS
        assert nccl.all_reduce(tensor[:count], comm) == 0
        assert used(rank) == held + MADE + RING
    name = "ncclRecv" if rank else "ncclSend"
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    for _ in range(2):
        assert not nccl.call(
            name, c_void_p(tensor.data_ptr()), c_size_t(1), 7, c_int(1 - rank), comm,
            stream,
        )  # fmt: skip
        assert used(rank) == held + MADE + RING + 32 * (10 if rank else 2)
    assert nccl.call("ncclCommDestroy", comm) == 0
    assert used(rank) == held
    assert nccl.call("ncclCommDestroy", first) == 0


@pytest.mark.vgpu(memory="2GiB", devices=2, nccl_channels=24, nccl_p2p_channels=32)
def test_first_of_each_kind_connects() -> None:
    assert in_ranks(2, of_two) == [0, 0]


def of_four(rank: int, ranks: int, meet: str) -> None:
    import torch

    nccl = Nccl()
    assert nccl.init(ranks, rank)[0] == 0
    tensor = torch.zeros(4 * MIB, device="cuda")
    held = used(rank)
    error, comm = nccl.init(ranks, rank, 2)
    assert error == 0
    # One table more for each of 24 channels, and the credits.
    assert used(rank) == held + MADE + 2 * 25
    assert nccl.all_reduce(tensor[:1], comm) == 0
    assert used(rank) == held + MADE + 2 * 25 + RING
    # 16 channels reduce and broadcast, for each rank, in 1 MiB.
    assert nccl.all_reduce(tensor, comm) == 0
    assert used(rank) == held + MADE + 2 * 25 + RING + 128


@pytest.mark.vgpu(
    memory="2GiB", devices=4, nccl_channels=24, nccl_p2p_channels=32,
    multicast_granularity="512MiB", timeout=60,
)  # fmt: skip
def test_large_sums_of_more_than_two_cards_take_multicast_buffers() -> None:
    assert in_ranks(4, of_four) == [0] * 4


def once(rank: int, ranks: int, meet: str) -> None:
    import torch

    nccl = Nccl()
    torch.zeros(1, device=f"cuda:{rank}")
    held = used(rank)
    for number in 1, 2:
        assert nccl.init(ranks, rank, number)[0] == 0
        assert used(rank) == held + 30 + 5 + MADE * number
    torch.mm(*2 * [torch.zeros(8, 8, device="cuda")])  # makes a cuBLAS handle
    assert used(rank) - held - 35 - 2 * MADE in (7, 7 + 32)  # PyTorch's workspace


@pytest.mark.vgpu(
    memory="2GiB", devices=2, nccl_channels=24, nccl_p2p_channels=32,
    nccl_kernels="5MiB", first_library="30MiB", cublas_handle="7MiB",
)  # fmt: skip
def test_code_and_what_libraries_share_is_taken_once() -> None:
    assert in_ranks(2, once) == [0, 0]


def no_room(rank: int, ranks: int, meet: str) -> None:
    import torch

    from vgpu import control

    nccl = Nccl()
    error, comm = nccl.init(ranks, rank)
    assert error == 0
    tensor = torch.zeros(1, device="cuda")
    if rank == 0:
        control.other_process(control.memory(0) - control.used(0) - 4 * MIB)
    held = used(rank)
    assert nccl.all_reduce(tensor, comm) == (6 if rank else 1)
    assert used(rank) == held + (RING if rank else 0)


@pytest.mark.vgpu(memory="2GiB", devices=2, nccl_channels=24, nccl_p2p_channels=32)
def test_rank_without_room_to_connect_fails_all() -> None:
    assert in_ranks(2, no_room) == [0, 0]

"""NCCL between processes, each with a device: torch.distributed and the bare calls."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NoReturn

import pytest

MIB = 2**20
REMOTE_ERROR, INVALID_ARGUMENT, INVALID_USAGE = 6, 4, 5


def in_ranks(ranks: int, body: Callable[[int, int, str], None]) -> list[int]:
    """Exit statuses of `ranks` processes that each ran the body with its rank, their
    number and a file to meet at; none has used the device before."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _be(rank, ranks, body, str(Path(folder, "meet")))
            children.append(child)
        return _statuses(children)


def _statuses(children: list[int]) -> list[int]:
    """Statuses of the children in order; the first that fails ends the others."""
    status: dict[int, int] = {}
    while len(status) < len(children):
        child, how = os.wait()
        status[child] = os.waitstatus_to_exitcode(how)
        if status[child] == 1:
            for other in children:
                if other not in status:
                    os.kill(other, signal.SIGKILL)
    return [status[child] for child in children]


def _be(
    rank: int, ranks: int, body: Callable[[int, int, str], None], meet: str
) -> NoReturn:
    status = 1
    try:
        body(rank, ranks, meet)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def join(rank: int, ranks: int, meet: str) -> Any:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{meet}", rank=rank, world_size=ranks
    )
    return dist


def full(count: int, value: float, device: str = "cuda") -> Any:
    """A tensor with contents: copied, as no kernel fills it."""
    import torch

    return torch.full((count,), float(value)).to(device)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Nccl:
    """The C calls; codes are returned, not raised."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libnccl.so.2")
        self.lib.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self.lib, name)(*arguments))

    def init(self, ranks: int, rank: int, number: int = 1) -> tuple[int, c_void_p]:
        """A communicator of all ranks that call with the same number."""
        import torch

        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
        comm = c_void_p()
        number_bytes = number.to_bytes(128, "little")
        unique = UniqueId.from_buffer_copy(number_bytes)
        return self.call("ncclCommInitRank", byref(comm), ranks, unique, rank), comm

    def all_reduce(self, tensor: Any, comm: c_void_p, op: int = 0) -> int:
        import torch

        types = {torch.float32: 7, torch.int32: 2, torch.bfloat16: 9, torch.uint8: 1}
        return self.call(
            "ncclAllReduce", c_void_p(tensor.data_ptr()), c_void_p(tensor.data_ptr()),
            c_size_t(tensor.numel()), types[tensor.dtype], op, comm,
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def every_reduction(rank: int, ranks: int, meet: str) -> None:
    import torch

    dist = join(rank, ranks, meet)
    op = dist.ReduceOp
    whole = torch.int8, torch.uint8, torch.int32, torch.int64
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for dtype in whole + floats:
        for kind, expected in {
            op.SUM: lambda rows: rows.sum(0),
            op.PRODUCT: lambda rows: rows.prod(0),
            op.MAX: lambda rows: rows.amax(0),
            op.MIN: lambda rows: rows.amin(0),
            op.AVG: lambda rows: rows.sum(0) / ranks,
        }.items():
            if kind == op.AVG and dtype in whole:
                continue
            # More than a chunk of 256 KiB, and not a whole number of them.
            rows = (torch.arange(ranks * 140_001) % 5 + 1).view(ranks, -1).to(dtype)
            if dtype not in (torch.uint8,):
                rows[:, ::3] *= -1
            tensor = rows[rank].cuda()
            dist.all_reduce(tensor, op=kind)
            assert torch.equal(tensor.cpu(), expected(rows).to(dtype)), (kind, dtype)
    dist.destroy_process_group()


def every_collective(rank: int, ranks: int, meet: str) -> None:
    import torch

    dist = join(rank, ranks, meet)
    size = 100_003
    for dtype in torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn:
        rows = (torch.arange(ranks * size) % 61).view(ranks, size).to(torch.float32)
        rows = rows.to(dtype)
        mine, last = rows[rank].cuda(), ranks - 1

        def same(tensor: Any, expected: Any) -> bool:
            return torch.equal(
                tensor.cpu().view(torch.uint8), expected.view(torch.uint8)
            )

        gathered = torch.empty(ranks * size, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(gathered, mine)
        assert same(gathered, rows.flatten())

        part = gathered.view(ranks, size)[rank]  # in place
        part.copy_(mine)
        dist.all_gather_into_tensor(gathered, part)
        assert same(gathered, rows.flatten())

        tensor = mine.clone()
        dist.broadcast(tensor, src=last)
        assert same(tensor, rows[last])

        received = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(received, mine)
        for r in range(ranks):
            assert same(received[r], rows[r])

        dist.gather(mine, received if rank == last else None, dst=last)
        tensor = torch.empty_like(mine)
        dist.scatter(tensor, received if rank == last else None, src=last)
        assert same(tensor, rows[rank])

        even = ranks * (size // ranks)
        out = torch.empty(even, dtype=dtype, device="cuda")
        dist.all_to_all_single(out, mine[:even].contiguous())
        mixed = rows[:, :even].view(ranks, ranks, -1)[:, rank]
        assert same(out, mixed.contiguous().flatten())

        # Around the ring, all at once.
        tensor = torch.empty_like(mine)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, tensor, (rank - 1) % ranks),
            ]
        ):
            work.wait()
        assert same(tensor, rows[(rank - 1) % ranks])
        if dtype == torch.float8_e4m3fn:
            continue

        total = rows[:, :even].sum(0)
        out = torch.empty(even // ranks, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(out, mine[:even].contiguous())
        assert same(out, total.to(dtype).view(ranks, -1)[rank].contiguous())

        tensor = mine.clone()
        dist.reduce(tensor, dst=last)
        expected = rows.sum(0).to(dtype) if rank == last else rows[rank]
        assert same(tensor, expected)
    dist.barrier()
    dist.destroy_process_group()


def one_after_the_other(rank: int, ranks: int, meet: str) -> None:
    import torch

    dist = join(rank, ranks, meet)
    tensor = full(MIB, rank)
    if rank:
        dist.recv(tensor, src=rank - 1)
        assert torch.equal(tensor.cpu(), torch.full((MIB,), rank - 1.0))
    if rank + 1 < ranks:
        dist.send(full(MIB, rank), dst=rank + 1)
    halves = [dist.new_group(list(range(first, ranks, 2))) for first in (0, 1)]
    tensor = full(1000, 10.0**rank)
    dist.all_reduce(tensor, group=halves[rank % 2])
    expected = 10.0 ** (rank % 2) + 10.0 ** (rank % 2 + 2)
    assert tensor.cpu().tolist() == [expected] * 1000
    dist.destroy_process_group()


@pytest.mark.parametrize("body", [every_reduction, every_collective])
@pytest.mark.vgpu(memory="1GiB", devices=2)
def test_two_ranks_communicate(body: Any) -> None:
    assert in_ranks(2, body) == [0, 0]


@pytest.mark.parametrize("body", [every_collective, one_after_the_other])
@pytest.mark.vgpu(memory="1GiB", devices=4)
def test_four_ranks_communicate(body: Any) -> None:
    assert in_ranks(4, body) == [0, 0, 0, 0]


def captured(rank: int, ranks: int, meet: str) -> None:
    """A captured collective runs at each launch of its graph, not before."""
    import torch

    from vgpu import control

    dist = join(rank, ranks, meet)
    tensor = full(MIB, 1.0)
    spare = torch.zeros(MIB, device="cuda")
    dist.all_reduce(spare)  # makes the communicator
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
        spare.copy_(tensor)
    assert tensor.cpu()[0] == 1
    kernels = control.kernels()
    for launched in 1, 2:
        graph.replay()
        assert spare.cpu().unique().tolist() == [float(ranks**launched)]
    assert control.kernels() == kernels + 2
    del graph
    dist.destroy_process_group()


@pytest.mark.vgpu(memory="1GiB", devices=2)
def test_captured_collectives_run_at_launch() -> None:
    assert in_ranks(2, captured) == [0, 0]


def bare_calls(rank: int, ranks: int, meet: str) -> None:
    import torch

    nccl = Nccl()
    error, comm = nccl.init(ranks, rank)
    assert error == 0
    for call, expected in {
        "ncclCommCount": ranks, "ncclCommUserRank": rank, "ncclCommCuDevice": rank
    }.items():  # fmt: skip
        value = c_int(-1)
        assert nccl.call(call, comm, byref(value)) == 0
        assert value.value == expected, call

    # Any order within a group, and more than one to the same peer.
    peer = 1 - rank
    out = [full(MIB, 10.0 * rank + i) for i in range(2)]
    into = [torch.zeros(MIB, device="cuda") for _ in range(2)]
    total = full(5, 1.0 + rank)
    assert nccl.call("ncclGroupStart") == 0
    order = [("ncclRecv", into), ("ncclSend", out)]
    for call, tensors in order if rank else order[::-1]:
        for tensor in tensors:
            arguments = c_void_p(tensor.data_ptr()), c_size_t(MIB), 7, peer, comm, None
            assert nccl.call(call, *arguments) == 0
    assert nccl.all_reduce(total, comm) == 0
    assert total.tolist() == [1.0 + rank] * 5
    assert nccl.call("ncclGroupEnd") == 0
    assert total.tolist() == [3.0] * 5
    for i, tensor in enumerate(into):
        assert tensor.cpu().unique().tolist() == [10.0 * peer + i]

    # Ranks in the order of their keys; one that wants none gets none.
    split = c_void_p()
    assert nccl.call("ncclCommSplit", comm, 7, -rank, byref(split), None) == 0
    value = c_int()
    assert nccl.call("ncclCommUserRank", split, byref(value)) == 0
    assert value.value == ranks - 1 - rank
    alone = c_void_p()
    color = -1 if rank else 3
    assert nccl.call("ncclCommSplit", comm, color, 0, byref(alone), None) == 0
    assert bool(alone) == (rank == 0)
    assert nccl.all_reduce(total, split) == 0
    assert total.tolist() == [6.0] * 5
    assert nccl.call("ncclCommDestroy", split) == 0

    # Messages name errors, and calls that are not implemented.
    assert nccl.call("ncclGroupEnd") == INVALID_USAGE
    assert nccl.all_reduce(total, comm, op=9) == INVALID_ARGUMENT
    assert nccl.call("ncclCommShrink", comm) == INVALID_USAGE
    kept = c_void_p(5)
    register = "ncclCommWindowRegister", comm, None, c_size_t(0), byref(kept), 0
    assert nccl.call(*register) == 0 and not kept
    assert nccl.call("ncclCommDestroy", comm) == 0
    assert nccl.all_reduce(total, comm) == INVALID_ARGUMENT


def different_collectives(rank: int, ranks: int, meet: str) -> None:
    import torch

    nccl = Nccl()
    _, comm = nccl.init(ranks, rank)
    tensor = torch.zeros(8 + rank, device="cuda")
    assert nccl.all_reduce(tensor, comm) in (INVALID_USAGE, REMOTE_ERROR)
    state = c_int()
    assert nccl.call("ncclCommGetAsyncError", comm, byref(state)) == 0
    assert state.value in (INVALID_USAGE, REMOTE_ERROR)


def same_device(rank: int, ranks: int, meet: str) -> None:
    import torch

    torch.zeros(1, device="cuda")
    unique, comm = UniqueId(), c_void_p()
    init = Nccl().lib.ncclCommInitRank
    assert init(byref(comm), ranks, unique, rank) == INVALID_USAGE
    assert not comm


def memory_of_a_communicator(rank: int, ranks: int, meet: str) -> None:
    from vgpu import control

    nccl = Nccl()
    _, first = nccl.init(ranks, rank, 1)
    held = control.process_used(rank)
    _, second = nccl.init(ranks, rank, 2)
    assert control.process_used(rank) == held + 96 * MIB
    assert nccl.call("ncclCommSuspend", second, 1) == 0
    assert control.process_used(rank) == held
    assert nccl.call("ncclCommResume", second) == 0
    assert control.process_used(rank) == held + 96 * MIB
    assert nccl.call("ncclCommAbort", second) == 0
    assert control.process_used(rank) == held
    address = c_void_p()
    assert nccl.call("ncclMemAlloc", byref(address), c_size_t(3 * MIB)) == 0
    assert control.process_used(rank) == held + 4 * MIB
    assert nccl.call("ncclMemFree", address) == 0
    # There is no room for another on the first device.
    if rank == 0:
        control.other_process(control.memory(0) - control.used(0) - 95 * MIB)
    error, none = nccl.init(ranks, rank, 3)
    assert error == (1 if rank == 0 else REMOTE_ERROR)
    assert not none
    assert control.process_used(rank) == held
    assert nccl.call("ncclCommDestroy", first) == 0


def injected(rank: int, ranks: int, meet: str) -> None:
    from vgpu import control

    nccl = Nccl()
    _, comm = nccl.init(ranks, rank)
    tensor = full(8, 1)
    if rank == 1:
        control.inject("ncclAllReduce", device=1, error="InternalError")
        assert nccl.all_reduce(tensor, comm) == 3
    assert nccl.all_reduce(tensor, comm) == 0


@pytest.mark.parametrize(
    "body", [bare_calls, different_collectives, same_device, injected]
)
@pytest.mark.vgpu(memory="1GiB", devices=2)
def test_calls(body: Any) -> None:
    assert in_ranks(2, body) == [0, 0]


@pytest.mark.vgpu(memory="1GiB", devices=2, nccl_communicator="96MiB")
def test_communicator_takes_memory() -> None:
    assert in_ranks(2, memory_of_a_communicator) == [0, 0]


def dies(rank: int, ranks: int, meet: str) -> None:
    import torch

    nccl = Nccl()
    _, comm = nccl.init(ranks, rank)
    tensor = full(8, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert nccl.all_reduce(tensor, comm) == 0
    graph.replay()
    assert tensor.tolist() == [float(ranks)] * 8
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="launch failure"):
        graph.replay()
    assert nccl.all_reduce(tensor, comm) == REMOTE_ERROR
    message = nccl.lib.ncclGetLastError
    message.restype = ctypes.c_char_p
    # Rank 1, or a rank that heard of it earlier and has ended since.
    assert re.fullmatch(rf"rank {rank}: rank \d is gone", message(comm).decode())


@pytest.mark.vgpu(memory="1GiB", devices=4, timeout=60)
def test_dead_peer_is_an_error() -> None:
    assert in_ranks(4, dies) == [0, -signal.SIGKILL, 0, 0]


def aborts(rank: int, ranks: int, meet: str) -> None:
    """A thread waits for a peer that does not come; another one aborts."""
    from threading import Thread

    nccl = Nccl()
    _, comm = nccl.init(ranks, rank)
    told = []
    if rank == 0:
        tensor = full(8, 1)
        waits = Thread(target=lambda: told.append(nccl.all_reduce(tensor, comm)))
        waits.start()
        time.sleep(0.2)
        assert not told
        assert nccl.call("ncclCommAbort", comm) == 0
        waits.join()
        assert told and told[0] != 0
        Path(meet).touch()
    while not Path(meet).exists():
        time.sleep(0.01)
    if rank == 1:
        nccl.all_reduce(full(8, 1), comm)  # what rank 0 gave may be there
        assert nccl.all_reduce(full(8, 1), comm) == REMOTE_ERROR


@pytest.mark.vgpu(memory="1GiB", devices=2, timeout=60)
def test_abort() -> None:
    assert in_ranks(2, aborts) == [0, 0]


@pytest.mark.vgpu(memory="1GiB", devices=3)
def test_one_process_with_several_devices() -> None:
    import torch

    nccl = Nccl()
    comms = (c_void_p * 3)()
    assert nccl.call("ncclCommInitAll", comms, 3, None) == 0
    tensors = [full(MIB, 1.0 + i, f"cuda:{i}") for i in range(3)]
    assert nccl.call("ncclGroupStart") == 0
    for i, tensor in enumerate(tensors):
        with torch.cuda.device(i):
            assert nccl.all_reduce(tensor, c_void_p(comms[i])) == 0
    assert nccl.call("ncclGroupEnd") == 0
    for tensor in tensors:
        assert tensor.cpu().unique().tolist() == [6.0]
    for comm in comms:
        assert nccl.call("ncclCommDestroy", c_void_p(comm)) == 0


@pytest.mark.vgpu(memory="64GiB", devices=2)
def test_zeros_take_no_host_memory() -> None:
    def body(rank: int, ranks: int, meet: str) -> None:
        import resource

        import torch

        dist = join(rank, ranks, meet)
        tensor = torch.empty(8 << 30, dtype=torch.bfloat16, device="cuda")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dist.all_reduce(tensor)
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert taken < 64 << 10  # KiB

    assert in_ranks(2, body) == [0, 0]

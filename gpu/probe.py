"""Measure the driver's GPU memory in addition to a program's requests, in bytes.

    python -m gpu.probe driver | nccl

Run in a process of its own by calibrate.py, with PyTorch and Triton. Each figure is the
growth of NVML's used memory, minus that of PyTorch's reserved memory. Nothing else may
move memory on the GPU at that time. A JSON object follows "RESULT ".
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from typing import Any

from bench.scenarios.result import print_result
from gpu.card import Card, Driver

COPIES = 64
NODES = (8, 200)
SMALL = 64 << 10


class Growth:
    def __init__(self) -> None:
        self._card = Card()
        self.driver = self._card.driver
        self._torch: Any = None
        # Memory freed meanwhile would be counted against the next.
        self._kept: list[Any] = []

    def of(self, action: Callable[[], Any]) -> int:
        before = self._now()
        self._kept.append(action())
        return self._now() - before

    def start_torch(self) -> None:
        import torch

        torch.cuda.mem_get_info()
        self._torch = torch.cuda

    def _now(self) -> int:
        if self._torch is None:
            return self._card.used()
        self._torch.synchronize()
        return int(self._card.used() - self._torch.memory_reserved())


def measure_driver() -> dict[str, int]:
    growth = Growth()
    measured = {"context": growth.of(growth.start_torch)}
    measured["cublas_handle"] = growth.of(multiply)
    image, name = compile_kernel()
    measured["module"] = growth.of(lambda: load(growth.driver, image, name)) // COPIES
    measured["module_image"] = len(image)
    captured(1)  # loads the kernel that the graphs launch
    few, many = (
        growth.of(lambda nodes=nodes: [captured(nodes) for _ in range(COPIES)]) / COPIES  # type: ignore[misc]
        for nodes in NODES
    )
    node = max(0.0, (many - few) / (NODES[1] - NODES[0]))
    measured["graph_node"] = round(node)
    measured["graph"] = max(0, round(few - node * NODES[0]))
    measured["vmm_granularity"] = granularity(growth.driver)
    measured["malloc_block"] = block(growth)
    return measured


def multiply() -> None:
    """As vLLM's worker does before it takes its budget."""
    import torch

    x = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, x)
    torch.nn.functional.linear(x, x, x[0])


def compile_kernel() -> tuple[bytes, str]:
    import torch
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def double(x, size: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.arange(0, size)
        tl.store(x + offsets, tl.load(x + offsets) * 2)

    compiled = double.warmup(torch.float32, size=128, grid=(1,))
    return compiled.asm["cubin"], compiled.metadata.name


def load(driver: Driver, image: bytes, name: str) -> None:
    for _ in range(COPIES):
        module, function = c_void_p(), c_void_p()
        driver.call("cuModuleLoadData", byref(module), image)
        # Modules are loaded lazily: this one is not there before.
        driver.call("cuModuleGetFunction", byref(function), module, name.encode())


def captured(nodes: int) -> Any:
    import torch

    x = torch.zeros(16, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            x.add_(1)
    graph.replay()
    return graph, x


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


def granularity(driver: Driver) -> int:
    """The least that cuMemCreate takes: pinned memory of device 0."""
    found = c_size_t()
    properties = _Properties(type=1, location=_Location(1, 0))
    driver.call("cuMemGetAllocationGranularity", byref(found), byref(properties), 0)
    return found.value


def block(growth: Growth) -> int:
    """The steps in which small allocations grow; the first may find room."""
    blocks: list[c_void_p] = []
    steps: list[int] = []
    while len(steps) < 2 and len(blocks) < 4096:
        grown = growth.of(lambda: blocks.append(growth.driver.allocate(SMALL)))
        steps += [grown] if grown else []
    for address in blocks:
        growth.driver.free(address)
    return steps[-1] if steps else 0


def measure_nccl() -> dict[str, int]:
    """A communicator of one rank."""
    import torch
    import torch.distributed as distributed

    growth = Growth()
    growth.start_torch()
    x = torch.zeros(1024, device="cuda")
    x.add_(1)

    def communicate() -> None:
        with tempfile.NamedTemporaryFile() as file:
            distributed.init_process_group(
                "nccl", init_method=f"file://{file.name}", rank=0, world_size=1
            )
            distributed.all_reduce(x)

    return {"nccl": growth.of(communicate)}


if __name__ == "__main__":
    probes = {"driver": measure_driver, "nccl": measure_nccl}
    print_result(probes[sys.argv[1]]())

"""Measure the driver's GPU memory in addition to a program's requests, in bytes.

    python -m gpu.probe driver | kernels | nccl

Run in a process of its own by calibrate.py, with PyTorch and Triton. Each figure is the
growth of NVML's used memory, minus that of PyTorch's reserved memory. Nothing else may
move memory on the GPU at that time. A JSON object follows "RESULT ".
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from bench.scenarios.result import print_result
from gpu.card import Card, Driver

COPIES = 64
NODES = (8, 200)
SMALL = 64 << 10
# Above the 1024 bytes of a context (cudaLimitStackSize).
STACK = 3072
PTX = f"""
.version 8.0
.target {{target}}
.address_size 64
.visible .entry kernel(.param .u64 out, .param .u32 index)
{{{{
  .local .align 16 .b8 frame[{STACK}];
  .reg .b64 %a<4>;
  .reg .b32 %v<2>;
  ld.param.u64 %a0, [out];
  ld.param.u32 %v1, [index];
  cvt.u64.u32 %a1, %v1;
  mov.u64 %a2, frame;
  add.u64 %a3, %a2, %a1;
  st.local.u32 [%a3], %v1;
  ld.local.u32 %v0, [%a3+4];
  st.global.u32 [%a0], %v0;
  ret;
}}}}
"""


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


def measure_kernels() -> dict[str, int]:
    """What remains of the first launch of kernels that a start runs after its request:
    code, stacks and workspaces. Then the stack of a kernel of our own."""
    growth = Growth()
    growth.start_torch()
    multiply()
    measured = {f"first {n}": growth.of(step) for n, step in steps().items()}
    return {"kernels": sum(measured.values()), "stack": stack(growth)} | measured


def steps() -> dict[str, Callable[[], Any]]:
    import torch
    from vllm import _custom_ops
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    half = {"dtype": torch.bfloat16, "device": "cuda"}
    rows, wide = torch.zeros(2048, 4096, **half), torch.zeros(4096, 4096, **half)
    heads = torch.zeros(1, 8, 512, 128, **half)
    logits = torch.zeros(16, 32000, device="cuda")
    tokens = torch.zeros(16, 1, dtype=torch.int64, device="cuda")
    most = torch.full((16,), 50, dtype=torch.int32, device="cuda")
    share = torch.full((16,), 0.9, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    return {
        "large product": lambda: torch.mm(rows, wide),
        "attention": lambda: attend(heads, heads, heads, is_causal=True),
        "norm": lambda: _custom_ops.rms_norm(rows.clone(), rows, wide[0], 1e-6),
        "softmax": lambda: logits.softmax(-1),
        "sort": lambda: logits.sort(-1),
        "scan": lambda: logits.cumsum(-1),
        "top": lambda: logits.topk(50),
        "draw": lambda: torch.empty_like(logits).exponential_().argmax(-1),
        "gather": lambda: logits.gather(1, tokens),
        "sampler": lambda: apply_top_k_top_p_triton(logits.clone(), most, share),
    }


def stack(growth: Growth) -> int:
    """The growth by a kernel with STACK bytes of a stack: 0 if it has room, or so many
    above 1024 for every thread that the GPU can have in flight."""
    import torch
    import triton

    driver = growth.driver
    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}"
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if major >= 10:
        ptxas = ptxas.with_name("ptxas-blackwell")
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(PTX.format(target=target))
        subprocess.run([ptxas, f"-arch={target}", source, "-o", output], check=True)
        image = output.read_bytes()
    module, kernel = c_void_p(), c_void_p()
    driver.call("cuModuleLoadData", byref(module), image)
    driver.call("cuModuleGetFunction", byref(kernel), module, b"kernel")
    out = torch.zeros(1, device="cuda")
    values = c_void_p(out.data_ptr()), c_uint(0)
    arguments = (c_void_p * 2)(*(ctypes.addressof(value) for value in values))
    sizes = [c_uint(1)] * 6 + [c_uint(0)]

    def launch() -> None:
        driver.call("cuLaunchKernel", kernel, *sizes, None, arguments, None)

    return growth.of(launch)


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
    probes = {
        "driver": measure_driver,
        "kernels": measure_kernels,
        "nccl": measure_nccl,
    }
    print_result(probes[sys.argv[1]]())

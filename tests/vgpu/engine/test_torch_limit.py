"""PyTorch's limit in bytes on a card whose total is no power of two, and in a slice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import caches
from tests.vgpu.engine.harness import ROOT, SITES

H200 = "150109880320"
SLICE = "--set=meminfo_total=4GiB"  # cudaMemGetInfo's; properties have the card's
# PyTorch multiplies a fraction with that total, and rounds: with cudaMallocAsync down.
CODE = """
import torch
from vllm.utils.mem_utils import torch_memory_limit

device, unit = torch.device("cuda:0"), 2 << 20
lost = 0
for limit in range(20 * unit, 220 * unit, unit):
    with torch_memory_limit(device, limit):
        try:
            torch.empty(limit, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            lost += 1
        try:
            torch.empty(limit + 1, dtype=torch.uint8, device=device)
            lost += 1
        except torch.OutOfMemoryError:
            pass
    torch.cuda.empty_cache()
print("wrong:", lost)
"""


@pytest.mark.parametrize("device", [[], [SLICE]], ids=["card", "slice"])
@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_no_byte_of_a_limit_is_lost(
    backend: str, device: list[str], tmp_path: Path
) -> None:
    path = os.pathsep.join([SITES["envelope"], str(ROOT)])
    environment = {"PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": f"backend:{backend}"}
    done = subprocess.run(
        [sys.executable, "-m", "vgpu", "--memory", H200, *device, "--",
         sys.executable, "-c", CODE],
        env=caches.environment(os.environ | environment, tmp_path / "caches"),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "wrong: 0" in done.stdout, done.stdout + done.stderr[-2000:]

"""Engines in a slice: a library overrides dlsym and gives them part of the device."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.device import slicing
from tests.vgpu.engine.harness import HOOKS, ROOT, run

GIB = 2**30
DEVICE = {"memory": "8GiB", "other": "2GiB"}
SLICE = 3 * GIB
# By how the memory is asked for: by the runtime, or by the driver's calls, linked.
CASES: list[dict[str, Any]] = [{"graphs": True}, {"sleep": 1}]


@pytest.mark.full
@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_engine_starts_within_its_slice(
    vllm: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in slicing.environment(library, SLICE, tmp_path).items():
        monkeypatch.setenv(key, value)
    asked = {"generate": 2, "llm": {"gpu_memory_utilization": 0.9}}
    results = run(
        "start_each", [asked | case for case in CASES], vllm=vllm, device=DEVICE,
        hooks=HOOKS, folder=tmp_path, forked=False,
    )["every"]  # fmt: skip
    assert len(results) == len(CASES)
    for result in results:
        assert result["outcome"] == "started", result
        assert result["requested"] == math.ceil(SLICE * 0.9)
        assert SLICE * 0.8 < result["used"] - 2 * GIB <= SLICE
        assert result["tokens"] == [2] * 4


@pytest.mark.parametrize(
    ("context", "program", "row"),
    [
        ("0MiB", "cudaMalloc beside", "a neighbour |  | 3072 | holds |"),
        # The driver's own memory is not counted by this library.
        ("300MiB", "cuMemCreate", "|  | 4396 | all its processes take 300 MiB more |"),
    ],
)
def test_limits_below_a_library_are_printed(
    context: str, program: str, row: str, library: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.slice", "--library", library, "--only", program,
         "--device", f"context={context}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert row in done.stdout
    assert "| full | " in done.stdout and "NVML" in done.stdout
    assert ("1 of 1 hold" in done.stdout) == ("holds" in row)

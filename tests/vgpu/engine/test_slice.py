"""Engines in a slice: a library overrides dlsym and lends them part of the device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.device import slicing
from tests.vgpu.engine.harness import HOOKS, run

GIB = 2**30
DEVICE = {"memory": "8GiB", "other": "2GiB"}
SLICE = 3 * GIB
# By how the memory is asked for: by the runtime, or by the driver's calls, linked.
CASES = [
    pytest.param({"graphs": True}, id="malloc"),
    pytest.param({"sleep": 1}, id="sleep-mode", marks=pytest.mark.full),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_an_engine_starts_within_its_slice(
    vllm: str,
    case: dict[str, Any],
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in slicing.environment(library, SLICE, tmp_path).items():
        monkeypatch.setenv(key, value)
    asked = {"generate": 2, "llm": {"gpu_memory_utilization": 0.9}} | case
    result = run(
        "start", asked, vllm=vllm, device=DEVICE, hooks=HOOKS, folder=tmp_path,
        forked=False,
    )  # fmt: skip
    assert result["outcome"] == "started", result
    assert result["requested"] == math.ceil(SLICE * 0.9)
    assert SLICE * 0.8 < result["used"] - 2 * GIB <= SLICE
    assert result["tokens"] == [2] * 4

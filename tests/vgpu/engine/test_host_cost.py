"""How many calls a start and a step of the patches make beside those of the release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vgpu.engine.harness import HOOKS, run

GIB = 1 << 30
DEVICE = {"memory": 16 * GIB, "context": 300 << 20}


def test_a_start_and_a_step_make_few_calls_more(tmp_path: Path) -> None:
    """Unlike time, they are the same in each run. In a process of vLLM's own a limit in
    bytes adds none to a step. NVML is initialized once for the readings of a phase."""
    llm: dict[str, Any] = {"gpu_memory_utilization": 0.4}
    case = {"model": "moe", "graphs": True, "rounds": 0}
    stock, ours = (
        run(
            "step_cost", case | {"llm": llm | more}, vllm=vllm, device=DEVICE,
            hooks=HOOKS, folder=tmp_path,
        )
        for vllm, more in (
            ("official", {}), ("envelope", {"gpu_memory_limit_bytes": 6 * GIB}),
        )
    )  # fmt: skip
    assert round(ours["calls"] - stock["calls"]) <= 10
    nvml = [site["nvml_initializations"] for site in (stock, ours)]
    assert 0 < nvml[0] <= nvml[1] <= nvml[0] + 10

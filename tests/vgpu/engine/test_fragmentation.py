"""Loads in exactly the memory that was requested: KV cache, activations, no more.

A load that fails has enough free memory, but in pieces. `make bench-fragmentation`
shows how much more is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.scenarios.loads import CASES, LIMIT, environment
from bench.scenarios.mixed_load import CALLS
from tests.vgpu.engine.harness import HOOKS, run

MIB = 2**20
DEVICE = {"memory": "48GiB"}
long, topic = pytest.mark.long, pytest.mark.topic
# The fourth load is the worst of eight.
SEED = 3
MIXED = "8B"
# A step's calls of the device come after the tokens that it computed.
MAP, UNMAP = (1 + list(CALLS).index(call) for call in ("map", "unmap"))


def serve(case: dict[str, Any], vllm: str, folder: Path) -> dict[str, Any]:
    return run(
        "mixed_load",
        {"seeds": [SEED]} | case,
        vllm=vllm,
        device=DEVICE,
        hooks=HOOKS,
        folder=folder,
        timeout=3600,
    )


@pytest.mark.parametrize(
    "name", [MIXED, *(pytest.param(n, marks=long) for n in ("8B, LoRA", "30B-A3B"))]
)
def test_stock_fails_by_fragmentation(name: str, tmp_path: Path) -> None:
    # It also has the bytes of cuBLAS's workspaces, which it does not count.
    case = CASES[name] | {"buffers": [32]}
    (load,) = serve(case, "official", tmp_path)["runs"]
    assert load["outcome"] == "OOM"
    # It holds more than it counts, which may come to that.
    assert load["spare"] > 0 or name != MIXED


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(MIXED, marks=topic),
        pytest.param("8B, prompt logprobs", marks=pytest.mark.full),
        pytest.param("8B, EAGLE, V2", marks=pytest.mark.full),
    ],
)
def test_patched_serves(name: str, tmp_path: Path) -> None:
    result = serve(CASES[name], "envelope", tmp_path)
    (load,) = result["runs"]
    assert load["outcome"] == "served", load
    assert result["set_aside"] <= 128 * MIB


@pytest.mark.full
@pytest.mark.parametrize("name", [MIXED, pytest.param("8B, V2", marks=long)])
def test_fewer_tokens_at_once_map_fewer_pages(name: str, tmp_path: Path) -> None:
    """In a limit in bytes, where the KV cache has all that activations leave."""
    mapped = []
    for scheduled in (6144, 8192):
        llm = LIMIT | {"max_num_scheduled_tokens": scheduled}
        (load,) = serve(CASES[name] | {"llm": llm}, "envelope", tmp_path)["runs"]
        assert load["outcome"] == "served", load
        mapped.append(sum(step[MAP] for step in load["each_step"]))
    assert 4 * mapped[0] < mapped[1]


@long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [n for n in CASES if not environment(n)])
def test_two_thousand_steps_are_served(name: str, tmp_path: Path) -> None:
    (load,) = serve(CASES[name] | {"steps": 2000}, "envelope", tmp_path)["runs"]
    assert load["outcome"] == "served", load
    assert load["steps"] >= 2000


@pytest.mark.full
@pytest.mark.parametrize("name", [MIXED, pytest.param("8B, V2", marks=long)])
def test_serving_keeps_within_a_limit_in_bytes(name: str, tmp_path: Path) -> None:
    """The device has memory left. Without a limit PyTorch would take some of it."""
    limit = LIMIT["gpu_memory_limit_bytes"]
    alone = CASES[name] | {"alone": True}
    bounded = alone | {"llm": LIMIT}
    load = serve(bounded, "envelope", tmp_path)["runs"][0]
    assert load["outcome"] == "served", load
    assert load["process_peak"] <= limit
    load = serve(alone, "envelope", tmp_path)["runs"][0]
    assert load["outcome"] == "served", load
    assert load["process_peak"] > limit
    assert not any(step[UNMAP] for step in load["each_step"])

"""Whole starts on unified memory: whether the host keeps its reserve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import run

MIB, GIB = 2**20, 2**30
MEMORY = 16 * GIB
KV_CACHE = 13 * GIB
STARTS = {
    "V2": {"v2": True},
    "V1": {"v2": False},
    "V2, graphs": {"v2": True, "graphs": True},
    "V1, graphs": {"v2": False, "graphs": True},
}
starts = pytest.mark.parametrize("name", STARTS)


def start(name: str, vllm: str, folder: Path, **llm: object) -> dict[str, Any]:
    case = STARTS[name] | {"llm": {"gpu_memory_utilization": 0.85} | llm}
    (folder / vllm).mkdir()
    # Files that the host keeps are available, but not free.
    device = {"memory": MEMORY, "integrated": True, "other": GIB // 2}
    device |= {"page_cache": 4 * GIB}
    result = run("start", case, vllm=vllm, device=device, folder=folder / vllm)
    assert result["outcome"] == "started", result
    figures = {k: result[k] for k in ("requested", "blocks", "least_available")}
    print(name, vllm, llm, figures)
    return result


@starts
def test_fraction_leaves_the_host_its_reserve(name: str, tmp_path: Path) -> None:
    official = start(name, "official", tmp_path)
    ours = start(name, "envelope", tmp_path)
    # A fifth of the available memory is the host's. Memory that the process takes of
    # the host once its KV cache is sized comes out of that.
    reserve = ours["requested"] / 4
    assert official["least_available"] < reserve - GIB
    assert abs(ours["least_available"] - reserve - 64 * MIB) < 128 * MIB
    said = "GiB instead of 13.6 GiB (gpu_memory_utilization 0.85)"
    assert said in ours["stderr"] + ours["stdout"]


@starts
def test_request_that_leaves_the_reserve_is_not_lowered(
    name: str, tmp_path: Path
) -> None:
    official, ours = (
        start(name, vllm, tmp_path, gpu_memory_utilization=0.5)
        for vllm in ("official", "envelope")
    )
    assert ours["requested"] == official["requested"] == MEMORY // 2
    assert ours["least_available"] > MEMORY // 4
    assert "of unified memory" not in ours["stderr"] + ours["stdout"]


@pytest.mark.parametrize(
    ("llm", "warning"),
    [
        (
            {"kv_cache_memory_bytes": KV_CACHE},
            "The KV cache (13.0 GiB) leaves the host",
        ),
        (
            {"gpu_memory_limit_bytes": 14 * GIB},
            "gpu_memory_limit_bytes lets the engine",
        ),
    ],
)
def test_bytes_that_are_named_are_taken_with_a_warning(
    llm: dict[str, int], warning: str, tmp_path: Path
) -> None:
    ours = start("V2", "envelope", tmp_path, **llm)
    assert ours["least_available"] < MEMORY // 8
    assert warning in ours["stderr"] + ours["stdout"]
    if "kv_cache_memory_bytes" in llm:
        official = start("V2", "official", tmp_path, **llm)
        assert ours["blocks"] == official["blocks"]


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_host_that_has_little_available(vllm: str, tmp_path: Path) -> None:
    """Is no reason to refuse a small request."""
    device = {"memory": MEMORY, "integrated": True, "other": MEMORY - 4 * GIB}
    case = {"llm": {"gpu_memory_utilization": 0.1}}
    result = run("start", case, vllm=vllm, device=device, folder=tmp_path)
    assert result["outcome"] == "started", result
    assert result["requested"] == -(-MEMORY // 10)

"""Allocations that fail in one forward pass, at each layer.

The device computes nothing. So the tests compare the inputs of each pass, its layers,
and memory allocated as it begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import HOOKS, run

long, topic = pytest.mark.long, pytest.mark.topic
PIECES = {"cudagraph_capture_sizes": [1, 2, 4, 256], "cudagraph_mode": "PIECEWISE"}
IN_PIECES = {"graphs": True, "compile": True, "llm": {"compilation_config": PIECES}}
EXPANDABLE = {"allocator": "expandable_segments:True"}
V1: dict[str, Any] = {"v2": False}
CASES: dict[str, dict[str, Any]] = {
    "V1": V1,
    "V2": {},
    "V1, experts": V1 | {"model": "moe"},
    "V1, shared experts": V1 | {"model": "shared experts", "experts": True},
    "V2, shared experts": {"model": "shared experts", "experts": True},
    "V1, compiled, experts": V1 | {"model": "moe"} | IN_PIECES,
    "V2, compiled, experts": {"model": "moe"} | IN_PIECES,
    "V2, full graphs": {"graphs": True, "compile": True},
    "V2, expandable segments": EXPANDABLE,
    "V1, beside a thread": V1 | {"thread": True},
    "V2, beside a thread, expandable segments": {"thread": True} | EXPANDABLE,
    "V2, PyTorch's limit": {"limit": True},
}
SHORT = "V1", "V2, expandable segments", "V2, shared experts"


def serve(case: dict[str, Any], vllm: str, folder: Path) -> dict[str, Any]:
    return run(
        "step_fails",
        case,
        vllm=vllm,
        device={"memory": "8GiB"},
        hooks=HOOKS,
        folder=folder,
        timeout=1200,
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=topic if n in SHORT else long) for n in CASES]
)
def test_forward_pass_runs_again(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    result = serve(case, "envelope", tmp_path)
    _, *failing, twice, logits, other, last = result["runs"]
    assert last["outcome"] == "served"
    layers = list(range(result["layers"]))
    assert len(failing) == 2 * len(layers)
    for one in failing:
        assert one["outcome"] == "served", one
        assert one["lengths"] == last["lengths"]
        step, layer = one["at"]
        if one["left"]:  # Graphs of whole decodes allocate nothing.
            assert step == 1 and name == "V2, full graphs"
            continue
        failed, again = one["passes"][step : step + 2]
        assert failed["layers"] == layers[: layer + 1]
        assert again["layers"] == layers
        assert again["ids"] == failed["ids"]
        assert case.get("thread") or again["held"] == failed["held"]
        # The prompts are the same as without a failure; sampled tokens are noise.
        assert one["passes"][0]["ids"] == last["passes"][0]["ids"]
        others = [p["layers"] for i, p in enumerate(one["passes"]) if i != step]
        assert others == [p["layers"] for p in last["passes"]]
    assert result["stdout"].count("A forward pass ran out of memory") == 1
    for error in (twice, logits):
        assert error["outcome"] == "OutOfMemoryError"
        for said in ("Tried to allocate 256.00 MiB", "MiB free", "--max-num-batched"):
            assert said in error["error"]
    # The caller was handling another out of memory; this error is a different one.
    assert (other["outcome"], other["error"]) == ("RuntimeError", "shapes differ")
    assert len(other["passes"]) == 1
    assert [p["layers"] for p in twice["passes"]] == [[0, 1], [0, 1]]
    assert logits["passes"][0]["layers"] == layers


@long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SHORT)
def test_stock_fails(name: str, tmp_path: Path) -> None:
    first, *failing, _, last = serve(CASES[name], "official", tmp_path)["runs"]
    assert first["outcome"] == "served"
    # Layers with shared experts fail for good.
    assert last["outcome"] == ("AssertionError" if "shared" in name else "served")
    for one in failing:
        if "shared" in name and one is not failing[0]:
            assert one["outcome"] == "AssertionError", one
            continue
        assert one["outcome"] == "OutOfMemoryError", one
        assert "--" not in one["error"]


@long
@pytest.mark.timeout(1200)
def test_embeddings_are_not_read_twice(tmp_path: Path) -> None:
    """The first layers overwrite those that a multimodal model is given."""
    result = serve({"model": "vision"} | V1, "envelope", tmp_path)
    first, *failing, _, last = result["runs"]
    assert first["outcome"] == last["outcome"] == "served"
    for one in failing:
        assert one["outcome"] == "OutOfMemoryError", one
        assert "--max-num-batched-tokens" in one["error"]

"""Each connector of the KV cache and each offloader of weights serves as with stock.

Blocks that are copied back by the driver, or by a kernel that computes, are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import HOOKS, run
from tests.vgpu.scenarios.connectors import FEW, WAYS

MIB = 2**20

pytestmark = pytest.mark.topic


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("ways", "v2"),
    [
        pytest.param(FEW, True, id="few", marks=pytest.mark.full),
        pytest.param(list(WAYS), True, id="all-v2", marks=pytest.mark.long),
        pytest.param(list(WAYS), False, id="all-v1", marks=pytest.mark.long),
    ],
)
def test_each_serves_as_on_the_release(
    ways: list[str], v2: bool, tmp_path: Path
) -> None:
    stock, patched = (
        serve(vllm, {"ways": ways, "v2": v2}, tmp_path)
        for vllm in ("official", "envelope")
    )
    for way in ways:
        with_stock, ours = stock[way], patched[way]
        assert "error" not in with_stock | ours, way
        assert ours["cached"] == with_stock["cached"], way
        assert ours["back"] == with_stock["back"], way
        assert ours["peak"] <= ours["requested"], way
        # Half of it is set aside for fragmentation.
        assert ours["cache"] >= with_stock["cache"] - 128 * MIB, way
    for way in {"native", "simple", "several"} & set(ways):
        assert patched[way]["cached"] == [448] * 4
        # Four prompts of 28 blocks.
        blocks = patched[way]["back"] / patched[way]["cache"] * patched[way]["blocks"]
        assert blocks == pytest.approx(4 * 28), way


def serve(vllm: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    device = {"memory": "1GiB", "interpret": ["_swap_blocks_kernel"]}
    every = run(
        "connectors", case, vllm=vllm, device=device, hooks=HOOKS, folder=folder,
        timeout=1400,
    )["every"]  # fmt: skip
    return {result["way"]: result for result in every}

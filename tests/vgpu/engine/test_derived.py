"""Libraries that build on vLLM's classes keep working: docs/libraries.md.

Each way to reach into vLLM is tried by its name, stock beside patched.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.scenarios import packages
from bench.scenarios.derived import WAYS
from tests.vgpu.engine.harness import BASE, HOOKS, run

pytestmark = [
    pytest.mark.topic,
    pytest.mark.skipif(BASE == "0.26.0", reason="not carried over"),
]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def results(vllm: str, scenario: str = "derived") -> dict[str, dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp(vllm)
        device = {"memory": "4GiB"}
        ways = list(WAYS if scenario == "derived" else packages.WAYS)
        every = run(
            scenario, {"ways": ways}, vllm=vllm, device=device, hooks=HOOKS,
            folder=folder, timeout=2400,
        )["every"]  # fmt: skip
        return {result.pop("way"): result for result in every}

    return results


@pytest.mark.timeout(5000)
@pytest.mark.parametrize("way", [w for w in WAYS if w != "hooks_append"])
def test_each_way_is_as_with_the_release(way: str, tried: Any) -> None:
    compare(*(tried(vllm)[way] for vllm in ("official", "envelope")))


@pytest.mark.long
@pytest.mark.timeout(5000)
@pytest.mark.parametrize("way", list(packages.WAYS))
def test_each_package_is_as_with_the_release(way: str, tried: Any) -> None:
    compare(*(tried(vllm, "packages")[way] for vllm in ("official", "envelope")))


def compare(stock: dict[str, Any], patched: dict[str, Any]) -> None:
    assert "error" not in stock, stock
    assert all(stock.values()), "the way sees nothing with the release"
    stock_blocks, blocks = (result.pop("blocks", 0) for result in (stock, patched))
    assert patched == stock
    # The reserves are less than an eighth of it.
    assert blocks >= stock_blocks * 7 // 8


@pytest.mark.timeout(5000)
def test_a_hook_sees_each_pass_once(tried: Any) -> None:
    """Without hooks the pass would run again. With them it fails, as the release's."""
    stock, patched = (tried(v)["hooks_append"] for v in ("official", "envelope"))
    assert stock["positions"] == patched["positions"] == [20]
    assert patched["tokens"] != 4

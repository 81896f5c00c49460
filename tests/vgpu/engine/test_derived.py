"""Libraries that build on vLLM's classes keep working: docs/libraries.md.

Each way to reach into vLLM is tried by its name, stock compared with patched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import HOOKS, run
from tests.vgpu.scenarios import packages
from tests.vgpu.scenarios.derived import WAYS

pytestmark = pytest.mark.topic
# Has a test of its own.
ALONE = {"hooks_append"}


def tried(way: str, folder: Path, scenario: str = "derived") -> list[dict[str, Any]]:
    """How it went on stock, and on patched vLLM."""
    return [
        run(
            scenario, {"ways": [way]}, vllm=vllm, device={"memory": "4GiB"},
            hooks=HOOKS, folder=folder, timeout=600,
        )["every"][-1]
        for vllm in ("official", "envelope")
    ]  # fmt: skip


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("way", [w for w in WAYS if w not in ALONE])
def test_each_way_is_as_with_the_release(way: str, tmp_path: Path) -> None:
    compare(*tried(way, tmp_path))


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("way", list(packages.WAYS))
def test_each_package_is_as_with_the_release(way: str, tmp_path: Path) -> None:
    compare(*tried(way, tmp_path, "packages"))


def compare(stock: dict[str, Any], patched: dict[str, Any]) -> None:
    assert "error" not in stock, stock
    assert all(stock.values()), "the way sees nothing with the release"
    stock_blocks, blocks = (result.pop("blocks", 0) for result in (stock, patched))
    assert patched == stock
    # The reserves are less than an eighth of it.
    assert blocks >= stock_blocks * 7 // 8


@pytest.mark.timeout(1300)
def test_hook_sees_each_pass_once(tmp_path: Path) -> None:
    """Without hooks the pass would run again. With them it fails, as the release's."""
    stock, patched = tried("hooks_append", tmp_path)
    assert stock["positions"] == patched["positions"] == [20]
    assert patched["tokens"] != 4

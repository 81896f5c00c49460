"""Sleep mode next to threads, captures and failing calls of the driver.

`test_cumem_allocations.py` in the patches holds each of these alone; here they come
together.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vgpu.engine.harness import run

DEVICE = {"memory": "1GiB"}
CASES = [
    pytest.param(60, False, id="a-trainer"),
    pytest.param(60, True, id="a-trainer-and-failures"),
    pytest.param(1000, False, id="a-trainer-long", marks=pytest.mark.long),
    pytest.param(1000, True, id="a-trainer-and-failures-long", marks=pytest.mark.long),
]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("cycles", "fail"), CASES)
def test_nothing_is_lost_beside_a_trainer(
    cycles: int, fail: bool, tmp_path: Path
) -> None:
    """The primary context is not released either: that would end a slice's account."""
    case = {"cycles": cycles, "seed": 7, "fail": fail}
    result = run(
        "asleep", case, vllm="envelope", device=DEVICE, folder=tmp_path, timeout=1400
    )
    assert result["outcome"] == "finished", result
    assert result["woken"] == cycles
    assert result["slept"] == cycles or fail
    assert result["refused"] > 0 or not fail
    assert result["freed"] > cycles
    assert result["captured"] > cycles // 10
    assert result["replayed"] > cycles // 10
    assert result["lost"] == result["records"] == result["left"] == 0
    assert result["pinned"] == 0


TWO = {"memory": "1GiB", "devices": 2, "context": "64MiB"}


def test_host_memory_is_dropped_by_a_thread_of_another_device(tmp_path: Path) -> None:
    result = run("dropped", {}, vllm="envelope", device=TWO, folder=tmp_path)
    assert result["contexts"][0] == 0 < result["contexts"][1]
    assert result["pinned"] == [4096, 0]


def test_addresses_that_another_device_takes_at_once(tmp_path: Path) -> None:
    """A free is recorded before a new allocation can get its address."""
    result = run("addresses", {}, vllm="envelope", device=TWO, folder=tmp_path)
    assert result["recorded"] == result["alive"] == 8


# A stream is behind until somebody waits for it.
BEHIND = DEVICE | {"streams_behind": True, "behind_queries": 0}


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_memory_is_not_unmapped_in_use(vllm: str, tmp_path: Path) -> None:
    """Waiting for the device is refused while another thread captures a graph."""
    result = run("freed_in_use", {}, vllm=vllm, device=BEHIND, folder=tmp_path)
    assert result["device"] == "fine", result

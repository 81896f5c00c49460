"""Loading in the sleep-mode pool takes as much as the weights and one conversion.

The official cases document the bugs: when upstream fixes one, its test fails.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import run

SEGMENT = 2 << 20
# The outcome of stock vLLM where the patched build loads.
CASES = {
    "churn": "OutOfMemoryError",
    "growing": "OutOfMemoryError",
    "experts": "OutOfMemoryError",
    "nvfp4": "OutOfMemoryError",
    "dense": "loaded",
}
SMALL = {"memory": "96MiB"}


def cases(of_every_run: tuple[str, ...]) -> pytest.MarkDecorator:
    """The others take too long."""
    marks = dict.fromkeys(CASES, pytest.mark.long)
    marks |= dict.fromkeys(of_every_run, pytest.mark.full)
    marks["experts"] = pytest.mark.topic
    return pytest.mark.parametrize(
        "case", [pytest.param(c, marks=mark) for c, mark in marks.items()]
    )


def load(case: str, vllm: str, memory: int | str, folder: Path) -> dict[str, Any]:
    device = {"memory": memory}
    # Workers ask for FlashInfer's sampler.
    forked = case not in ("nvfp4", "dense")
    return run(
        "sleep_load", case, vllm=vllm, device=device, folder=folder, forked=forked
    )


@cache
def needed(case: str, folder: Path) -> int:
    """The most that tensors hold at once, on a device where nothing is short."""
    result = load(case, "envelope", "80GiB", folder)
    assert result["outcome"] == "loaded", result
    return int(result["needed"])


@pytest.fixture(scope="session")
def ample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ample")


@cases(("churn",))
def test_stock_loads_only_with_memory_to_spare(
    case: str, ample: Path, tmp_path: Path
) -> None:
    """vllm #43951, #48680, #52511."""
    memory = needed(case, ample) * 105 // 100 // SEGMENT * SEGMENT
    result = load(case, "official", memory, tmp_path)
    assert result["outcome"] == CASES[case], result
    if CASES[case] == "OutOfMemoryError":
        assert "CUDA out of memory" in result["error"]


@cases(("churn", "growing"))
def test_patched_loads_in_five_percent_more_than_tensors_hold(
    case: str, ample: Path, tmp_path: Path
) -> None:
    memory = needed(case, ample) * 105 // 100 // SEGMENT * SEGMENT
    result = load(case, "envelope", memory, tmp_path)
    assert result["outcome"] == "loaded", result
    assert result["needed"] == needed(case, ample)
    assert result["needed"] <= result["peak"] <= memory
    # Afterwards PyTorch counts as much as the device lends.
    assert result["reserved"] == result["after"]


def test_stock_allocator_disagrees_with_the_driver(tmp_path: Path) -> None:
    case = {"sequences": 50, "shrink": False}
    result = run("allocator", case, vllm="official", device=SMALL, folder=tmp_path)
    assert result["outcome"] != "agreed"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sequences", [100, pytest.param(400, marks=pytest.mark.long)])
def test_patched_allocator_agrees_with_the_driver(
    sequences: int, tmp_path: Path
) -> None:
    """Any sequence of allocate, free, sweep, sleep, wake, discard and failures."""
    case = {"sequences": sequences, "shrink": True}
    result = run(
        "allocator", case, vllm="envelope", device=SMALL, folder=tmp_path, timeout=1400
    )
    assert result["outcome"] == "agreed", result
    assert result["steps"] > 10 * sequences


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("level", "v2"),
    [
        pytest.param(1, False, marks=pytest.mark.full),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(2, True, marks=pytest.mark.full),
    ],
)
def test_updating_weights_ends_where_it_began(
    level: int, v2: bool, tmp_path: Path
) -> None:
    case = {"rounds": 25, "level": level, "v2": v2}
    device = {"memory": "4GiB"}
    result = run(
        "reload", case, vllm="envelope", device=device, folder=tmp_path, timeout=500
    )
    before, rounds = result["before"], result["rounds"]
    asleep = rounds[0]["asleep"]
    assert asleep < before["awake"] // 4
    # Pages are kept for the next sleep, and no more with each.
    kept = rounds[0]["pinned"]
    # Falling asleep gives back what steps had, too.
    cache = before["reserved"] - rounds[0]["reserved"]
    assert cache >= 0
    awake = {"awake": before["awake"] - cache, "reserved": before["reserved"] - cache}
    assert rounds == 25 * [before | awake | {"asleep": asleep, "pinned": kept}]
    assert kept - before["pinned"] < before["recorded"] // 16
    assert result["reloaded"]


def test_idle_memory_of_a_pool_in_use_is_reclaimed(tmp_path: Path) -> None:
    """The table of docs/sleep-mode-memory.md."""
    device = {"memory": "3000MiB"}
    result = run("segments", {}, vllm="envelope", device=device, folder=tmp_path)
    assert list(result["held"].values()) == [0, 0, 960, 900, 900]
    assert list(result["pool"].values()) == [0, 0, 0, 0, 0]


PROGRAMS = [
    pytest.param(200, 1),
    pytest.param(10_000, 1, marks=pytest.mark.full),
    pytest.param(10_000, 2, marks=pytest.mark.long),
    pytest.param(10_000, 3, marks=pytest.mark.long),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("programs", "seed"), PROGRAMS)
def test_no_program_fails_that_lives_in_a_plain_pool(
    programs: int, seed: int, tmp_path: Path
) -> None:
    case = {"programs": programs, "seed": seed, "named": ["stranding", "limited"]}
    device = {"memory": "16GiB"}
    result = run(
        "programs", case, vllm="envelope", device=device, folder=tmp_path, timeout=500
    )
    assert result["killed"] <= programs // 1000
    assert result["saved"] > 40 * result["killed"]
    for kill in result["kills"]:
        # The cost of PyTorch's own reclaiming, also without sleep mode.
        assert not kill["lives without a pool"]
        case = {"seed": seed, "only": kill["program"]}
        official = run(
            "programs", case, vllm="official", device=device, folder=tmp_path
        )
        # The release sets no limit: its caller did.
        assert kill["limited"] or not official["lives"]
    assert result["named"]["stranding"] == "lived"
    assert result["named"]["limited"] == "saved"


# PyTorch holds its mutex while it waits for the device to free.
BUSY = {"memory": "1GiB", "synchronize_us": 1000}


def test_stock_hangs_when_two_threads_free(tmp_path: Path) -> None:
    case = {"rounds": 500, "seconds": 15}
    result = run("threads", case, vllm="official", device=BUSY, folder=tmp_path)
    assert result["outcome"] == "hangs"


@pytest.mark.parametrize("rounds", [500, pytest.param(20_000, marks=pytest.mark.long)])
def test_two_threads_free(rounds: int, tmp_path: Path) -> None:
    case = {"rounds": rounds, "seconds": 400}
    result = run("threads", case, vllm="envelope", device=BUSY, folder=tmp_path)
    assert result["outcome"] == "finished", result
    assert result["records"] == 0


@pytest.mark.long
@pytest.mark.parametrize(("model", "layers"), [("llama-8b", 4), ("qwen-30b-a3b", 2)])
def test_host_memory_of_level_1(model: str, layers: int, tmp_path: Path) -> None:
    """vllm #16663."""
    case = {"model": model, "layers": layers}
    device = {"memory": "16GiB"}
    result = run("host_memory", case, vllm="official", device=device, folder=tmp_path)
    assert result["asleep"] > 1.05 * result["weights"]
    assert result["awake"] == result["asleep"]
    result = run("host_memory", case, vllm="envelope", device=device, folder=tmp_path)
    assert result["weights"] <= result["asleep"] <= 1.01 * result["weights"]
    assert result["awake"] == result["asleep"]  # kept for the next sleep
    case["environment"] = {"VLLM_SLEEP_MODE_KEEP_HOST_MEMORY": "0"}
    result = run("host_memory", case, vllm="envelope", device=device, folder=tmp_path)
    assert result["asleep"] > result["awake"] == 0


OFFLOADS = {
    "uva": {"cpu_offload_gb": 100},
    "prefetch": {
        "offload_group_size": 1,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(("model", "layers"), [("llama-8b", 4), ("qwen-30b-a3b", 2)])
def test_host_memory_of_offloaded_weights(
    model: str, layers: int, offload: str, tmp_path: Path
) -> None:
    """vllm #56410."""
    case = {"model": model, "layers": layers, "offload": OFFLOADS[offload]}
    device = {"memory": "16GiB"}
    result = run("offload", case, vllm="official", device=device, folder=tmp_path)
    assert result["pinned"] > 1.1 * result["offloaded"]
    result = run("offload", case, vllm="envelope", device=device, folder=tmp_path)
    assert result["offloaded"] <= result["pinned"] <= 1.01 * result["offloaded"]

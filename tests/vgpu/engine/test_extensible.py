"""A KV cache that is extended after warm-up and capture, as it is by default."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import HOOKS, run
from tests.vgpu.engine.test_ranks import PP2, TP2, ranks

MIB, GIB = 2**20, 2**30
# The device of make bench-stock.
SMALL: dict[str, object] = {"memory": 2560 * MIB, "graph": 700 << 10}
REQUESTED = math.ceil(2560 * MIB * 0.7)
LAYERS = 10  # no further model, the draft's included
# The driver maps 2 MiB at once: lost at the end of each layer.
LOST = 2 * MIB * LAYERS
full, long = pytest.mark.full, pytest.mark.long

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": "dense"},
    "experts": {"model": "moe"},
    "hybrid": {"model": "hybrid", "llm": {"gdn_prefill_backend": "triton"}},
    "draft": {"model": "dense", "draft": 2},
    "vision": {"model": "vision"},
    "sliding": {"model": "sliding"},
    # Others have the blocks of a layer next to each other.
    "block first": {
        "model": "dense",
        "environment": {"VLLM_KV_CACHE_LAYOUT": "BLNHC"},
    },
}


def case(
    name: str, v2: bool, extensible: bool | None = None, **more: Any
) -> dict[str, Any]:
    model = MODELS[name]
    llm = {
        "gpu_memory_utilization": 0.7,
        "max_num_seqs": 128,
        "enable_extensible_kv_cache": extensible,
    }
    llm |= model.get("llm", {}) | more.pop("llm", {})
    if more.get("graphs"):
        llm["compilation_config"] = {"mode": 0}
    return model | {"v2": v2, "report": True, "llm": llm} | more


def starts(
    cases: list[dict[str, Any]], folder: Path, device: dict[str, object] = SMALL
) -> list[dict[str, Any]]:
    results = run(
        "start_each", cases, vllm="envelope", device=device, hooks=HOOKS, folder=folder
    )["every"]
    return list(results)


ENGINES = (
    ("dense", True),
    ("dense", False),
    ("experts", True),
    ("hybrid", False),
    ("hybrid", True),
    ("draft", False),
    ("draft", True),
    ("vision", True),
    ("sliding", True),
    ("block first", True),
)


def marks(engine: tuple[str, bool], graphs: bool) -> list[pytest.MarkDecorator]:
    if graphs:
        if engine == ("dense", True):
            return []
        return [full] if engine[1] else [long]
    # Without graphs nothing is profiled twice, and little can differ.
    return [full] if engine[0] in ("dense", "draft") else [long]


@pytest.mark.parametrize(
    ("name", "v2", "graphs"),
    [
        pytest.param(*engine, graphs, marks=marks(engine, graphs))
        for engine in ENGINES
        for graphs in (True, False)
    ],
)
def test_kv_cache_takes_what_is_left(
    name: str, v2: bool, graphs: bool, tmp_path: Path
) -> None:
    """It serves the largest batches within its request, and graphs are captured once:
    none are profiled."""
    (result,) = starts([case(name, v2, graphs=graphs, serve=True)], tmp_path)
    assert result["outcome"] == "started", result
    assert result["served"] == "lives"
    assert result["process_peak"] <= REQUESTED
    report = result["report"]
    assert not report["cuda_graphs_estimated"]
    lost = LOST if name != "block first" else report["kv_cache_block"] + 2 * MIB
    assert 0 <= report["left"] < lost


def test_activations_are_those_of_inference(tmp_path: Path) -> None:
    """An encoder that autograd watches keeps what its backward pass would read."""
    cases = [case("vision", v2) for v2 in (False, True)]
    first, second = (
        result["report"]["peak_activations"] for result in starts(cases, tmp_path)
    )
    assert abs(first - second) < 8 * MIB


@full
@pytest.mark.parametrize("name", ["dense", "draft"])
@pytest.mark.parametrize(
    "costs",
    [{"first_graph": 96 * MIB}, {"graph": 100 << 10, "graph_node": 64 << 10}],
    ids=["first", "nodes"],
)
def test_graphs_that_cost_more_than_they_say(
    costs: dict[str, object], name: str, tmp_path: Path
) -> None:
    (result,) = starts(
        [case(name, True, graphs=True, serve=True)], tmp_path, SMALL | costs
    )
    assert result["outcome"] == "started", result
    assert result["served"] == "lives"
    assert result["process_peak"] <= REQUESTED
    assert 0 <= result["report"]["left"] < LOST


@pytest.mark.parametrize(
    "v2", [pytest.param(False, marks=long), pytest.param(True, marks=full)]
)
def test_nearly_all_of_the_device(v2: bool, tmp_path: Path) -> None:
    """Blocks of a hybrid are zeroed before they are used, by their size: it is that of
    the addresses, whatever part of them is mapped."""
    most = {"gpu_memory_utilization": 0.9}
    (result,) = starts(
        [case("hybrid", v2, graphs=True, generate=4, llm=most)], tmp_path
    )
    assert result["outcome"] == "started", result
    assert result["tokens"] == [4] * 4


@pytest.mark.parametrize("v2", [pytest.param(False, marks=full), True])
def test_size_that_was_asked_for(v2: bool, tmp_path: Path) -> None:
    """Blocks and bytes, with and without extending."""
    asked: list[dict[str, Any]] = [
        {"num_gpu_blocks_override": 8000},
        {"kv_cache_memory_bytes": 512 * MIB},
    ]
    for llm in asked:
        cases = [
            case("dense", v2, extensible, graphs=True, llm=llm)
            for extensible in (False, True)
        ]
        estimated, extended = starts(cases, tmp_path)
        assert extended["outcome"] == "started", extended
        assert extended["blocks"] == estimated["blocks"]


def test_warm_up_names_only_mapped_blocks(tmp_path: Path) -> None:
    """Warm-up names no block that is not mapped (block_ids.py): a request has one for
    each 16 drafts, and half of six are mapped."""
    few = {"num_gpu_blocks_override": 6, "max_num_seqs": 1, "max_model_len": 64}
    few |= {"max_num_batched_tokens": 64}
    asked = {"graphs": True, "draft": 15, "generate": 4, "beyond": True, "llm": few}
    (result,) = starts([case("draft", True, True, **asked)], tmp_path)
    assert result["outcome"] == "started", result
    assert result["blocks"] == 6
    assert re.fullmatch(r"block \d is named, of 1 that .*", result["beyond"])


@pytest.mark.parametrize("first_graph", [520_000_000, 541_000_000])
def test_tight_start_keeps_what_it_needs(first_graph: int, tmp_path: Path) -> None:
    """The first graph takes what warm-up left of the request: of the blocks that were
    mapped (24 MiB), those of one page a layer stay, in place of the buffer."""
    tight = {"gpu_memory_utilization": 0.3, "max_num_seqs": 32, "max_model_len": 512}
    tight |= {"max_num_batched_tokens": 4096}
    (result,) = starts(
        [case("dense", True, graphs=True, generate=4, llm=tight)],
        tmp_path,
        SMALL | {"first_graph": first_graph},
    )
    assert result["outcome"] == "started", result
    assert result["tokens"] == [4] * 4
    assert result["report"]["kv_cache"] == 8 * MIB
    assert result["blocks"] == 128
    assert result["process_peak"] <= math.ceil(2560 * MIB * 0.3)


@pytest.mark.parametrize("v2", [pytest.param(False, marks=full), True])
@pytest.mark.parametrize("level", [1, pytest.param(2, marks=full)])
def test_sleeps_and_wakes_up(v2: bool, level: int, tmp_path: Path) -> None:
    """All of it goes, and comes back with its tag."""
    (result,) = starts(
        [case("dense", v2, graphs=True, sleep=level, generate=4)], tmp_path
    )
    assert result["outcome"] == "started", result
    assert result["tokens"] == [4] * 4
    slept, kv = result["sleep"], result["report"]["kv_cache"]
    assert slept["awake again"] - slept["weights"] == kv
    assert slept["awake"] - slept["asleep"] >= kv


@pytest.mark.parametrize(
    "llm", [TP2, pytest.param(PP2, marks=full)], ids=["tp2", "pp2"]
)
def test_blocks_of_the_smallest_rank(llm: dict[str, Any], tmp_path: Path) -> None:
    """The ranks have devices of different size."""
    asked = {"graphs": True, "report": True, "generate": 4, "llm": llm}
    result = ranks([asked], "envelope", tmp_path, second='memory = "3GiB"')
    (engine,) = result["every"]
    assert engine["outcome"] == "started", engine
    assert engine["tokens"] == [4] * 4
    reports = [engine["reports"][f"report.json.rank{rank}"] for rank in (0, 1)]
    for rank, report in zip(engine["ranks"], reports, strict=True):
        assert rank["peak"] - rank["before"] <= rank["requested"]
        assert report["kv_cache_blocks"] == engine["blocks"]
        # Steps give pages back.
        assert report["fragmentation_buffer"] == 32 * MIB
    assert reports[0]["lost_to_other_ranks"] > 400 * MIB
    assert reports[1]["lost_to_other_ranks"] == 0
    assert 0 <= reports[1]["left"] < LOST


def test_no_memory_to_extend(tmp_path: Path) -> None:
    """Another process takes the requested memory, after it was measured."""
    (result,) = starts([case("dense", True, moved="2GiB", moved_at="extend")], tmp_path)
    assert result["outcome"] == "RuntimeError"
    assert "Cannot extend the KV cache from" in result["error"]


def test_another_process_takes_all_that_is_free(tmp_path: Path) -> None:
    """While the engine warms up: half of the room is its own by then. The other half
    is all that is left for graphs and the largest batches."""
    taken = {"moment": "warming up", "moment_holds": -1 * GIB}
    cases = [
        case("dense", True, graphs=True, serve=True, **more) for more in ({}, taken)
    ]
    alone, beside = starts(cases, tmp_path, SMALL | {"memory": 16 * GIB})
    assert beside["served"] == "lives", beside
    kv_cache = [result["report"]["kv_cache"] for result in (alone, beside)]
    assert kv_cache[1] > kv_cache[0] // 2 > 4 * GIB


def test_every_call_may_fail(tmp_path: Path) -> None:
    """Mapped blocks stay mapped, and nothing else; then it can be extended."""
    result = run("extend_fails", {}, vllm="envelope", device=SMALL, folder=tmp_path)
    for failure in result["failures"]:
        assert (failure["left"] == [0, 0]) == bool(failure["error"]), failure
        assert failure["fired"] == bool(failure["error"])
    failed = [failure["call"] for failure in result["failures"] if failure["error"]]
    assert len(failed) == 3 * 4  # each call, at each of the four layers
    assert result["held"] == result["mapped"]
    assert result["closed"] == 0

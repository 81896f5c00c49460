"""Engines of more than one rank: they start, agree, and fail together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from harness import HOOKS, run

MIB, GIB = 2**20, 2**30
REQUESTED = 2 * GIB  # gpu_memory_utilization 0.5
full = pytest.mark.full
TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True}
SECONDS = 10  # in which all processes of an engine end


def ranks(
    cases: list[dict[str, Any]], vllm: str, folder: Path, devices: int = 2, **more: Any
) -> dict[str, Any]:
    """Results of the scenario: "every", and what was logged."""
    device = {"memory": "4GiB", "devices": devices} | more
    return run(
        "ranks", cases, vllm=vllm, device=device, hooks=HOOKS, folder=folder
    )  # fmt: skip


STARTS: dict[str, tuple[dict[str, Any], int, tuple[pytest.MarkDecorator, ...]]] = {
    "tp2-v2-graphs": ({"graphs": True, "llm": TP2}, 2, ()),
    "tp2-v1-graphs": ({"v2": False, "graphs": True, "llm": TP2}, 2, (full,)),
    "pp2-v2": ({"llm": PP2}, 2, ()),
    "pp2-v1-graphs": ({"v2": False, "graphs": True, "llm": PP2}, 2, (full,)),
    "tp2-pp2-v2": ({"llm": TP2 | PP2}, 4, (full,)),
    "tp2-experts-v2-graphs": (
        {"model": "moe", "graphs": True, "llm": TP2 | EXPERTS},
        2,
        (full,),
    ),
    "dp2-experts-v2": ({"model": "moe", "data_parallel": 2, "llm": EXPERTS}, 2, ()),
    "dp2-experts-v1": (
        {"model": "moe", "v2": False, "data_parallel": 2, "llm": EXPERTS},
        2,
        (full,),
    ),
    "tp2-engine-process": ({"engine_process": True, "llm": TP2}, 2, (full,)),
}


@pytest.mark.parametrize("vllm", ["official", "envelope"])
@pytest.mark.parametrize(
    ("case", "devices"),
    [pytest.param(c, n, id=name, marks=m) for name, (c, n, m) in STARTS.items()],
)
def test_ranks_start(
    case: dict[str, Any], devices: int, vllm: str, tmp_path: Path
) -> None:
    engines = ranks([case | {"generate": 4}], vllm, tmp_path, devices)["every"]
    assert len(engines) == case.get("data_parallel", 1)
    told = []
    for engine in engines:
        assert engine["outcome"] == "started", engine
        assert engine["v2"] == case.get("v2", True)
        assert engine["tokens"] == [4] * 4
        assert not engine["left"]
        told += engine["ranks"]
    assert sorted(rank["device"] for rank in told) == list(range(devices))
    for rank in told:
        assert rank["kernels"] and rank["kv"]
        # What is held before is in no share; the release takes more than its share.
        taken = rank["peak"] - rank["before"]
        assert vllm == "official" or taken <= rank["requested"] == REQUESTED, rank
    # All of an engine have as many blocks, so those of the same layers as many bytes.
    if devices == 2 and "pipeline_parallel_size" not in case["llm"]:
        assert told[0]["used"] == told[1]["used"]


def failing(
    rank: int, phase: str, how: str, llm: dict[str, Any] = TP2, **more: Any
) -> dict[str, Any]:
    fails = {"rank": rank, "phase": phase, "how": how}
    return {"graphs": True, "engine_process": True, "generate": 4} | {
        "fails": fails,
        "llm": llm,
        **more,
    }


def first_error(log: str) -> str:
    return next(line for line in log.splitlines() if " ERROR " in line)


def check_ended(result: dict[str, Any]) -> None:
    assert result["outcome"] in ("RuntimeError", "EngineDeadError"), result
    assert result["failed_after"] <= SECONDS
    assert not result["left"]


PHASES = (
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "capture",
    "execute_model",
)


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        pytest.param(
            phase,
            rank,
            marks=() if (phase, rank) == ("determine_available_memory", 1) else full,
        )
        for phase in PHASES
        for rank in (0, 1)
    ],
)
def test_all_end_when_one_runs_out_of_memory(
    phase: str, rank: int, tmp_path: Path
) -> None:
    result = ranks([failing(rank, phase, "memory")], "envelope", tmp_path)
    check_ended(result)
    assert re.search(rf"\brank {rank}\b", first_error(result["stdout"]))
    (failed,) = re.findall(
        r"(?:Error|Exception): .*Worker rank (\d) failed with .*CUDA out of memory",
        result["stdout"],
    )
    assert int(failed) == rank


def test_all_end_when_one_dies(tmp_path: Path) -> None:
    cases = [failing(1, phase, "kill") for phase in PHASES[1:3]]
    result = ranks(cases, "envelope", tmp_path)
    for engine in result["every"]:
        check_ended(engine)
    told = r"\(EngineCore pid=(\d+)\) ERROR .*Error: Worker rank 1 died unexpectedly"
    assert len(set(re.findall(told, result["stdout"]))) == len(cases)


def test_the_release_hangs(tmp_path: Path) -> None:
    """The failure of rank 1 lies behind the silence of rank 0."""
    case = failing(1, "determine_available_memory", "raise", patience=20)
    result = ranks([case], "official", tmp_path)
    assert result["outcome"] == "hangs"
    assert "rank 1 fails in determine_available_memory" in result["stdout"]

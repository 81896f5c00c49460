"""Engines start wherever the release starts them, with the KV cache they have there.

`make bench-release` shows more models and utilizations.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from harness import HOOKS, run

MIB, GIB = 2**20, 2**30
DEVICE: dict[str, object] = {"memory": 8 * GIB}
# The KV cache may be smaller by what is set aside for fragmentation, and by cuBLAS's
# workspaces, which the release takes without counting them.
LESS = 64 * MIB + 32 * MIB
full = pytest.mark.full
V1 = pytest.param(False, id="v1", marks=full)
V2 = pytest.param(True, id="v2")


def case(v2: bool, utilization: float, **more: Any) -> dict[str, Any]:
    llm = {"gpu_memory_utilization": utilization} | more.pop("llm", {})
    return {"model": "dense", "v2": v2, "llm": llm} | more


def beside(v2: bool, level: int, **more: Any) -> dict[str, Any]:
    """An engine beside one that is asleep at this level, or awake (0)."""
    return case(v2, 0.4, beside=case(v2, 0.4, **more), asleep=level, **more)


def starts(
    cases: list[dict[str, Any]],
    vllm: str,
    folder: Path,
    device: dict[str, object] = DEVICE,
) -> list[dict[str, Any]]:
    """The result of each start, and whether it stayed "within" what it requested."""
    results = run(
        "starts",
        cases,
        vllm=vllm,
        device=device,
        hooks=HOOKS,
        folder=folder,
        timeout=900,
    )["every"]
    assert len(results) == len(cases)
    for asked, result in zip(cases, results, strict=True):
        share = asked["llm"].get("gpu_memory_utilization", 0.92)
        requested = math.ceil(int(str(device["memory"])) * share)
        # A caller's tensors and a sleeping engine are not requested.
        result["within"] = result.get("process_peak", 0) <= requested
    return list(results)


def worse(ours: dict[str, Any], official: dict[str, Any]) -> str:
    """How ours is worse; empty if it is not."""
    if ours["outcome"] != "started":
        return str(ours.get("error", ours["outcome"]))
    if not ours["within"]:
        return f"takes {ours['process_peak']} bytes, {ours['requested']} requested"
    if ours["kv"] < official["kv"] - LESS:
        return f"a KV cache of {ours['kv']} bytes, not {official['kv']}"
    return ""


def compared(
    cases: dict[str, dict[str, Any]],
    folder: Path,
    device: dict[str, object] = DEVICE,
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Official and ours. The official starts all."""
    asked = list(cases.values())
    official, ours = (
        starts(asked, s, folder, device) for s in ("official", "envelope")
    )
    assert [r["outcome"] for r in official] == ["started"] * len(cases), official
    return dict(zip(cases, zip(official, ours, strict=True), strict=True))


def none_is_worse(pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    found = {name: worse(ours, official) for name, (official, ours) in pairs.items()}
    assert not any(found.values()), found


GRAPHS = {"graphs": True}


@pytest.mark.parametrize(
    ("v2", "names"),
    [
        pytest.param(False, ["tensors", "asleep 1"], id="v1"),
        pytest.param(True, ["tensors", "awake", "asleep 2"], id="v2"),
        pytest.param(False, ["awake", "asleep 2"], id="v1, others", marks=full),
        pytest.param(True, ["asleep 1"], id="v2, others", marks=full),
    ],
)
def test_beside_what_the_process_holds(
    v2: bool, names: list[str], tmp_path: Path
) -> None:
    """A caller's tensors, or another engine in the process, are not the engine's."""
    cases = {
        "tensors": case(v2, 0.4, tensors=3 * GIB),
        "awake": beside(v2, 0, **GRAPHS),
        "asleep 1": beside(v2, 1),
        "asleep 2": beside(v2, 2),
    }
    pairs = compared({name: cases[name] for name in names}, tmp_path)
    none_is_worse(pairs)
    for name, (official, ours) in pairs.items():
        # CUDA graphs of the other engine refer to what it has, workspaces above all.
        assert ours.get("lost") == official.get("lost"), name


@pytest.mark.parametrize("v2", [V1, V2])
def test_a_callers_tensors_count_once(v2: bool, tmp_path: Path) -> None:
    """The limit in bytes is the process's, its tensors included."""
    held, limit = 2 * GIB, 5 * GIB
    llm = {"gpu_memory_limit_bytes": limit}
    (result,) = starts([case(v2, 1.0, tensors=held, llm=llm)], "envelope", tmp_path)
    assert result["outcome"] == "started", result
    assert limit - 384 * MIB < held + result["process_peak"] <= limit


@pytest.mark.parametrize("v2", [V1, V2])
def test_flashinfer_measures_its_tactics(v2: bool, tmp_path: Path) -> None:
    """A tactic that asks for more than activations take is not skipped, since the
    device has the memory, nor does it take what was not requested."""
    tactic = {"transient": 512 * MIB, "kept": 256 * MIB}
    asked = [case(v2, 0.5, flashinfer_tactic=tactic)]
    (official,) = starts(asked, "official", tmp_path)
    (ours,) = starts(asked, "envelope", tmp_path)
    assert official["outcome"] == ours["outcome"] == "started", ours
    assert official["tactic"] == ours["tactic"] == "measured"
    assert ours["within"], ours


@full
def test_expandable_segments(tmp_path: Path) -> None:
    """Experts, and a batch that leaves segments of many sizes."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    llm = {"max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
    cases = {
        name: case(v2, 0.5, environment=environment, llm=llm)
        | {"model": "qwen-30b-a3b"}
        for name, v2 in {"v1": False, "v2": True}.items()
    }
    none_is_worse(compared(cases, tmp_path, DEVICE | {"memory": 48 * GIB}))


@pytest.mark.parametrize("v2", [V1, V2])
def test_what_the_user_chose_is_not_refused(v2: bool, tmp_path: Path) -> None:
    """Graphs that the user leaves out of the estimate, and more blocks than fit: the
    engine takes more than was requested, as it was told."""
    graphs = {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}
    asked = [
        case(v2, 0.4, **GRAPHS, environment=graphs),
        case(v2, 0.4, llm={"num_gpu_blocks_override": 60000}),
    ]
    device = DEVICE | {"graph": 64 * MIB}
    official, ours = (
        starts(asked, s, tmp_path, device) for s in ("official", "envelope")
    )
    assert [r["outcome"] for r in official] == ["started"] * 2, official
    assert [r["outcome"] for r in ours] == ["started"] * 2, ours
    assert [r["blocks"] for r in ours][1] == official[1]["blocks"] == 60000
    assert ours[0]["kv"] >= official[0]["kv"] - LESS


@pytest.mark.parametrize("v2", [V1, V2])
def test_an_explicit_kv_cache_needs_its_bytes(v2: bool, tmp_path: Path) -> None:
    """vllm #39852: another process holds half of the device. Not what the utilization
    asks for has to be free, but what the KV cache and the model take."""
    sizes = {"fits": GIB, "does not": 6 * GIB}
    # The default utilization, and one that is free.
    asked = [
        case(v2, share, held=4 * GIB, llm={"kv_cache_memory_bytes": size})
        for share, size in zip((0.92, 0.4), sizes.values(), strict=True)
    ]
    fits, does_not = starts(asked, "official", tmp_path)
    assert "Free memory on device" in fits["error"]
    assert does_not["outcome"] == "OutOfMemoryError", does_not
    fits, does_not = starts(asked, "envelope", tmp_path)
    assert fits["outcome"] == "started", fits
    assert does_not["outcome"] == "ValueError", does_not
    assert "kv_cache_memory_bytes" in does_not["error"]

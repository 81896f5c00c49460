"""Wherever the release starts, ours starts, with as large a KV cache.

`make bench-stock` shows more models and utilizations. One file, however long: its
tests compare with the same starts of stock.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench.scenarios.loads import NGRAM
from tests.vgpu.engine.harness import HOOKS, run

MIB, GIB = 2**20, 2**30
DEVICE: dict[str, object] = {"memory": 8 * GIB}
# The KV cache may be smaller by the reserve for fragmentation, and by memory that stock
# takes without counting: cuBLAS's workspaces (32 MiB), block tables. And by a part of a
# page of the driver's for each layer.
LOST = 2 * MIB * 8
LESS = (64 + 32 + 4) * MIB + LOST
ROW = 4 * 128  # bytes that the sampler keeps of each token, for as many sequences
full, long = pytest.mark.full, pytest.mark.long
V1 = pytest.param(False, id="v1", marks=full)
V2 = pytest.param(True, id="v2")

# Next to a start: a thread that allocates and frees, tensors of the caller, and another
# process that holds memory for a moment.
COMPANY: list[dict[str, Any]] = [
    {"thread": 24 * MIB},
    {"tensors": 256 * MIB},
    {"moment": "warm", "moment_holds": GIB},
]


def case(v2: bool, utilization: float, **more: Any) -> dict[str, Any]:
    llm = {"gpu_memory_utilization": utilization} | more.pop("llm", {})
    return {"model": "dense", "v2": v2, "llm": llm} | more


def beside(v2: bool, level: int, **more: Any) -> dict[str, Any]:
    """An engine next to one that is asleep at this level, or awake (0)."""
    return case(v2, 0.4, beside=case(v2, 0.4, **more), asleep=level, **more)


def starts(
    cases: list[dict[str, Any]],
    vllm: str,
    folder: Path,
    device: dict[str, object] = DEVICE,
) -> list[dict[str, Any]]:
    """The result of each start, and whether it stayed "within" its request."""
    results = run(
        "start_each",
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


def worse(ours: dict[str, Any], official: dict[str, Any], counted: int = 0) -> str:
    """How ours is worse; empty if it is not.

    Args:
        counted: Bytes that are in ours and that the release takes above its request.
    """
    if ours["outcome"] != "started":
        return str(ours.get("error", ours["outcome"]))
    if not ours["within"]:
        return f"takes {ours['process_peak']} bytes, {ours['requested']} requested"
    if ours["kv"] < official["kv"] - LESS - counted:
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


GRAPHS = {"graphs": True}
# Memory that a tactic takes in FlashInfer's autotuner: more than activations take.
TACTIC = {"transient": 512 * MIB, "kept": 256 * MIB}


@pytest.mark.parametrize(
    ("v2", "names"),
    [
        pytest.param(False, ["tensors", "asleep 1"], id="v1"),
        pytest.param(
            True, ["tensors", "awake", "asleep 2", "tactic"], id="v2", marks=full
        ),
        pytest.param(False, ["awake", "asleep 2", "tactic"], id="v1, all", marks=long),
        pytest.param(True, ["asleep 1"], id="v2, all", marks=full),
    ],
)
def test_memory_of_the_caller_is_not_the_engines(
    v2: bool, names: list[str], tmp_path: Path
) -> None:
    """A caller's tensors, and another engine, awake or asleep. And a tactic of
    FlashInfer's is counted, not skipped, as the device has the memory."""
    cases = {
        "tensors": case(v2, 0.4, tensors=3 * GIB),
        "awake": beside(v2, 0, **GRAPHS),
        "asleep 1": beside(v2, 1),
        "asleep 2": beside(v2, 2),
        "tactic": case(v2, 0.4, flashinfer_tactic=TACTIC),
    }
    pairs = compared({name: cases[name] for name in names}, tmp_path)
    found = {
        # The release tunes above its request.
        name: worse(ours, official, TACTIC["kept"] if name == "tactic" else 0)
        for name, (official, ours) in pairs.items()
    }
    for name, (official, ours) in pairs.items():
        for key in ("lost", "tactic"):
            # CUDA graphs of the other engine refer to its memory, to workspaces too.
            if ours.get(key) != official.get(key):
                found[name] += f" {key}: {ours.get(key)}, not {official.get(key)}"
    assert not any(found.values()), found


@pytest.mark.parametrize("v2", [V1, V2])
def test_bytes_that_are_asked_for(v2: bool, tmp_path: Path) -> None:
    """The limit in bytes holds for the process; its tensors count once. An explicit KV
    cache (vllm #39852) needs its bytes, not the utilization's, to be free."""
    tensors, limit = 2 * GIB, 5 * GIB
    cases = [
        case(v2, 1.0, tensors=tensors, llm={"gpu_memory_limit_bytes": limit}),
        case(v2, 0.92, held=4 * GIB, llm={"kv_cache_memory_bytes": GIB}),
        case(v2, 0.4, held=4 * GIB, llm={"kv_cache_memory_bytes": 6 * GIB}),
    ]
    limited, fits, does_not = starts(cases, "envelope", tmp_path)
    assert limited["outcome"] == "started", limited
    assert limit - 384 * MIB < tensors + limited["process_peak"] <= limit
    assert fits["outcome"] == "started", fits
    assert does_not["outcome"] == "ValueError", does_not
    assert re.search("kv[-_]cache[-_]memory", does_not["error"])


@full
@pytest.mark.parametrize("v2", [V1, V2])
def test_stock_asks_an_explicit_kv_cache_for_more(v2: bool, tmp_path: Path) -> None:
    cases = [
        case(v2, 0.92, held=4 * GIB, llm={"kv_cache_memory_bytes": GIB}),
        case(v2, 0.4, held=4 * GIB, llm={"kv_cache_memory_bytes": 6 * GIB}),
    ]
    fits, does_not = starts(cases, "official", tmp_path)
    assert "Free memory on device" in fits["error"]
    assert does_not["outcome"] == "OutOfMemoryError", does_not


@pytest.mark.parametrize(
    "v2", [pytest.param(False, id="v1"), pytest.param(True, id="v2")]
)
def test_buffers_of_the_kv_cache_are_counted_once(v2: bool, tmp_path: Path) -> None:
    """Block tables for many long requests, and a workspace that attention makes for its
    first batch: eager and with CUDA graphs, nothing is left for the buffer to hide."""
    llm = {
        "max_model_len": 131072,
        "max_num_seqs": 1024,
        "hf_overrides": {"max_position_embeddings": 131072},
        "fragmentation_buffer_bytes": 0,
    }
    size = 394 * MIB
    cases = [
        case(v2, 0.5, llm=llm, graphs=graphs, workspace=workspace, report=True)
        for graphs in (False, True)
        for workspace in (0, size)
    ]
    results = starts(cases, "envelope", tmp_path, DEVICE | {"memory": 16 * GIB})
    for result in results:
        assert result["outcome"] == "started" and result["within"], result
        assert -2 * MIB < result["report"]["left"] <= LOST, result["report"]
    for without, with_one in (results[:2], results[2:]):
        assert abs(without["kv"] - with_one["kv"] - size) <= LOST


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_other_process_releases_memory_meanwhile(v2: bool, tmp_path: Path) -> None:
    """Memory that it released does not make block tables and workspaces seem
    smaller."""
    still = case(v2, 0.4, workspace=394 * MIB)
    moved = still | {"moved": "-1GiB", "moved_at": "first_batch"}
    device = DEVICE | {"memory": 16 * GIB, "other": "2GiB"}
    results = starts([still, moved], "envelope", tmp_path, device)
    assert [result["outcome"] for result in results] == ["started"] * 2, results
    assert abs(results[0]["kv"] - results[1]["kv"]) <= LOST, results


@pytest.mark.parametrize("v2", [V1, V2])
def test_other_process_holds_memory_for_a_moment(v2: bool, tmp_path: Path) -> None:
    """It is gone before the engine needs it: neither the start nor the KV cache is
    charged."""
    cases = {
        when: case(v2, 0.4, moment=when, moment_holds=3200 * MIB)
        for when in ("loaded", "profiled")
    }
    cases["profiling"] = case(v2, 0.4, moment="profiling", moment_holds=2 * GIB)
    pairs = compared(cases, tmp_path, DEVICE | {"graph": 64 * MIB})
    found = {when: worse(ours, official) for when, (official, ours) in pairs.items()}
    assert not any(found.values()), found
    (_, still), (official, ours) = pairs["loaded"], pairs["profiling"]
    assert official["kv"] < ours["kv"] - GIB, "upstream has fixed it"
    assert abs(ours["kv"] - still["kv"]) <= LOST, (ours, still)


@pytest.mark.parametrize("v2", [V1, V2])
def test_other_process_that_nvml_hides_holds_memory_for_a_moment(
    v2: bool, tmp_path: Path
) -> None:
    """As in most containers, nobody tells whose memory it is. It is free again as the
    KV cache is allocated."""
    hidden = {'nvml_errors."nvmlDeviceGet*RunningProcesses*"': "NoPermission"}
    moment = {"moment": "profiled", "moment_holds": GIB}
    cases = {
        "1 GiB": case(v2, 0.4, **moment),
        "1500 MiB": case(v2, 0.4, **moment | {"moment_holds": 1500 * MIB}),
        "little": case(v2, 0.165, **GRAPHS, **moment),
        "workspace": case(v2, 0.6, **GRAPHS, **moment, workspace=400 * MIB),
    }
    pairs = compared(cases, tmp_path, {"memory": 4 * GIB} | hidden)
    allowed = {"workspace": 400 * MIB}
    found = {
        name: worse(ours, official, allowed.get(name, 0))
        for name, (official, ours) in pairs.items()
    }
    assert not any(found.values()), found


@pytest.mark.parametrize("v2", [V1, V2])
def test_other_process_holds_memory_while_warming_up(v2: bool, tmp_path: Path) -> None:
    """It makes neither an extensible KV cache smaller nor a suggested one."""
    cases = [
        case(v2, 0.4, **GRAPHS, moment=when, moment_holds=GIB, llm=extensible)
        for extensible in ({}, {"enable_extensible_kv_cache": True})
        for when in ("", "warming up")
    ]
    results = starts(cases, "envelope", tmp_path, {"memory": 4 * GIB})
    assert [result["outcome"] for result in results] == ["started"] * 4, results
    for still, moved in (results[:2], results[2:]):
        assert still["blocks"] == moved["blocks"], (still, moved)
    # The other is for all that is free by then.
    assert results[0]["suggested"][0] == results[1]["suggested"][0], results


@pytest.mark.parametrize("v2", [V1, V2])
def test_other_process_takes_memory_for_good(v2: bool, tmp_path: Path) -> None:
    """While graphs are profiled: the KV cache leaves it that memory."""
    takes = {"moved": GIB, "moved_at": "first_graph"}
    pairs = compared({"takes": case(v2, 0.9, **GRAPHS, **takes)}, tmp_path)
    official, ours = pairs["takes"]
    assert not (found := worse(ours, official)), found
    # A --kv-cache-memory that is suggested has room next to it.
    room = ours["kv"] + int(str(DEVICE["memory"])) - ours["used"]
    assert 0 < max(ours["suggested"]) <= room, ours


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_other_process_holds_memory_as_serving_begins(
    vllm: str, tmp_path: Path
) -> None:
    """The limit in bytes holds while serving: it is as if nobody had held any."""
    limit = {"gpu_memory_limit_bytes": 3 * GIB} if vllm == "envelope" else {}
    warm = {"moment": "warm", "moment_holds": 3 * GIB, "generate": 3}
    (result,) = starts([case(True, 0.4, llm=limit) | warm], vllm, tmp_path)
    assert result.get("tokens") == [3] * 4, result


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_pytorch_collects_by_its_threshold(vllm: str, tmp_path: Path) -> None:
    """Once a fraction is set, it would do so while graphs are captured."""
    graphs = {
        "max_num_seqs": 64,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [1, 256, 512, 2048],
        },
    }
    asked = case(True, 0.4, **GRAPHS, llm=graphs, generate=3)
    asked["environment"] = {
        "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    }
    (result,) = starts([asked], vllm, tmp_path, {"memory": 4 * GIB})
    assert result.get("tokens") == [3] * 4, result


@full
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_stock_does_not_count_it(v2: bool, tmp_path: Path) -> None:
    workspace = 394 * MIB
    (result,) = starts([case(v2, 0.5, workspace=workspace)], "official", tmp_path)
    assert result["outcome"] == "started" and not result["within"]


@pytest.mark.parametrize("v2", [V1, V2])
def test_length_for_which_the_release_has_just_enough(v2: bool, tmp_path: Path) -> None:
    """The largest batches exceed the request, as with the release. A limit in bytes is
    not exceeded."""
    asked: dict[str, Any] = {"serve": "alone", "llm": {"max_model_len": 8192}}
    (roomy,) = starts([case(v2, 0.3, **asked)], "official", tmp_path)
    enough = 40 * MIB  # for 8192 tokens of 4 KiB
    share = 0.3 - (roomy["kv"] - enough) / int(str(DEVICE["memory"]))
    cases = [case(v2, share, **asked)]
    ((official,), (ours,)) = (
        starts(cases, vllm, tmp_path) for vllm in ("official", "envelope")
    )
    assert official["outcome"] == ours["outcome"] == "started", str(ours.get("error"))
    assert official["served"] == ours["served"] == "lives"
    asked["llm"]["gpu_memory_limit_bytes"] = official["requested"]
    (strict,) = starts([case(v2, 1.0, **asked)], "envelope", tmp_path)
    assert strict["outcome"] == "ValueError"


# The KV cache is sized before graphs are captured.
FIRST = {"environment": {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}}
TIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (24, {"serve": "alone"}),
    # The memory is not taken for graphs.
    "another process takes memory": (
        60, GRAPHS | {"moved": 512 * MIB, "moved_at": "capture"},
    ),
    "graphs are not estimated": (64, GRAPHS | FIRST),
}  # fmt: skip


@pytest.mark.parametrize("tight", TIGHT)
@pytest.mark.parametrize("v2", [V1, V2])
def test_attention_needs_more_than_is_left_of_the_request(
    v2: bool, tight: str, tmp_path: Path
) -> None:
    """The release profiles none, and starts with what a forward pass without it left.
    A prompt then takes more than was requested: 0.4 GiB with this model."""
    left, asked = TIGHT[tight]  # MiB, for 4096 tokens of 2.25 KiB
    llm = {"attention_backend": "FLASH_ATTN_MLA", "max_model_len": 4096}
    llm |= {"max_num_batched_tokens": 8192, "max_num_seqs": 128}
    asked = asked | {"model": "MLA, 64 experts"}
    (roomy,) = starts([case(v2, 0.5, llm=llm) | asked], "official", tmp_path)
    share = 0.5 - (roomy["kv"] - left * MIB) / int(str(DEVICE["memory"]))
    cases = [case(v2, share, llm=llm) | asked]
    (official,) = starts(cases, "official", tmp_path)
    (ours,) = starts([cases[0] | {"report": True}], "envelope", tmp_path)
    assert official["outcome"] == ours["outcome"] == "started", str(ours.get("error"))
    if tight == "alone":
        assert official["served"] == ours["served"] == "lives"
        assert ours["report"]["above_request"]["profile"] > 300 * MIB


COUNTED: dict[str, dict[str, Any]] = {
    "drafts": {"draft": 3},
    "drafts, in company": {"draft": 3, "tensors": 300 * MIB, "thread": 8 * MIB},
    "drafts, sized first": {"draft": 3} | FIRST,
    "workspaces, sized first": FIRST,
    # As where the driver does not map memory: graphs are profiled first.
    "graphs are profiled": {"refused": "cuMemMap"},
}


@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("v2", [V1, V2])
def test_kv_cache_is_needed_by_what_the_release_does_not_count(
    v2: bool, counted: str, tmp_path: Path
) -> None:
    """Logits of drafts, and workspaces of cuBLAS."""
    asked, left = COUNTED[counted] | GRAPHS | {"serve": "alone"}, 40 * MIB
    llm = {"max_model_len": 4096, "max_num_batched_tokens": 8192}
    llm["max_num_seqs"] = 512 if "draft" in asked else 16
    # A thread may release what stock vLLM has seen in use, which ends its start.
    alone = {name: value for name, value in asked.items() if name != "thread"}
    (roomy,) = starts([case(v2, 0.7, llm=llm) | alone], "official", tmp_path)
    share = 0.7 - (roomy["kv"] - left) / int(str(DEVICE["memory"]))
    (official,) = starts([case(v2, share, llm=llm) | alone], "official", tmp_path)
    (ours,) = starts([case(v2, share, llm=llm) | asked], "envelope", tmp_path)
    assert official["outcome"] == ours["outcome"] == "started", str(ours.get("error"))
    assert official["served"] == ours["served"] == "lives"


@pytest.mark.parametrize(
    "vllm", [pytest.param("official", marks=full), pytest.param("envelope")]
)
@pytest.mark.parametrize("v2", [V1, V2])
def test_worker_that_serves_warms_up_again(v2: bool, vllm: str, tmp_path: Path) -> None:
    """When elastic expert parallelism scales, the limit of a start does not apply."""
    asked = case(v2, 0.4, **GRAPHS, kept=2 * GIB) | {"model": "moe"}
    result = run("scale", asked, vllm=vllm, device=DEVICE, hooks=HOOKS, folder=tmp_path)
    assert result["outcome"] == "started", result


@full
def test_expandable_segments_are_not_worse(tmp_path: Path) -> None:
    """Experts, and a batch that leaves segments of many sizes."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    llm = {"max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
    cases = {
        name: case(v2, 0.5, environment=environment, llm=llm)
        | {"model": "qwen-30b-a3b"}
        for name, v2 in {"v1": False, "v2": True}.items()
    }
    pairs = compared(cases, tmp_path, DEVICE | {"memory": 48 * GIB})
    found = {
        name: worse(ours, official, ROW * 151936)
        for name, (official, ours) in pairs.items()
    }
    assert not any(found.values()), found


@pytest.mark.parametrize(
    "v2", [pytest.param(False, id="v1", marks=full), pytest.param(True, id="v2")]
)
def test_callers_own_worker_starts(v2: bool, tmp_path: Path) -> None:
    own = "tests.vgpu.scenarios.own_worker."
    cases = {
        name: case(v2, 0.5, llm={"worker_cls": own + name}, generate=4, **GRAPHS)
        for name in ("OwnProfile", "ReadsConsumed")
    }
    for name, (_, ours) in compared(cases, tmp_path).items():
        assert ours["outcome"] == "started", (name, ours)
        assert ours["tokens"] == [4] * 4


@full
def test_cuda_malloc_async_is_not_worse(tmp_path: Path) -> None:
    """PyTorch's limit is 2**64 bytes at first: no fraction could set that again."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    asked = [
        case(v2, 0.5, environment=environment, generate=4, **GRAPHS)
        for v2 in (False, True)
    ]
    limited = case(True, 1.0, environment=environment, generate=4, **GRAPHS)
    limited["llm"]["gpu_memory_limit_bytes"] = 4 * GIB
    official = starts(asked, "official", tmp_path)
    *ours, within = starts([*asked, limited], "envelope", tmp_path)
    # The driver's cache next to tensors is also the engine's.
    cached = 32 * MIB
    found = [worse(a, b, cached) for a, b in zip(ours, official, strict=True)]
    assert not any(found), found
    assert within["outcome"] == "started", within
    # Nothing is bounded in the others.
    said = "PyTorch allocates with cudaMalloc"
    assert (tmp_path / "stdout").read_text().count(said) == 1


@full
def test_experts_without_graphs(tmp_path: Path) -> None:
    """The release profiles them on one stream and warms up on another, where cuBLAS
    has a second workspace. The official takes more than it requested by that."""
    experts = case(False, 0.7, llm={"max_num_seqs": 128}) | {"model": "moe"}
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    cases = {"plain": experts, "expandable": experts | {"environment": environment}}
    pairs = compared(cases, tmp_path, DEVICE | {"memory": 2560 * MIB})
    found = {
        name: worse(ours, official, ROW * 32000)
        for name, (official, ours) in pairs.items()
    }
    assert not any(found.values()), found
    assert not any(official["within"] for official, _ in pairs.values())


@pytest.mark.parametrize(
    "v2",
    [pytest.param(False, id="v1", marks=long), pytest.param(True, id="v2", marks=full)],
)
def test_settings_of_the_user_are_not_refused(v2: bool, tmp_path: Path) -> None:
    """Graphs that the user leaves out of the estimate, and more blocks than fit: the
    engine takes more than was requested, as configured."""
    graphs = {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}
    cases = {
        "estimate": case(v2, 0.4, **GRAPHS, environment=graphs),
        "blocks": case(v2, 0.4, llm={"num_gpu_blocks_override": 60000}),
    }
    pairs = compared(cases, tmp_path, DEVICE | {"graph": 128 * MIB})
    for official, ours in pairs.values():
        assert ours["outcome"] == "started", ours
        assert ours["kv"] >= official["kv"] - LESS
        assert not official["within"]
    official, ours = pairs["blocks"]
    assert ours["blocks"] == official["blocks"] == 60000


# The device of make bench-stock.
SMALL: dict[str, object] = {"memory": 2560 * MIB, "graph": 700 << 10}
BATCHES: dict[str, dict[str, Any]] = {
    "dense": {"graphs": True, "llm": {"compilation_config": {"mode": 0}}},
    "experts": {"model": "moe"},
    # Of few tokens they have a stream of their own, and cuBLAS a workspace there.
    "shared experts": {
        "model": "shared experts",
        "llm": {
            "gpu_memory_utilization": 0.576,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "max_model_len": 8192,
        },
    },
    "hybrid": {"model": "hybrid", "llm": {"gdn_prefill_backend": "triton"}},
    # Whose KV cache holds fewer sequences than are scheduled.
    "hybrid in half": {
        "model": "hybrid",
        "graphs": True,
        "llm": {
            "gdn_prefill_backend": "triton",
            "gpu_memory_utilization": 0.5,
            "compilation_config": {"mode": 0},
        },
    },
    "vision": {"model": "vision"},
    "draft": {"model": "dense", "draft": 2},
    # Drafts next to prefills, whose tensors have the size of a page of the allocator.
    "n-grams": {
        "model": "hybrid",
        "llm": {
            "gdn_prefill_backend": "triton",
            "gpu_memory_utilization": 0.75,
            "max_model_len": 4096,  # of a prompt that fills a step, and its outputs
            "max_num_seqs": 56,
            "speculative_config": NGRAM,
        },
    },
}


@pytest.mark.parametrize("v2", [pytest.param(False, id="v1", marks=long), V2])
def test_attention_of_mla_is_profiled(v2: bool, tmp_path: Path) -> None:
    """The release does not count queries and outputs in the latent space, keys and
    values that are projected up, nor any of it next to the workspace of experts, which
    the attention before them has not met. The long prompt meets its context."""
    llm = {
        "max_model_len": 16384,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        # Experts with the workspace of DeepSeek-V2-Lite's.
        "hf_overrides": {
            "max_position_embeddings": 16384,
            "moe_intermediate_size": 1408,
        },
    }
    cases = {
        backend: case(
            v2,
            0.5,
            model="MLA, 64 experts",
            llm=llm | {"attention_backend": backend},
            serve=True,
        )
        for backend in ("FLASH_ATTN_MLA", "TRITON_MLA")
    }
    for name, (official, ours) in compared(cases, tmp_path).items():
        # A KV cache that leaves no room for a full batch is no measure. With V1 warm-up
        # is above the request already, so its cache serves the batch.
        outside = official["served"].startswith("out of memory")
        assert outside or not official["within"], (name, official)
        assert ours["outcome"] == "started" and ours["within"], (name, ours)
        assert ours["served"] == "lives", (name, ours)


@pytest.mark.parametrize("v2", [V1, V2])
def test_short_prefills_of_mla_are_profiled(v2: bool, tmp_path: Path) -> None:
    """FlashAttention's MLA takes up to 512 tokens of a request for a decode. Spread
    over all sequences, a full step has 128 each: attention then projects nothing up."""
    llm = {"attention_backend": "FLASH_ATTN_MLA", "max_model_len": 8192}
    llm |= {"max_num_batched_tokens": 2048, "max_num_seqs": 16}
    asked = {"model": "MLA", "serve": True}
    llm["enable_prefix_caching"] = True
    both = compared({"": case(v2, 0.25, llm=llm, **asked)}, tmp_path)
    official, ours = both[""]
    outside = official["served"].startswith("out of memory")
    assert outside or not official["within"], official
    limited = llm | {"gpu_memory_limit_bytes": 2 * GIB}
    cases = [case(v2, 0.9, llm=limited, **asked | GRAPHS)]
    cases += [case(v2, 0.25, llm=llm, **asked | one) for one in COMPANY]
    for result in (ours, *starts(cases, "envelope", tmp_path)):
        assert result["outcome"] == "started" and result["within"], result
        assert result["served"] == "lives", result


@pytest.mark.parametrize("v2", [V1, V2])
def test_prompts_that_mla_decodes_are_profiled(v2: bool, tmp_path: Path) -> None:
    """Spread over all sequences, a full step has 513 tokens each: prefills. With 512
    they are decodes, whose queries and outputs are of the latent space."""
    llm = {"attention_backend": "FLASH_ATTN_MLA", "max_model_len": 1100}
    llm |= {"max_num_batched_tokens": 6156, "max_num_seqs": 12}
    llm["hf_overrides"] = {"num_attention_heads": 32, "num_key_value_heads": 32}
    asked = case(v2, 0.25, llm=llm, model="MLA", serve=True)
    ((official, ours),) = compared({"": asked}, tmp_path).values()
    assert official["served"].startswith("out of memory")
    assert ours["outcome"] == "started" and ours["within"], ours
    assert ours["served"] == "lives"


def test_no_prompt_of_mla_exceeds_the_longest(tmp_path: Path) -> None:
    """Of 3000 prompts stock V1 gives the last 2194 tokens, and the others 2. Next to
    their context its own would be negative."""
    llm = {"attention_backend": "TRITON_MLA", "max_model_len": 2048}
    llm |= {"max_num_batched_tokens": 8192, "max_num_seqs": 3000}
    llm["enable_prefix_caching"] = True
    (ours,) = starts([case(False, 0.5, llm=llm, model="MLA")], "envelope", tmp_path)
    assert ours["outcome"] == "started" and ours["within"], ours


@pytest.mark.parametrize(
    ("name", "v2"),
    [
        ("dense", True),
        pytest.param("experts", True, marks=full),
        ("shared experts", False),
        pytest.param("hybrid", False, marks=full),
        pytest.param("hybrid", True, marks=full),
        pytest.param("hybrid in half", False, marks=long),
        pytest.param("vision", False, marks=full),
        pytest.param("draft", True, marks=full),
        ("n-grams", False),
    ],
)
def test_largest_batches_fit(name: str, v2: bool, tmp_path: Path) -> None:
    """Stock runs out of memory with the first in exactly its budget."""
    more = BATCHES[name]
    llm = {"max_num_seqs": 128} | more.get("llm", {})
    asked = case(v2, 0.7, serve=True, **more | {"llm": llm})
    both = compared({name: asked}, tmp_path, SMALL)
    official, ours = both[name]
    assert official["outcome"] == "started", official
    assert official["served"].startswith("out of memory")
    assert ours["outcome"] == "started" and ours["within"], ours
    assert ours["served"] == "lives"


def test_shared_experts_without_warm_up(tmp_path: Path) -> None:
    """With V2 no step of few tokens, which have a stream of their own, comes before the
    KV cache has its size: without graphs vLLM does not warm up kernels."""
    more = BATCHES["shared experts"]
    llm = more["llm"] | {"gpu_memory_utilization": 1.0}
    llm["gpu_memory_limit_bytes"] = 4 * GIB
    asked = case(True, 1.0, serve=True, **more | {"llm": llm})
    cases = [asked, *(asked | one for one in COMPANY)]
    for ours in starts(cases, "envelope", tmp_path):
        assert ours["outcome"] == "started" and ours["within"], ours
        assert ours["served"] == "lives"


@pytest.mark.parametrize(
    ("v2", "model", "backend"),
    [(False, "dense", "TRITON_ATTN"), (True, "MLA", "TRITON_MLA")],
)
def test_drafts_that_are_longer_than_a_step(
    v2: bool, model: str, backend: str, tmp_path: Path
) -> None:
    llm: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 4}
    llm |= {"max_model_len": 256, "attention_backend": backend}
    llm["speculative_config"] = NGRAM | {"num_speculative_tokens": 5}
    asked = case(v2, 0.5, llm=llm, model=model, generate=3)
    ((official, ours),) = compared({"": asked}, tmp_path).values()
    assert official["outcome"] == ours["outcome"] == "started", (official, ours)
    assert ours["tokens"] == official["tokens"]


def test_buffer_yields_where_nothing_is_left(tmp_path: Path) -> None:
    """The least KV cache fits beside the largest batches, but not beside the buffer."""
    limits = 196, 200, 212, 220
    cases = [
        case(False, 0.9, llm={"gpu_memory_limit_bytes": limit * MIB})
        for limit in limits
    ]
    too_small, *some = starts(cases, "envelope", tmp_path)
    assert too_small["outcome"] != "started"
    for limit, ours in zip(limits[1:], some, strict=True):
        assert ours["outcome"] == "started", (limit, ours)
        assert ours["process_peak"] <= limit * MIB


def test_hybrid_has_its_kv_cache_with_more_sequences(tmp_path: Path) -> None:
    """A prefill copies the states of a group of them, 2 MiB each, several times. The
    sampler's memory per sequence is less than half a MiB."""
    hybrid = BATCHES["hybrid"]
    cases = [
        case(True, 0.7, **hybrid | {"llm": hybrid["llm"] | {"max_num_seqs": number}})
        for number in (32, 256)
    ]
    few, many = starts(cases, "envelope", tmp_path, SMALL)
    assert few["outcome"] == many["outcome"] == "started"
    assert few["within"] and many["within"]
    assert few["kv"] - many["kv"] < (256 - 32) * MIB // 2

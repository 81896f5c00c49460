"""Engines of more than one rank: they start, agree, and fail together.

One file, however long: its tests share the starts of two ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.rank_fails import PHASES
from tests.vgpu.engine.harness import HOOKS, run

MIB, GIB = 2**20, 2**30
REQUESTED = 2 * GIB  # gpu_memory_utilization 0.5
full, topic = pytest.mark.full, pytest.mark.topic
long = pytest.mark.long
TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
PP2 = {"pipeline_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True}
SECONDS = 10  # in which all processes of an engine end


def ranks(
    cases: list[dict[str, Any]],
    vllm: str,
    folder: Path,
    devices: int = 2,
    second: str = "",
    forked: bool = True,
    **more: object,
) -> dict[str, Any]:
    """Results of the scenario: "every", each with its "log".

    `second` is the configuration of the second device, where it differs.
    """
    device = {"memory": "4GiB", "devices": devices, **more}
    tables = HOOKS + (f"\n[device.1]\n{second}\n" if second else "")
    result = run(
        "ranks", cases, vllm=vllm, device=device, hooks=tables, folder=folder,
        forked=forked, timeout=300 * (1 + len(cases)),
    )  # fmt: skip
    logs = re.split("^RESULT .*\n", result["stdout"], flags=re.MULTILINE)
    for engine, log in zip(result["every"], logs, strict=False):
        engine["log"] = log
    return result


STARTS: dict[str, tuple[dict[str, Any], int, tuple[pytest.MarkDecorator, ...]]] = {
    "tp2-v2-graphs": ({"graphs": True, "llm": TP2}, 2, (topic,)),
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
    "tp2-compiled": ({"graphs": True, "compile": True, "llm": TP2}, 2, (full,)),
    "tp2-v2-sleep": ({"graphs": True, "sleep": 1, "llm": TP2}, 2, (full,)),
    "tp2-v1-sleep": ({"v2": False, "sleep": 1, "llm": TP2}, 2, (full,)),
    # Workers that import for themselves.
    "tp2-spawn": ({"method": "spawn", "llm": TP2}, 2, (long,)),
    "tp2-ray": ({"executor": "ray", "llm": TP2}, 2, (long,)),
    "pp2-v1-ray": ({"v2": False, "executor": "ray", "llm": PP2}, 2, (long,)),
    "tp2-pp2-ray": ({"executor": "ray", "llm": TP2 | PP2}, 4, (long,)),
    "tp2-engine-process": ({"engine_process": True, "llm": TP2}, 2, (full,)),
}


@pytest.mark.parametrize(
    ("case", "devices", "vllm"),
    [
        pytest.param(
            c,
            n,
            vllm,
            id=f"{name}-{vllm}",
            # The release shows that the device has what such a start needs.
            marks=long if vllm == "official" and full in marks else marks,
        )
        for name, (c, n, marks) in STARTS.items()
        for vllm in ("official", "envelope")
    ],
)
def test_ranks_start(
    case: dict[str, Any], devices: int, vllm: str, tmp_path: Path
) -> None:
    forked = case.get("executor") != "ray"  # imported modules have not seen Ray
    engines = ranks([case | {"generate": 4}], vllm, tmp_path, devices, forked=forked)[
        "every"
    ]
    assert len(engines) == case.get("data_parallel", 1)
    told = []
    for engine in engines:
        assert engine["outcome"] == "started", engine
        assert engine["v2"] == case.get("v2", True)
        assert engine["tokens"] == [4] * 4
        assert not engine["left"]
        told += engine["ranks"]
        if "sleep" in case:
            check_asleep(engine)
    assert sorted(rank["device"] for rank in told) == list(range(devices))
    for rank in told:
        assert rank["kernels"] and rank["kv"]
        # Memory held before is in no share; stock takes more than its share.
        taken = rank["peak"] - rank["before"]
        assert vllm == "official" or taken <= rank["requested"] == REQUESTED, rank
    # All of an engine have as many blocks, so those of the same layers as many bytes.
    if devices == 2 and "pipeline_parallel_size" not in case["llm"]:
        # The release's first worker caches a segment more if it imports for itself.
        imports = not forked or case.get("method") == "spawn"
        cached = 20 * MIB if vllm == "official" and imports else 0
        assert abs(told[0]["used"] - told[1]["used"]) <= cached


MLA: dict[str, Any] = {
    "attention_backend": "TRITON_MLA",
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
}
LARGEST: dict[str, dict[str, Any]] = {
    "dp2-experts-mla": {"data_parallel": 2, "llm": MLA | EXPERTS},
    "tp2-dcp2-mla": {
        "llm": MLA
        | TP2
        | {
            "attention_backend": "FLASH_ATTN_MLA",
            "decode_context_parallel_size": 2,
            "max_model_len": 16384,
            "hf_overrides": {"max_position_embeddings": 16384},
        }
    },
}


@pytest.mark.parametrize(
    "v2", [pytest.param(False, id="v1", marks=long), pytest.param(True, id="v2")]
)
@pytest.mark.parametrize("name", LARGEST)
def test_largest_batches_of_ranks_fit(name: str, v2: bool, tmp_path: Path) -> None:
    """The patched build serves them within its request; its KV cache is at most 128 MiB
    smaller than one with which stock would."""
    case = LARGEST[name] | {"model": "MLA, 64 experts", "v2": v2, "largest": True}
    official, ours = (
        ranks([asked], vllm, tmp_path)["every"]
        for vllm, asked in (
            # Stock gets as much as it takes.
            ("official", case),
            ("envelope", case | {"tight": True}),
        )
    )
    assert len(official) == len(ours) == case.get("data_parallel", 1)
    for released, engine in zip(official, ours, strict=True):
        for result in released, engine:
            assert result["outcome"] == "started", result
            assert result["served"] == "lives" and not result["left"], result
        for after, own in zip(released["after"], engine["after"], strict=True):
            assert own["peak"] - own["before"] <= own["requested"] == REQUESTED, own
            above = after["peak"] - after["before"] - REQUESTED
            assert after["kv"] - above - own["kv"] <= 128 * MIB, (after, own)


def check_asleep(engine: dict[str, Any]) -> None:
    """All of the pools comes and goes, on each rank."""
    for moment in "ranks", "awake again":
        for awake, asleep in zip(engine[moment], engine["asleep"], strict=True):
            # Falling asleep empties the cache, too.
            cache = awake["used"] - awake["pooled"] - asleep["used"]
            assert 0 <= cache <= (2 * MIB if moment == "ranks" else 0)


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_all_ranks_sleep_and_wake_up_or_none(vllm: str, tmp_path: Path) -> None:
    """Also with an executor of a library that sends names alone."""
    llm = TP2 | {"enable_sleep_mode": True, "enable_nccl_comm_suspend": True}
    ours = vllm == "envelope"
    # The release's first rank unmaps its weights, and no step can read them.
    names = "tests.vgpu.scenarios.names_only.NamesOnly"
    case = {"sleep_fails": True, "llm": llm, "generate": 4 * ours, "executor": names}
    (engine,) = ranks([case], vllm, tmp_path, nccl_communicator="64MiB")["every"]
    assert engine["outcome"] == "started", engine
    steps = engine["steps"]
    used = {name: step["used"] for name, step in steps.items()}
    awake, asleep = used["wake"], used["sleep"]
    assert all(more > less + GIB for more, less in zip(awake, asleep, strict=True))
    refused = steps["wake without room"]
    assert ("free memory, then wake up again" in refused["error"]) == ours, refused
    assert refused["error"] and (used["wake without room"] == asleep) == ours
    assert steps["wake"]["returned"] is True
    assert steps["sleep fails"]["error"]
    assert steps["is asleep"]["returned"] is True
    assert steps["wake after"]["returned"] is True
    # The release says that it is awake, too.
    assert (used["wake after"] == awake) == ours, used
    assert not ours or engine["tokens"] == [4] * 4


def failing(
    rank: int, phase: str, how: str, llm: dict[str, Any] = TP2, **more: Any
) -> dict[str, Any]:
    fails = {"rank": rank, "phase": phase, "how": how}
    # Graphs are profiled only where the KV cache is sized before they are captured.
    first = {"enable_extensible_kv_cache": False} if phase == "profile_graphs" else {}
    return {"graphs": True, "engine_process": True, "generate": 4} | {
        "fails": fails,
        "llm": llm | first,
        **more,
    }


def says(rank: int, why: str) -> str:
    """A pattern: a worker that cannot start, or died, is told with its rank first."""
    return rf"(?:Worker rank {rank} {why}|Worker {why}.*\(rank {rank}\))"


def first_error(log: str) -> str:
    return next(line for line in log.splitlines() if " ERROR " in line)


# "Exception" is the release's for workers that do not start, the last two are Ray's.
ENDED = {
    "RuntimeError",
    "EngineDeadError",
    "Exception",
    "RayTaskError(OutOfMemoryError)",
    "ActorDiedError",
}


def check_ended(result: dict[str, Any]) -> None:
    assert result["outcome"] in ENDED, result
    assert result["failed_after"] <= SECONDS
    assert not result["left"] and not result["left_shared"], result


def at_ranks(rank: int) -> pytest.MarkDecorator:
    """Every phase of one rank in CI; the other's take too long."""
    return pytest.mark.parametrize(
        ("rank", "phases"),
        [
            pytest.param(1, ("profile", "kv_cache"), id="1"),
            pytest.param(rank, PHASES, id=f"{rank}-every", marks=full),
            pytest.param(1 - rank, PHASES, id=f"{1 - rank}-every", marks=long),
        ],
    )


@at_ranks(1)
def test_all_end_when_one_runs_out_of_memory(
    rank: int, phases: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [failing(rank, phase, "memory") for phase in phases]
    engines = ranks(cases, "envelope", tmp_path)["every"]
    for phase, engine in zip(phases, engines, strict=True):
        check_ended(engine)
        assert re.search(rf"\brank {rank}\b", first_error(engine["log"])), phase
        told = (  # a worker that cannot start is told with its rank first
            r"(?:Error|Exception): .*(?:Worker rank (\d) failed with .*out of memory|"
            r"Worker failed with .*out of memory.*\(rank (\d)\))"
        )
        named = [a or b for a, b in re.findall(told, engine["log"])]
        assert named == [str(rank)], phase


@at_ranks(0)
def test_all_end_when_one_dies(
    rank: int, phases: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [failing(rank, phase, "kill") for phase in phases]
    engines = ranks(cases, "envelope", tmp_path)["every"]
    for phase, engine in zip(phases, engines, strict=True):
        check_ended(engine)
        # Another rank may log first that this one is gone.
        told = rf"(?:Error|Exception): .*Worker rank {rank} died .*exit code: -9"
        assert re.search(told, engine["log"]), phase


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_idle_engine_says_who_died(vllm: str, tmp_path: Path) -> None:
    """To health checks and the next request; the release says that one did."""
    case = {"serve": True, "dies": 1, "llm": TP2}
    (engine,) = ranks([case], vllm, tmp_path)["every"]
    assert engine["failed_after"] <= SECONDS and not engine["left"], engine
    for told in engine["health"], engine["request"]:
        assert "EngineCore encountered an issue" in told
        says = "Worker rank 1 died unexpectedly (exit code: -9)" in told
        assert says == (vllm == "envelope"), told


@pytest.mark.parametrize(
    "how", [pytest.param("memory", marks=long), pytest.param("kill", marks=full)]
)
def test_all_of_four_end_when_one_fails(how: str, tmp_path: Path) -> None:
    cases = [failing(2, phase, how, TP4) for phase in PHASES]
    engines = ranks(cases, "envelope", tmp_path, devices=4)["every"]
    why = "failed with .*out of memory" if how == "memory" else "died .*exit code: -9"
    for phase, engine in zip(PHASES, engines, strict=True):
        check_ended(engine)
        told = rf"(?:Error|Exception): .*{says(2, why)}"
        assert re.search(told, engine["log"]), phase


def test_caller_is_told_the_rank(tmp_path: Path) -> None:
    """Where the engine is in the caller's process, which gets its exception."""
    phases = ("load_model", "profile", "execute_model")
    cases = [failing(1, phase, "raise", engine_process=False) for phase in phases]
    results = ranks(cases, "envelope", tmp_path)["every"]
    for phase, result in zip(phases, results, strict=True):
        failed = says(1, rf"failed .*rank 1 .* {phase}")
        assert re.search(failed, result["error"])
        assert result["failed_after"] <= SECONDS
        assert not result["left"]


@full
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("how", ["memory", pytest.param("kill", marks=long)])
@pytest.mark.parametrize(
    ("workers", "phases"),
    [
        pytest.param({"llm": PP2}, ("execute_model",), id="pp2"),
        pytest.param({"llm": PP2}, PHASES, id="pp2-every", marks=long),
        pytest.param({"method": "spawn"}, PHASES, id="spawn-every", marks=long),
        pytest.param({"executor": "ray"}, ("profile",), id="ray"),
        pytest.param({"executor": "ray"}, PHASES, id="ray-every", marks=long),
        pytest.param(
            {"executor": "ray", "llm": PP2}, PHASES, id="pp2-ray-every", marks=long
        ),
    ],
)
def test_all_end_however_they_are_started(
    workers: dict[str, Any], phases: tuple[str, ...], how: str, tmp_path: Path
) -> None:
    """Spawned workers, those of Ray, and those of a pipeline."""
    more = workers | {"engine_process": False}
    cases = [failing(1, phase, how, **more) for phase in phases]
    engines = ranks(cases, "envelope", tmp_path, forked=False)["every"]
    why = "failed with .*out of memory" if how == "memory" else "died"
    for phase, engine in zip(phases, engines, strict=True):
        if "executor" in workers:  # Ray kills its workers, whose queues stay
            engine["left_shared"].clear()
        check_ended(engine)
        assert re.search(says(1, why), engine["error"]), (phase, engine)


@full
@pytest.mark.parametrize(
    ("how", "phases"),
    [
        ("raise", ("load_model", "profile")),
        ("memory", ("profile", "kv_cache")),
        ("kill", ("init_device", "profile", "kv_cache")),
    ],
)
def test_engines_that_share_experts_end_together(
    how: str, phases: tuple[str, ...], tmp_path: Path
) -> None:
    """As when serving: one of two data parallel engines fails."""
    llm = EXPERTS | {"data_parallel_size": 2}
    cases = [failing(1, p, how, llm, model="moe", serve=True) for p in phases]
    for result in ranks(cases, "envelope", tmp_path)["every"]:
        # An engine that has not started 5 seconds after it was told to end is killed
        # with all of its processes, who then cannot remove their queues.
        if "force killing remaining process EngineCore" in result["log"]:
            result["left_shared"].clear()
        check_ended(result)


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(("profile",), id="profile", marks=full),
        pytest.param(("profile_graphs", "capture"), id="graphs", marks=long),
    ],
)
def test_release_hangs(phases: tuple[str, ...], tmp_path: Path) -> None:
    """It waits for the reply of rank 0, and does not read the failure of rank 1."""
    cases = [failing(1, phase, "raise", patience=15) for phase in phases]
    engines = ranks(cases, "official", tmp_path)["every"]
    for phase, engine in zip(phases, engines, strict=True):
        assert engine["outcome"] == "hangs"
        assert f"rank 1 fails in {phase}" in engine["log"]


@full
def test_release_does_not_say_who_died(tmp_path: Path) -> None:
    cases = [failing(0, phase, "kill") for phase in ("load_model", "kv_cache")]
    engines = ranks(cases, "official", tmp_path)["every"]
    for engine, said in zip(engines, ("an exception", "cancelled"), strict=True):
        assert engine["outcome"] == "RuntimeError"
        told = re.findall(r"\] (?:\w+: )?(\w*(?:Error|Exception): .*)", engine["log"])
        assert said in told[-1] and "rank" not in told[-1]


def test_blocks_of_the_smallest_rank(tmp_path: Path) -> None:
    """The ranks have devices of different size; the reports have the loss of a rank."""
    cases = [{"llm": llm, "report": True} for llm in (TP2, PP2)]
    results = ranks(cases, "envelope", tmp_path, second='memory = "3GiB"')["every"]
    for engine in results:
        assert engine["outcome"] == "started", engine
        large, small = engine["ranks"]
        assert (large["requested"], small["requested"]) == (2 * GIB, 3 * GIB // 2)
        assert large["peak"] - large["before"] <= large["requested"]
        assert small["peak"] - small["before"] <= small["requested"]
        reports = [engine["reports"][f"report.json.rank{r}"] for r in (0, 1)]
        for rank, report in zip(engine["ranks"], reports, strict=True):
            assert report["kv_cache_blocks"] == engine["blocks"]
            block = report["kv_cache_block"]
            fit = rank["kv"] // block
            # No rank has addresses for more blocks than any can have.
            assert report["lost_to_other_ranks"] >= (fit - engine["blocks"]) * block
        assert reports[0]["lost_to_other_ranks"] > 400 * MIB
        assert reports[1]["lost_to_other_ranks"] == 0
        # The allocation of the KV cache is rounded up.
        # Warm-up has taken a little of it.
    assert reports[0]["left"] >= reports[0]["lost_to_other_ranks"] - 4 * MIB


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_refused_on_the_smaller_device(vllm: str, tmp_path: Path) -> None:
    """A request of the longest length fits next to one rank and not the other: each
    profiles the same as the other."""
    case = {
        "environment": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
        "llm": TP2 | {"max_model_len": 600_000},
    }
    (engine,) = ranks([case], vllm, tmp_path, second='memory = "2GiB"')["every"]
    assert engine["outcome"] == "ValueError", engine
    assert "KV cache is needed" in engine["error"] and not engine["left"]


@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_explicit_kv_cache_of_a_stage(vllm: str, tmp_path: Path) -> None:
    """A stage with one of four layers needs a third of the other's."""
    case = {
        "environment": {"VLLM_PP_LAYER_PARTITION": "3,1"},
        "llm": PP2 | {"kv_cache_memory_bytes": 5 * GIB // 2},
        "generate": 4,
    }
    (engine,) = ranks([case], vllm, tmp_path, second='memory = "2GiB"')["every"]
    assert engine["outcome"] == "started", engine
    assert engine["blocks"] == 54613 and engine["tokens"] == [4] * 4


@long
def test_ranks_profile_as_many_sequences(tmp_path: Path) -> None:
    """Of a hybrid, whose KV cache holds fewer sequences than are scheduled, and fewer
    on one device than on the other: all ranks run the same passes."""
    llm = TP2 | {"gdn_prefill_backend": "triton", "max_num_seqs": 512}
    # Both ranks compile kernels, of two cores that others use too.
    case = {"model": "hybrid", "generate": 4, "llm": llm, "patience": 360}
    (engine,) = ranks([case], "envelope", tmp_path, second='memory = "3GiB"')["every"]
    assert engine["outcome"] == "started", engine
    assert engine["tokens"] == [4] * 4
    for rank in engine["ranks"]:
        assert rank["peak"] - rank["before"] <= rank["requested"]


def test_refused_on_one_slice(tmp_path: Path) -> None:
    """A limit above the size of one slice, and a co-tenant that leaves too little on
    one."""
    limit = TP2 | {"gpu_memory_limit_bytes": 7 * GIB // 2}
    cases = [
        {"engine_process": True, "llm": limit},
        {"engine_process": True, "llm": TP2, "held": [0, 2 * GIB]},
    ]
    result = ranks(cases, "envelope", tmp_path, second='memory = "3GiB"')
    for engine in result["every"]:
        assert engine["outcome"] == "RuntimeError" and not engine["left"], engine
    reasons = ("gpu_memory_limit_bytes .* is more than device cuda:1", "Free memory on")
    for reason in reasons:
        worker = r"\(Worker\w* pid=\d+\) ERROR .*ValueError: "
        assert len(re.findall(worker + reason, result["stdout"])) == 1
        told = rf"Exception: .*Worker rank 1 failed with 'ValueError: {reason}"
        assert re.search(told, result["stdout"])

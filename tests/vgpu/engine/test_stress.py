"""A process in which an engine serves, loads and sleeps, and its caller allocates."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import caller
from tests.vgpu.engine.harness import HOOKS, run

MIB = 2**20


def outcomes(vllm: str, programs: int, maps: bool, folder: Path) -> dict[int, str]:
    folder.mkdir()
    case = {"programs": programs, "seed": 1, "memory": 1500 * MIB, "maps": maps}
    device = {"memory": "16GiB"}
    done = run(
        "stress", case, vllm=vllm, device=device, folder=folder, timeout=programs * 60
    )
    return {result["seed"]: result["outcome"] for result in done["every"]}


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("maps", [True, False], ids=["", "no-mapping"])
@pytest.mark.parametrize(
    "programs", [12, pytest.param(10_000, marks=pytest.mark.long, id="many")]
)
def test_nobody_is_harmed(programs: int, maps: bool, tmp_path: Path) -> None:
    """And a program that lives with the release lives with ours."""
    ours = outcomes("envelope", programs, maps, tmp_path / "envelope")
    release = outcomes("official", programs, maps, tmp_path / "official")
    assert len(ours) == programs
    assert not [seed for seed in ours if ours[seed].startswith("harmed")]
    assert not [
        seed for seed in release if release[seed] == "lives" and ours[seed] != "lives"
    ]


@pytest.mark.parametrize("free_at", ["start", "end"])
def test_why_a_split_limit_is_not_switched(free_at: str, tmp_path: Path) -> None:
    """With one, PyTorch alone frees memory in use: the report in docs/upstream.md."""
    device = {"memory": "2GiB"}
    result = run(
        "split_limit", free_at, vllm="official", device=device, folder=tmp_path
    )
    if free_at == "start":
        assert result["outcome"] == "allocated"
        assert (result["allocated"], result["held"]) == (452, 0)
    else:
        assert "invalid argument" in result["error"]


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_why_a_trainer_captures_in_one_pool(expandable: str, tmp_path: Path) -> None:
    """PyTorch waits for the stream of an expandable segment that it gives back."""
    device = {"memory": "2GiB"}
    result = run(
        "captured_again", expandable, vllm="official", device=device, folder=tmp_path
    )
    if expandable == "False":
        assert (result["emptied"], result["captured"]) == ("done", "done")
    else:
        assert "not permitted when stream is capturing" in result["emptied"]
        assert "previous error during capture" in result["captured"]


@pytest.mark.parametrize(
    ("vllm", "v2"), [("official", False), ("envelope", False), ("envelope", True)]
)
def test_cache_of_warming_up_is_not_a_neighbours(
    vllm: str, v2: bool, tmp_path: Path
) -> None:
    """V1 warms up the sampler for batches that come when nothing is free any more. The
    patched build has what its largest batches took, with both runners."""
    llm = {"max_num_seqs": 256, "gpu_memory_utilization": 0.9}
    case = {"model": "llama-8b", "v2": v2, "llm": llm, "greedy": True}
    result = run(
        "start",
        case | {"generate": 3},
        vllm=vllm,
        device={"memory": "32GiB"},
        hooks=HOOKS,
        folder=tmp_path,
    )
    assert result.get("tokens") == [3] * 4, result


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemSetAccess"])
@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_driver_cannot_map_memory(vllm: str, call: str, tmp_path: Path) -> None:
    """Nothing of it, or only in part (pytorch#192330)."""
    device = {"memory": "8GiB"}
    case = {"model": "dense", "refused": call, "generate": 3}
    result = run("start", case, vllm=vllm, device=device, hooks=HOOKS, folder=tmp_path)
    assert result.get("tokens") == [3] * 4, result


@pytest.mark.full
@pytest.mark.parametrize("vllm", ["official", "envelope"])
def test_second_engine_is_served(vllm: str, tmp_path: Path) -> None:
    """The cache of the first engine leaves memory for it, though nothing limits
    that."""
    result = run(
        "two_engines",
        {"steps": 40},
        vllm=vllm,
        device={"memory": "32GiB"},
        hooks=HOOKS,
        folder=tmp_path,
        timeout=500,
    )
    assert (result["outcome"], result["second"]) == ("served", "served"), result


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (10, 40),
        *(pytest.param(seed, 40, marks=pytest.mark.long) for seed in (4, 7)),
    ],
)
def test_caller_finds_what_it_finds_with_the_release(
    seed: int, steps: int, tmp_path: Path
) -> None:
    """Tokens, its data, stream, settings and limit after each step of a random program;
    `make bench-caller` runs longer ones."""
    logs, last = {}, {}
    for vllm in ("official", "envelope"):
        folder = tmp_path / vllm
        folder.mkdir()
        case = caller.case(seed, steps, vllm)
        device = {"memory": "8GiB", "streams_behind": True, "behind_queries": 0}
        result = run(
            "caller", case, vllm=vllm, device=device, hooks=HOOKS, folder=folder,
            timeout=600 + steps,
        )  # fmt: skip
        logs[vllm] = result["log"]
        last[vllm] = result["on_a_stream"]
    assert not caller.differs(logs["official"], logs["envelope"], steps)
    actions = {action for action, *_ in logs["envelope"][1:]}
    assert {"capture", "replay", "copy_on_the_default_stream"} <= actions
    # Stock's V2 runner reads the first token there before it has computed, and leaves
    # the thread on another stream.
    (first, *tokens), is_its_stream = last["envelope"]
    assert is_its_stream and tokens == [first + 1, first + 2]
    assert last["official"][1] == (not case["v2"])

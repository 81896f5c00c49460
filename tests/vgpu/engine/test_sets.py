"""Each set of topics alone cures what its row of README.md promises; the release, in
the same test, does not.

A set has the files of its own wheel: no topic that its closure leaves out is there. A
case runs tests of the whole series with the set in its place.
"""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.topics import sets
from tests.vgpu.engine import harness
from tests.vgpu.engine import test_budget as budget
from tests.vgpu.engine import test_calls as calls
from tests.vgpu.engine import test_findings as findings
from tests.vgpu.engine import test_fragmentation as fragmentation
from tests.vgpu.engine import test_never_worse as never_worse
from tests.vgpu.engine import test_prompt_rows as prompt_rows
from tests.vgpu.engine import test_ranks as ranks
from tests.vgpu.engine import test_shares as shares
from tests.vgpu.engine import test_sleep_mode as sleep_mode
from tests.vgpu.engine import test_suggestion as suggestion
from tests.vgpu.engine import test_unified as unified
from tests.vgpu.engine.harness import BASE, ROOT, run

MIB = 2**20
SETS = sets(ROOT)
Row = Callable[[str, Path], None]


def share(folder: Path) -> None:
    """What HAMi and MIG clamp, or only one source knows, to the byte."""
    names = [n for _, run_of in shares.batches("official") for n in run_of]
    names = [n for n in names if n.startswith("clamped")]
    for vllm in "official", "envelope":
        shares.test_share_of_a_device(vllm, "", names, folder)
    both = [[shares.expected(n, vllm) for n in names] for vllm in harness.SITES]
    assert both[0] != both[1]


def both(stock: Row, patched: Row, name: str) -> Callable[[Path], None]:
    """The same row of both builds."""

    def case(folder: Path) -> None:
        stock(name, folder)
        patched(name, folder)

    return case


def fragmentation_of(name: str) -> Callable[[Path], None]:
    dies = fragmentation.test_stock_fails_by_fragmentation
    return both(dies, fragmentation.test_patched_serves, name)


def fragmentation_with_more(folder: Path) -> None:
    """Without the topics that count the sampler's buffers, of 64 MiB here."""
    fragmentation.test_stock_fails_by_fragmentation(fragmentation.MIXED, folder)
    case = fragmentation.CASES[fragmentation.MIXED]
    more = {"llm": case.get("llm", {}) | {"fragmentation_buffer_bytes": 192 * MIB}}
    (load,) = fragmentation.serve(case | more, "envelope", folder)["runs"]
    assert load["outcome"] == "served", load


def suggested(folder: Path) -> None:
    suggestion.test_stock_suggests_too_little(False, folder)
    suggestion.test_patched_starts_with_what_it_suggests(False, folder)


def start_in(name: str) -> Callable[[Path], None]:
    does_not = budget.test_stock_start_does_not
    return both(does_not, budget.test_start_stays_in_its_share, name)


def load_of_experts(folder: Path) -> None:
    sleep_mode.test_stock_loads_only_with_memory_to_spare("experts", folder, folder)
    sleep_mode.test_patched_loads_in_five_percent_more_than_tensors_hold(
        "experts", folder, folder
    )


def failed_allocation(folder: Path) -> None:
    findings.test_stock_churn_loses_memory_and_fails(folder)
    findings.test_patched_churn_is_bounded_and_returns_all(folder)


def explicit_kv_cache(folder: Path) -> None:
    never_worse.test_stock_asks_an_explicit_kv_cache_for_more(True, folder)
    never_worse.test_bytes_that_are_asked_for(True, folder)


def graphs(folder: Path) -> None:
    """Profiling them takes no KV cache of a block for each sequence."""
    hybrid = {
        "model": "hybrid",
        "graphs": True,
        "llm": {
            "gdn_prefill_backend": "triton",
            "gpu_memory_utilization": 0.45,
            "max_num_seqs": 512,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
        },
    }
    official, ours = (
        run("start", hybrid, vllm=vllm, device={"memory": 2560 * MIB}, folder=folder)
        for vllm in ("official", "envelope")
    )
    assert official["peak"] > 0.45 * 2560 * MIB >= ours["peak"], (official, ours)


def drafts(folder: Path) -> None:
    never_worse.test_largest_batches_fit("draft", True, folder)


def large_prefill(folder: Path) -> None:
    """With 256 MiB more than the budget."""
    batches = never_worse.BATCHES["hybrid"]
    llm = {"max_num_seqs": 128} | batches["llm"]
    left = int(0.7 * 2560 * MIB) + 256 * MIB
    cases = {
        f"V{1 + v2}": never_worse.case(v2, 0.7, model="hybrid", llm=llm, serve=left)
        for v2 in (False, True)
    }
    both = never_worse.compared(cases, folder, never_worse.SMALL)
    for official, ours in both.values():
        assert official["served"].startswith("out of memory"), official
        assert ours["outcome"] == "started" and ours["served"] == "lives", ours


def late_replies(folder: Path) -> None:
    calls.test_release_shifts_replies(folder)
    calls.test_outcomes_of_a_call(folder)


def failing_rank(folder: Path) -> None:
    ranks.test_release_hangs(("profile",), folder)
    ranks.test_all_end_when_one_runs_out_of_memory(1, ("profile",), folder)


def who_died(folder: Path) -> None:
    for vllm in "official", "envelope":
        ranks.test_idle_engine_says_who_died(vllm, folder)


def prompt_logprobs(folder: Path) -> None:
    for vllm in "official", "envelope":
        prompt_rows.test_prompt_logprobs_take_what_is_profiled(vllm, folder)


def host_memory(folder: Path) -> None:
    sleep_mode.test_host_memory_of_level_1("llama-8b", 4, folder)


def offloaded(folder: Path) -> None:
    sleep_mode.test_host_memory_of_offloaded_weights("llama-8b", 4, "uva", folder)


def growth(folder: Path) -> None:
    """A device has memory left, of which 24 GiB were asked for."""
    asked = fragmentation.CASES["8B"] | {"alone": True, "llm": fragmentation.LIMIT}
    official, ours = (
        fragmentation.serve(asked, vllm, folder)["runs"][0]
        for vllm in ("official", "envelope")
    )
    assert official["outcome"] == ours["outcome"] == "served"
    limit = fragmentation.LIMIT["gpu_memory_limit_bytes"]
    assert official["process_peak"] > limit >= ours["process_peak"]


def host_reserve(folder: Path) -> None:
    unified.test_fraction_leaves_the_host_its_reserve("V2", folder)


# Of topics.toml's `cures`.
CASES: dict[str, Callable[[Path], None]] = {
    "co-tenant": start_in("co-tenant that releases"),
    "drafts": drafts,
    "explicit KV cache": explicit_kv_cache,
    "failed allocation": failed_allocation,
    "failing rank": failing_rank,
    "fragmentation": fragmentation_of("8B"),
    "fragmentation, 192 MiB": fragmentation_with_more,
    "graphs": graphs,
    "growth": growth,
    "host memory": host_memory,
    "host reserve": host_reserve,
    "large prefill": large_prefill,
    "late replies": late_replies,
    "limit": start_in("limit next to a co-tenant"),
    "load of experts": load_of_experts,
    "offloaded": offloaded,
    "prompt logprobs": fragmentation_of("8B, prompt logprobs"),
    "prompt logprobs, V2": prompt_logprobs,
    "share": share,
    "suggestion": suggested,
    "who died": who_died,
}
# The cheapest of each set; `make test-long` has all.
CI = {
    "shared": "prompt logprobs, V2",
    "sleep": "failed allocation",
    "core": "share",
}


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """A set is in the place of the series."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(harness.SITES, "envelope", laid_out(request.param))
        yield
        harness.close_server("envelope")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("alone", "case"),
    [
        pytest.param(
            one.name,
            case,
            id=f"{one.name}-{case}",
            marks=() if CI[one.name] == case else pytest.mark.long,
        )
        for one in SETS.values()
        for case in one.cures.values()
    ],
    indirect=["alone"],
)
@pytest.mark.usefixtures("alone")
def test_set_cures(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path)


def test_ci_has_a_case_of_each_set() -> None:
    cured = {one.name: set(one.cures.values()) for one in SETS.values() if one.cures}
    assert cured.keys() == CI.keys()
    assert all(CI[name] in cases for name, cases in cured.items())
    assert set().union(*cured.values()) == CASES.keys()


def laid_out(name: str) -> str:
    """The folder of a set's vLLM; another worker may be at it."""
    sets = ROOT / "build/sets"
    sets.mkdir(parents=True, exist_ok=True)
    with (sets / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [ROOT / ".venv/bin/python", "-m", "scripts.lay_out", "--set", name]
        told = subprocess.check_output([*command, "--base", BASE], cwd=ROOT, text=True)
    return told.strip()

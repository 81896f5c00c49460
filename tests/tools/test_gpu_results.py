"""How gpu/suite.py and calibrate.py judge figures, and the page made of them.

The figures here are made up; those of GPUs are in results/ alone.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gpu import calibrate, card, results_page, suite
from scripts.commands import Problem
from tests.tools.project import module
from vgpu import config

MIB, GIB = 2**20, 2**30
WHOLE = suite.Machine(141 * GIB, 140 * GIB, "", virtual=False, large=True)
GPU = {
    "name": "NVIDIA H200",
    "memory": WHOLE.total,
    "compute_capability": "9.0",
    "driver": "1.2.3",
    "share": "",
    "used_before": 0,
    "virtual": False,
}
SERVED: dict[str, Any] = {
    "outcome": "started",
    "tokens": {"greedy": [[1, 2]], "sampled": [[3, 2]]},
    "tokens_after": {"greedy": [[1, 2]], "sampled": [[3, 2]]},
    # The driver keeps 2 MiB more after the first sleep.
    "sleep": {
        "pooled": 100 * MIB,
        "awake": 103 * MIB,
        "asleep": 5 * MIB,
        "weights": 69 * MIB,
        "awake again": 105 * MIB,
    },
    "decode": [1.0, 2.0, 3.0],
    "ms_per_step": 10.0,
    "tokens_per_second": 1600.0,
}


def broken(case: str, unpatched: Any, patched: Any) -> list[str]:
    (found,) = (c for c in suite.CASES if c.name == case)
    return [w for w, _, holds in found.judge(WHOLE, unpatched, patched) if not holds]


def served(**changed: Any) -> dict[str, Any]:
    return copy.deepcopy(SERVED) | changed


def test_equal_tokens_at_equal_speed_hold() -> None:
    assert broken("serving: dense", SERVED, served(decode=[1.009, 2.0, 3.0])) == []


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"tokens_after": {"greedy": [[1, 3]]}}, "patched: equal tokens before sleep"),
        ({"decode": [1.02, 2.04, 3.06]}, "time per step within 1 %"),
        ({"decode": [0.98, 1.96, 2.94]}, "time per step within 1 %"),
    ],
)
def test_other_tokens_or_speeds_do_not(changed: dict[str, Any], wanted: str) -> None:
    (found,) = broken("serving: dense", SERVED, served(**changed))
    assert found.startswith(wanted)


def test_sleep_frees_all_but_page_tables_of_the_weights() -> None:
    def asleep(size: int) -> dict[str, Any]:
        changed = SERVED["sleep"] | {"asleep": size}
        changed["weights"] = size + 64 * MIB
        return served(sleep=changed)

    tables = 64 * MIB // 4096 * 8
    more = asleep(5 * MIB + tables)
    assert broken("serving: dense", more, more) == []
    (found,) = broken("serving: dense", SERVED, more)
    assert found.startswith("patched: asleep, no more is used than")
    more = asleep(5 * MIB + tables + 1)
    unpatched, patched = broken("serving: dense", more, more)
    assert unpatched.startswith("unpatched: sleep frees")
    assert patched.startswith("patched: sleep frees")


def slept(sizes: list[int]) -> dict[str, Any]:
    """Bytes of the host beyond the weights, by cycle."""
    half = {"wall": 1.0, "processor": 1.0}
    return {
        "outcome": "slept",
        "cycles": [
            {
                "bytes": GIB,
                "huge_pages": True,
                "level": level,
                "cycle": cycle,
                "sleep": half | {"host": GIB + size},
                "wake": half,
            }
            for level, sizes in ((1, sizes), (2, [0, 0]))
            for cycle, size in enumerate(sizes)
        ],
    }


def test_host_memory_is_of_who_slept_first() -> None:
    """Later figures are those of both processes."""
    stock, kept = slept([2 * GIB, GIB]), slept([GIB, 2 * GIB])
    host = "patched: host memory above the weights"
    assert not [f for f in broken("sleep cycles", stock, kept) if f.startswith(host)]
    more = slept([GIB + 1, 2 * GIB])
    assert [f for f in broken("sleep cycles", stock, more) if f.startswith(host)]


def test_tokens_that_are_all_alike_prove_nothing() -> None:
    alike = {"tokens": {"greedy": [[0, 0]]}, "tokens_after": {"greedy": [[0, 0]]}}
    found = broken("serving: dense", served(**alike), served(**alike))
    assert len(found) == 2 and all("more than one token" in f for f in found)


def test_engine_that_does_not_start_does_not_hold() -> None:
    died = {"outcome": "no result", "error": "nothing within 150 s"}
    assert broken("serving: moe", SERVED, died) == ["patched: serves"]


def test_peak_above_the_limit_does_not_hold() -> None:
    case = "start within a limit, beside a co-tenant"
    ran = {"outcome": "started", "process_peak": suite.LIMIT}
    over = ran | {"process_peak": suite.LIMIT + 1}
    assert broken(case, over, ran) == []
    assert broken(case, ran, over) == [
        "unpatched: goes over 4 GiB",
        "patched: stays in 4 GiB",
    ]


def test_cases_say_why_they_are_not_run() -> None:
    cases = {case.name: case for case in suite.CASES}
    small = suite.Machine(16 * GIB, 15 * GIB, "", virtual=False, large=True)
    slice_ = suite.Machine(16 * GIB, 15 * GIB, "HAMi", virtual=False, large=True)
    assert f"{30 * GIB} bytes are needed" in suite.why_not(
        cases["loading: experts"], small
    )
    limited = cases["start within a limit, beside a co-tenant"]
    assert suite.why_not(limited, small) == ""
    assert suite.why_not(limited, slice_) == "HAMi"
    assert suite.why_not(cases["start in the slice"], small) == "the GPU is whole"
    assert suite.why_not(cases["start in the slice"], slice_) == ""
    # Any card of 16 GiB runs all but the largest load.
    too_large = [name for name, case in cases.items() if case.needs > small.free]
    assert too_large == ["loading: experts"]


def test_slices_of_the_gpu_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert card.share(is_mig=False) == ""
    assert card.share(is_mig=True) == "MIG"
    (tmp_path / "control").touch()
    assert card.share(is_mig=False) == "MPS"
    monkeypatch.setenv("CUDA_DEVICE_MEMORY_LIMIT_0", "10g")
    assert card.share(is_mig=False) == "HAMi, MPS"


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    for name in ("suite", "calibrate"):
        done = module(f"gpu.{name}", "--out", tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith("error: no GPU: there is no libcuda.so.1")
    assert not list(tmp_path.iterdir())


def written(**changed: Any) -> dict[str, Any]:
    entry = {
        "unpatched": {"outcome": "OOM"},
        "patched": {"outcome": "loaded", "peak": 123},
        "checks": [{"wanted": "patched: loads", "found": "loaded", "holds": True}],
        "seconds": 1.0,
    }
    return {
        "date": "2020-01-01",
        "gpu": GPU,
        "host": {"cpus": 2, "kernel": "6"},
        "versions": {"torch": "2"},
        "command": "python -m gpu.suite",
        "cases": {"churn": entry, "late": {"not run": "3 s are left"}},
        "seconds": 2.0,
    } | changed


def calibration() -> dict[str, Any]:
    memory = {"model": 50 * GIB, "kv_cache": 10 * GIB}
    predicted = {"model": 51 * GIB, "kv_cache": 9 * GIB}
    return written(
        kind="calibration",
        date="2020-01-02",
        measured={"context": 512},
        **{"not measured": {"nccl": "no\nNCCL error"}},
        starts={
            "dense": {"card": {"memory": memory}, "predicted": {"memory": predicted}}
        },
    )


def test_prediction_is_judged_by_the_goal() -> None:
    model, kv_cache = calibrate.compare(calibration())
    # 1 % of 141 GiB, and 2 % of the KV cache.
    assert (model["goal"], model["met"]) == (141 * GIB // 100, True)
    assert (kv_cache["goal"], kv_cache["met"]) == (int(0.02 * 10 * GIB), False)


def test_page_shows_every_figure_and_check(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(written()))
    (tmp_path / "b.json").write_text(json.dumps(calibration()))
    text = results_page.page(tmp_path)
    assert "No results yet" not in text
    assert text.index("Calibration: NVIDIA H200") < text.index("Suite: NVIDIA H200")
    for line in (
        "| patched: loads | loaded | yes |",
        "| outcome | OOM | loaded |",
        "| peak | - | 123 |",
        "Not run: 3 s are left.",
        "| context | 512 |",
        "| nccl | not measured: NCCL error |",
        f"| dense | kv_cache | {10 * GIB} | {9 * GIB} | {-GIB} | 214748364 | **no** |",
    ):
        assert line in text.splitlines(), line


def test_page_shows_the_last_run_of_a_case(tmp_path: Path) -> None:
    late = {"not run": "1 s is left"}
    again = written(cases={"churn": written()["cases"]["churn"], "late": late})
    again["cases"]["churn"]["patched"] = {"outcome": "loaded", "peak": 456}
    (tmp_path / "a-2020-01-01-2-0.33.0.json").write_text(json.dumps(again))
    (tmp_path / "a-2020-01-01-0.33.0.json").write_text(json.dumps(written()))
    another = written(gpu=GPU | {"name": "NVIDIA L4"}, date="2019-01-01")
    (tmp_path / "b.json").write_text(json.dumps(another))
    lines = results_page.page(tmp_path).splitlines()
    assert lines.count("| peak | - | 456 |") == 1
    assert lines.count("| peak | - | 123 |") == 1  # the other GPU's
    assert lines.count("Ran again: a-2020-01-01-2-0.33.0.json.") == 1
    assert lines.count("Not run: 3 s are left.") == 2  # no newer one has run


def test_page_takes_no_virtual_results(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(written(gpu=GPU | {"virtual": True})))
    with pytest.raises(Problem, match="made on the virtual device"):
        results_page.page(tmp_path)
    path.write_text("{}")
    with pytest.raises(Problem, match="is no result"):
        results_page.page(tmp_path)


def test_page_in_docs_is_that_of_results() -> None:
    done = module("gpu.results_page", "--check")
    assert done.returncode == 0, done.stderr


def test_profile_says_what_was_measured_and_what_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = dict.fromkeys(calibrate.PROPERTIES, 7)
    properties |= {"memory": 141 * GIB, "nvml_total": 142 * GIB, "integrated": 0}
    measured = {"context": 512 << 20, "malloc_block": 2 << 20, "nccl": 99}
    text = calibrate.profile(GPU, properties, measured, "2020-01-01")
    (tmp_path / "h200.toml").write_text(text)
    monkeypatch.setattr(config, "PROFILES", tmp_path)
    values = config.read_profile("h200")
    assert values["memory"] == 141 * GIB and values["context"] == 512 << 20
    assert "graph_node" not in values
    assert "# not measured: graph_node" in text
    assert "# measured, 99 bytes: NCCL's buffers" in text


def test_gpu_keeps_the_name_of_its_profile() -> None:
    assert calibrate.profile_name("NVIDIA GeForce RTX 3090") == "rtx3090"
    assert calibrate.profile_name("NVIDIA A100-SXM4-80GB") == "a100-80gb"
    assert calibrate.profile_name("NVIDIA A30-24GB") == "a30-24gb"  # has none


@pytest.mark.parametrize(
    ("stock", "holds"),
    [
        ({"left": 8, "served": "out of memory: CUDA"}, [True, True]),
        ({"left": 7, "served": "out of memory: CUDA"}, [False, True]),
        ({"left": 8, "served": "lives"}, [True, False]),
        ({}, [False, False]),
    ],
)
def test_stock_is_left_the_same_and_judged(
    stock: dict[str, Any], holds: list[bool]
) -> None:
    started = {"outcome": "started"}
    patched = started | {"left": 8, "served": "lives", "requested": 4}
    machine = suite.Machine(total=9, free=9, share="", virtual=False, large=False)
    checks = suite.serves_full_batches(machine, started | stock, patched)
    assert [found[2] for found, _ in zip(checks, holds, strict=False)] == holds

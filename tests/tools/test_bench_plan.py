"""make bench-plan: how predictions are compared with published figures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench import plan, published_runs, simulated_start
from scripts.commands import REPOSITORY

GIB = 1 << 30
RUN: dict[str, Any] = {
    "id": "a run",
    "gpu": "NVIDIA H100 80GB",
    "gpu_count": 1,
    "vllm_version": "0.19.0",
    "config_exact": True,
    "model_loading_gib": 10.0,
    "kv_tokens": 1000,
}
STARTED = {"outcome": "started", "weights": 11 * GIB, "kv_tokens": 990}


def row(release: str = "0.19.0", **changed: Any) -> published_runs.Row:
    return published_runs.Row(RUN | changed, release, STARTED)


def test_error_is_predicted_minus_published() -> None:
    *_, last = cells = published_runs.of_run(row()).strip("| ").split(" | ")
    assert cells[2] == "11.00 / 10.00 (+10.0 %)"
    assert cells[3:7] == [""] * 4  # not published
    assert last == "990 / 1,000 (-1.0 %)"


def test_another_release_or_config_is_marked_and_not_held_against_the_goals() -> None:
    rows = [
        row(),
        row("0.24.0", id="newer", kv_tokens=500),
        row(id="stand-in", config_exact=False, kv_tokens=2000),
    ]
    each = published_runs.each_run(rows)
    assert "| newer | 0.24.0 for 0.19.0 | 11.00 / " in each
    assert "| stand-in (config not exact) | 0.19.0 |" in each
    page = published_runs.page(rows)
    exact = "| config exact, same release | KV tokens | 1 | 1.00 % | 1.00 % |"
    assert exact in page
    assert "| all on one GPU | KV tokens | 3 | 49.83 % | 98.00 % |" in page
    assert "| all on one GPU | weights | 3 | 10.00 % | 10.00 % | 1024 MiB |" in page


def test_runs_that_judge_are_chosen_by_their_id() -> None:
    runs = tomllib.loads((REPOSITORY / published_runs.DATA / "runs.toml").read_text())
    rows = [published_runs.Row(run, "", STARTED) for run in runs["run"]]
    added = [row for row in rows if "added" in row.run]
    judging = [row for row in added if row.judges]
    assert (len(added), len(judging)) == (32, 16)
    assert not any(row.judges or row.fits for row in rows if row not in added)
    assert sum(row.run["gpu_count"] > 1 for row in added) == 15
    summary = published_runs.summary(added)
    (line,) = (s for s in summary if "judging, one GPU | KV tokens" in s)
    assert f"| {sum(row.run['gpu_count'] == 1 for row in judging)} |" in line


def test_left_out_and_refused_are_said() -> None:
    refused = published_runs.Row(
        RUN, "0.19.0", {"outcome": "ValueError", "error": "No."}
    )
    left_out = published_runs.Row(RUN | {"id": "two"}, "", {}, "2 GPUs: not yet")
    page = published_runs.each_run([refused, left_out])
    assert "| a run | 0.19.0 | No. |" in page
    assert "- two: 2 GPUs: not yet" in page


@pytest.mark.parametrize(
    ("wanted", "known", "found"),
    [
        ("0.19.0", ["0.33.0", "0.24.0"], "0.24.0"),
        ("0.27.1", ["0.33.0", "0.27.0", "0.24.0"], "0.27.0"),
        ("0.31.0", ["0.33.0", "0.24.0"], "0.33.0"),
    ],
)
def test_nearest_release(
    wanted: str, known: list[str], found: str, tmp_path: Path
) -> None:
    for version in known:
        ready = tmp_path / f".venv-vllm-{version}/ready"
        ready.parent.mkdir()
        ready.touch()
    (tmp_path / f".venv-vllm-{wanted}").mkdir()  # not ready
    assert published_runs.nearest(tmp_path, wanted) == found


def test_every_run_has_its_config_and_a_card() -> None:
    folder = REPOSITORY / published_runs.DATA
    runs = tomllib.loads((folder / "runs.toml").read_text())["run"]
    assert len(runs) == len({run["id"] for run in runs}) == 65
    for run in runs:
        assert (folder / run["config_file"]).is_file()
        card = next(c for word, c in published_runs.CARDS.items() if word in run["gpu"])
        assert card in plan.cards()


def test_quantization_that_no_config_says_is_passed_on(tmp_path: Path) -> None:
    run = RUN | {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "config_file": "configs/meta-llama--Llama-3.1-8B-Instruct.json",
    }
    release = simulated_start.Release(tmp_path, "0.33.0", None)

    def flags(name: str, **changed: Any) -> tuple[str, ...]:
        (folder := tmp_path / name).mkdir()
        return published_runs.asked(run | changed, REPOSITORY, release, folder).flags

    assert flags("asked", quantization="fp8") == ("--quantization", "fp8")
    assert flags("none", quantization="None") == ()
    said = {"quantization_config": {"quant_method": "fp8"}}
    assert flags("said", quantization="fp8", config_added=said) == ()


def test_planners_are_asked_about_the_added_runs_and_compared_in_tokens() -> None:
    runs = [
        RUN | {"id": name, "added": "2026-11-27", "available_kv_gib": 1.0}
        for name in ("one", "two")
    ]
    rows = [published_runs.Row(runs[0], "0.19.0", STARTED)]
    told = {"a planner==1": {"one": {"kv_tokens": 1500}, "two": {"kv_bytes": 2 * GIB}}}
    *_, tokens, each = published_runs.of_peers(runs, rows, told)
    assert tokens == (
        "| a planner==1 | KV tokens | 1 | 50.00 % | 50.00 % | 1 | 1.00 % | 1.00 % |"
    )
    assert each.startswith("| a planner==1 | bytes/token | 1 | 199900.00 %")
    assert published_runs.peer_cell(runs[0], told["a planner==1"]["one"]) == (
        "1,500 (+50.0 %)"
    )
    assert published_runs.peer_cell(runs[0], {"error": "knows one GPU"}) == "-"


def test_runs_that_were_not_replayed_are_counted() -> None:
    runs = [RUN | {"id": f"run {n}", "added": "2026-11-27"} for n in range(4)]
    rows = [published_runs.Row(runs[0], "0.19.0", STARTED)]
    lines = list(published_runs.off_by(runs, rows))[2:]
    of = [line.split(" | ")[1] for line in lines]
    assert sum(int(cell.split(" of ")[1]) for cell in of) == 4
    assert sum(int(cell.split(" of ")[0]) for cell in of) == 1


def test_parts_of_the_compiler_are_found_in_the_environment(tmp_path: Path) -> None:
    release = simulated_start.Release(tmp_path, "0.33.0", None)
    assert release.nvrtc is None
    packages = tmp_path / release.name / "lib/python3.12/site-packages"
    folder = packages / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    (folder / "libnvrtc-builtins.so.13.0").touch()
    assert release.nvrtc == folder

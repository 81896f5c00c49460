"""The suite and the calibration for GPUs, on the virtual device as if it were one.

They see NVML and the driver there, not the device's own counters. What kernels would
have computed cannot be judged: equal tokens, times, NCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpu import calibrate
from gpu.suite import CYCLES, ROUNDS_THERE, Ratios
from scripts import caches
from tests.vgpu.engine.harness import HOOKS, ROOT

MIB = 2**20
CARD = """
memory = "16GiB"
context = "300MiB"
cublas_handle = "64MiB"
module = "1MiB"
graph = "64KiB"
graph_node = 4096
"""
# The suite's scenarios find no counters of the virtual device, as on a GPU.
NO_COUNTERS = """
import os
if os.environ.get("ENVELOPE_METER") == "NVML":
    from vgpu import launch
    def library():
        raise launch.VgpuError("on a GPU there is no virtual device")
    launch.library = library
"""
PARAMETERS = {
    "context": 300 * MIB,
    "cublas_handle": 64 * MIB,
    "module": MIB,
    "graph": 64 << 10,
    "graph_node": 4096,
    "malloc_block": 2 * MIB,
    "vmm_granularity": 2 * MIB,
}


def call(
    module: str, *arguments: str, folder: Path, card: str = CARD
) -> subprocess.CompletedProcess[str]:
    """Run one of gpu/ below the virtual device, or next to it if `card` is empty."""
    command = [sys.executable, "-m", f"gpu.{module}", *arguments]
    if card:
        settings = folder / "card.toml"
        settings.write_text(card)
        vgpu = [sys.executable, "-m", "vgpu", "--config", str(settings), "--"]
        command = vgpu + command
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(NO_COUNTERS)
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    return subprocess.run(
        command,
        cwd=folder,
        env=caches.environment(os.environ | path, folder / "caches"),
        capture_output=True,
        text=True,
    )


def suite(only: str, folder: Path, card: str = CARD, *options: str) -> dict[str, Any]:
    done = call(
        "suite", "--out", str(folder), "--only", only, "--limit", "1400",
        "--case-limit", "600", *options, folder=folder, card=card,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (path,) = folder.glob("virtual-gpu-*-0.33.0.json")
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["gpu"]["virtual"]
    return content


@pytest.mark.full
def test_cases_hold(tmp_path: Path) -> None:
    content = suite("^churn$|^consumption|^loading: growing", tmp_path)
    assert len(content["cases"]) == 3
    for entry in content["cases"].values():
        assert len(entry["checks"]) >= 2
        assert all(check["holds"] for check in entry["checks"])
    # The context, which was there before, is not counted.
    churned = content["cases"]["churn"]["patched"]
    assert churned["after"]["used"] == 2400 * MIB
    loaded = content["cases"]["loading: growing"]["patched"]
    assert loaded["peak"] >= loaded["needed"] > 0


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_both_engines_serve_side_by_side(tmp_path: Path) -> None:
    content = suite("^serving: dense", tmp_path, CARD + HOOKS)
    entry = content["cases"]["serving: dense"]
    assert len(entry["checks"]) == 5  # served and slept, each; asleep
    for vllm in ("unpatched", "patched"):
        assert len(entry[vllm]["decode"]) == ROUNDS_THERE
        assert entry[vllm]["seconds"].keys() > {"import", "load_model", "engine"}


@pytest.mark.full
def test_both_sleep_in_turn(tmp_path: Path) -> None:
    content = suite("^sleep cycles", tmp_path, CARD, "--import-first")
    (entry,) = content["cases"].values()
    assert len(entry["checks"]) == 4  # sleeps, and keeps offloaded memory, each
    for vllm in ("unpatched", "patched"):
        cycles = entry[vllm]["cycles"]
        assert len(cycles) == sum(CYCLES.values())
        assert all(cycle["sleep"]["wall"] > 0 for cycle in cycles)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_starts_are_timed_in_turn(tmp_path: Path) -> None:
    content = suite("^time of a start", tmp_path, CARD + HOOKS, "--import-first")
    (entry,) = content["cases"].values()
    for vllm, ways in (("unpatched", [""]), ("patched", ["", "extensible"])):
        starts, details = entry[vllm]["starts"], entry[vllm]["details"]
        assert sorted(start["way"] for start in starts) == ways
        for start, detail in zip(starts, details, strict=True):
            seconds, calls = detail["determine_available_memory: profile_run"]
            assert 0 < seconds < start["determine_available_memory"]
            assert calls == 1


def test_ratios_of_pairs() -> None:
    ratios = Ratios.of([2.0, 3.0, 9.0, 8.0], [1.0, 2.0, 3.0, 4.0])
    assert ratios == Ratios(4, 2.0, (1.625, 2.75), 2.2)


def test_mig_instance_is_named(tmp_path: Path) -> None:
    uuid = "MIG-a0000000-0000-0000-0000-000000000001"
    mig = f'memory = "33GiB"\nmig_uuid = "{uuid}"\nmig_parent_total = "141GiB"\n'
    content = suite("^start within", tmp_path, mig)
    assert content["gpu"]["share"] == "MIG"
    assert content["gpu"]["memory"] == 33 << 30
    (entry,) = content["cases"].values()
    assert entry == {"not run": "MIG"}


def test_virtual_result_is_not_written_among_those_of_gpus(tmp_path: Path) -> None:
    for module in ("suite", "calibrate"):
        done = call(module, folder=tmp_path)
        assert done.returncode == 1
        assert "this is the virtual device: --out FOLDER is needed" in done.stderr


def test_starts_are_done_again_on_the_same_gpu_only(tmp_path: Path) -> None:
    earlier = tmp_path / "calibration-another.json"
    earlier.write_text(json.dumps({"gpu": {"name": "Another"}, "starts": {}}))
    done = call("calibrate", "--starts", str(earlier), folder=tmp_path)
    assert done.returncode == 1
    assert "a GPU whose name is Another is needed" in done.stderr


def test_driver_is_measured_to_the_byte(tmp_path: Path) -> None:
    done = call("probe", "driver", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.partition("RESULT ")[2])
    assert {key: found[key] for key in PARAMETERS} == PARAMETERS


def test_kernels_of_a_start_are_measured(tmp_path: Path) -> None:
    """PyTorch's take nothing on the virtual device; Triton's are loaded as modules."""
    card = CARD + 'compute_capability = "9.0"\nsm_count = 2\nlocal_memory = true\n'
    done = call("probe", "kernels", folder=tmp_path, card=card)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.partition("RESULT ")[2])
    assert found["stack"] == (3072 - 1024) * 2 * 2048
    steps = {name: size for name, size in found.items() if name.startswith("first ")}
    assert found["kernels"] == sum(steps.values()) == steps["first sampler"] > 0
    assert found["first sampler"] % MIB == 0


def test_what_the_driver_took_after_the_request_is_compared() -> None:
    """72 MiB on the H100, which its calibration did not tell apart."""
    (path,) = (ROOT / "results").glob("calibration-h100-*.json")
    rows = calibrate.compare(json.loads(path.read_text()))
    found = [row for row in rows if row["figure"] == "driver_after_request"]
    assert [row["card"] for row in found] == [72 * MIB] * 2
    assert all(row["predicted"] < 8 * MIB for row in found)


def test_communicator_is_measured(tmp_path: Path) -> None:
    card = CARD + 'nccl_communicator = "96MiB"\n'
    done = call("probe", "nccl", folder=tmp_path, card=card)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.partition("RESULT ")[2]) == {"nccl": 96 * MIB}


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_calibrated_device_predicts_the_card_to_the_byte(tmp_path: Path) -> None:
    done = call(
        "calibrate", "--small", "--no-predict", "--out", str(tmp_path), folder=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    profile = tomllib.loads((tmp_path / "virtual-gpu.toml").read_text())
    assert {key: profile[key] for key in PARAMETERS} == PARAMETERS
    assert profile["memory"] == 16 << 30
    (path,) = tmp_path.glob("calibration-*.json")
    assert json.loads(path.read_text())["not measured"] == {}
    done = call("calibrate", "--predict", str(path), folder=tmp_path, card="")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (start,) = json.loads(path.read_text())["starts"].values()
    predicted, card = start["predicted"]["memory"], start["card"]["memory"]
    assert card["kv_cache"] > 7 << 30 and card["graphs"] > 0
    assert predicted == card

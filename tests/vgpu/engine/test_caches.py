"""What a start finds of an earlier start, and where it leaves its caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine import harness
from tests.vgpu.engine.harness import run

MIB = 2**20
DEVICE = {"memory": "8GiB"}
BYTES = ("blocks", "kv", "peak", "process_peak", "reserved", "graphs", "estimate")


def start(folder: Path, **more: Any) -> dict[str, Any]:
    case = {"model": "dense", "graphs": True} | more.pop("case", {})
    result = run("start", case, vllm="official", device=DEVICE, folder=folder, **more)
    assert result["outcome"] == "started", result
    return result


def test_nothing_is_kept_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for variable in ("HOME", "XDG_CACHE_HOME", "TRITON_HOME", "HF_HOME"):
        monkeypatch.setenv(variable, str(home))
    caches = tmp_path / "caches"
    start(tmp_path, caches=caches, forked=False)
    assert not list(home.iterdir())
    assert (caches / "home").is_dir()


@pytest.mark.full
def test_compiled_kernels_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So all runs may share them."""
    found = start(tmp_path)
    monkeypatch.setattr(harness, "SHELF", tmp_path / "shelf")
    compiled = start(tmp_path)
    assert len(list((tmp_path / "shelf").iterdir())) > 8
    assert {key: found[key] for key in BYTES} == {key: compiled[key] for key in BYTES}


@pytest.mark.full
def test_the_first_start_of_a_compiled_model_has_less(tmp_path: Path) -> None:
    """vllm #54122: what compiling takes for a moment is charged for good."""
    caches = tmp_path / "caches"
    # Compiled models are found by their path.
    case = {"compile": True, "folder": str(tmp_path / "model")}
    cold, warm = (start(tmp_path, case=case, caches=caches) for _ in range(2))
    assert cold["kv"] < warm["kv"]

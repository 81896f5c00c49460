"""Caches of an earlier start, and the place of a start's caches."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.full
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
    monkeypatch.setattr(harness, "KERNELS", tmp_path / "cache")
    compiled = start(tmp_path)
    assert len(list((tmp_path / "cache").iterdir())) > 8
    assert {key: found[key] for key in BYTES} == {key: compiled[key] for key in BYTES}


COMPILER = """
import sys
from scripts.shared_triton_cache import SharedCache
cache = SharedCache("KEY")
group = cache.get_group("kernel.json")
print(*group or ["compiles"], flush=True)
if group is None and sys.stdin.readline():
    cache.put_group("kernel.json", {"kernel.cubin": cache.put(b"0", "kernel.cubin")})
"""


@pytest.mark.parametrize("compiles", [True, False], ids=["compiles", "killed"])
def test_one_process_compiles_a_kernel(compiles: bool, tmp_path: Path) -> None:
    """Those that want it meanwhile wait, but not for one that was killed."""
    environment = harness.environment_of("official", tmp_path)
    environment["SHARED_TRITON_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", COMPILER]

    def process() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    with process() as first:
        assert first.stdout and first.stdout.readline() == "compiles\n"
        with process() as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(5)
            if not compiles:
                first.kill()
            first.communicate("put\n" if compiles else None)
            told, _ = second.communicate(timeout=60)
    assert told == ("kernel.cubin\n" if compiles else "compiles\n")


@pytest.mark.full
def test_first_start_of_a_compiled_model_has_less(tmp_path: Path) -> None:
    """vllm #54122: memory that compiling takes for a moment is charged forever."""
    caches = tmp_path / "caches"
    # Compiled models are found by their path.
    case = {"compile": True, "folder": str(tmp_path / "model")}
    cold, warm = (start(tmp_path, case=case, caches=caches) for _ in range(2))
    assert cold["kv"] < warm["kv"]

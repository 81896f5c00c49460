"""Allocations that fail in a step: the error names what to set, and nothing else
changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import HOOKS, run

CASES: dict[str, dict[str, Any]] = {
    "V1, beside a thread": {"v2": False, "thread": True},
    "V2, expandable segments": {"allocator": "expandable_segments:True"},
    "V2, PyTorch's limit": {"limit": True},
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_error_of_a_step_names_what_to_set(name: str, tmp_path: Path) -> None:
    results = {}
    for vllm in "official", "envelope":
        (folder := tmp_path / vllm).mkdir()
        results[vllm] = run(
            "step_fails",
            CASES[name],
            vllm=vllm,
            device={"memory": "8GiB"},
            hooks=HOOKS,
            folder=folder,
        )["runs"]
    for stock, ours in zip(results["official"], results["envelope"], strict=True):
        assert ours["outcome"] == stock["outcome"]
        assert ours["layers"] == stock["layers"] and ours["lengths"] == stock["lengths"]
        if ours["outcome"] != "OutOfMemoryError":
            continue
        assert "--" not in stock["error"]
        for said in ("Tried to allocate 256.00 MiB", "MiB free", "--max-num-batched"):
            assert said in ours["error"]
    first, *failing, other, last = results["envelope"]
    assert first["outcome"] == last["outcome"] == "served"
    assert {run["outcome"] for run in failing} == {"OutOfMemoryError"}
    # The caller was handling another out of memory; this error is a different one.
    assert (other["outcome"], other["error"]) == ("RuntimeError", "shapes differ")

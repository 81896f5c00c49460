"""A start with empty caches, which compiles and tunes, has the KV cache of a warm one.

`make bench-first-start` shows models of the sizes that people use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.scenarios.models import MODELS
from tests.vgpu.engine.harness import run

MIB = 2**20
DEVICE: dict[str, object] = {"memory": "8GiB"}
full, long = pytest.mark.full, pytest.mark.long
COMPILED = {"graphs": True, "compile": True}
# Its kernels are tuned by Triton, not by torch.compile.
HYBRID = {
    "model": "hybrid",
    "llm": {
        "gdn_prefill_backend": "triton",
        "max_num_seqs": 8,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "dense": COMPILED,
    "experts": COMPILED | {"model": "moe"},
    "draft": COMPILED | {"draft": 2},
    "vision": COMPILED | {"model": "vision"},
    "hybrid": HYBRID,
    # Without the artifact that has all of the compiled model in it.
    "traced": COMPILED | {"environment": {"VLLM_USE_AOT_COMPILE": "0"}},
}


def starts(
    case: dict[str, Any],
    vllm: str,
    folder: Path,
    device: dict[str, object] = DEVICE,
    times: int = 2,
) -> list[dict[str, Any]]:
    """One after another: cold, then with the caches of those before."""
    own = folder / vllm
    own.mkdir(exist_ok=True)
    # Compiled models are found by their path.
    asked = case | {"folder": str(own / "model")}
    return [
        run(
            "start",
            asked,
            vllm=vllm,
            device=device,
            folder=own,
            caches=own / "caches",
            forked="environment" not in case,
        )  # fmt: skip
        for _ in range(times)
    ]


def cold_and_warm(
    case: dict[str, Any],
    vllm: str,
    folder: Path,
    device: dict[str, object] = DEVICE,
) -> list[dict[str, Any]]:
    cold, warm = starts(case, vllm, folder, device)
    assert cold["outcome"] == warm["outcome"] == "started", (cold, warm)
    # Only compiling and tuning launch more.
    assert cold["kernels"] > warm["kernels"]
    return [cold, warm]


@pytest.mark.parametrize(
    ("name", "v2"),
    [
        ("dense", True),
        pytest.param("hybrid", False, marks=full),
        pytest.param("vision", False, marks=long),
        pytest.param("experts", True, marks=long),
        pytest.param("draft", True, marks=long),
    ],
)
def test_stock_has_less(name: str, v2: bool, tmp_path: Path) -> None:
    """vllm #54122, #54383: memory that compiling takes for a moment is charged
    forever."""
    cold, warm = cold_and_warm(CASES[name] | {"v2": v2}, "official", tmp_path)
    lost = warm["kv"] - cold["kv"]
    # The encoder takes more than compiling the language model.
    assert lost == 0 if name == "vision" else lost > 32 * MIB


@pytest.mark.parametrize(
    ("name", "v2"),
    [
        ("dense", True),
        pytest.param("dense", False, marks=full),
        pytest.param("experts", True, marks=long),
        pytest.param("experts", False, marks=long),
        pytest.param("draft", True, marks=full),
        pytest.param("draft", False, marks=long),
        pytest.param("vision", False, marks=long),
        pytest.param("vision", True, marks=long),
        pytest.param("hybrid", False, marks=long),
        pytest.param("hybrid", True, marks=full),
        pytest.param("traced", True, marks=long),
        pytest.param("traced", False, marks=long),
    ],
)
def test_first_start_has_the_kv_cache_of_the_second(
    name: str, v2: bool, tmp_path: Path
) -> None:
    cold, warm = cold_and_warm(CASES[name] | {"v2": v2}, "envelope", tmp_path)
    assert cold["blocks"] == warm["blocks"] and cold["kv"] == warm["kv"]


@pytest.mark.parametrize(
    "name", [pytest.param("dense", marks=full), pytest.param("hybrid", marks=long)]
)
def test_memory_that_stays_is_counted(name: str, tmp_path: Path) -> None:
    """Loaded modules: rejected kernels stay loaded, and a compiled model that is read
    from the cache has some kernels twice."""
    device = DEVICE | {"module": 256 << 10}
    case = CASES[name] | {"report": True}
    cold, warm = cold_and_warm(case, "envelope", tmp_path, device)
    outside = [r["report"]["in_use"]["outside_torch"] for r in (cold, warm)]
    assert outside[0] != outside[1] and min(outside) > 0
    # A block more takes a page of each layer where it begins a new one.
    rows = "kv_cache", "other_torch", "outside_torch"
    taken = [sum(r["report"]["in_use"][row] for row in rows) for r in (cold, warm)]
    layers = MODELS[case.get("model", "dense")]["num_hidden_layers"]
    assert abs(taken[0] - taken[1]) <= 2 * MIB * layers

"""Many short prompts of a Mamba2 model are prefilled with few launches more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vgpu.engine.harness import HOOKS, run

CASE = {
    "model": "Mamba2",
    "llm": {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    },
}


@pytest.mark.parametrize("v2", [False, True])
def test_short_prompts_of_mamba2_are_one_group(v2: bool, tmp_path: Path) -> None:
    """A group with copies has 16 sequences, of 1 MiB each."""
    stock, ours = (
        run(
            "short_prompts",
            CASE | {"v2": v2},
            vllm=vllm,
            device={"memory": "4GiB"},
            hooks=HOOKS,
            folder=tmp_path,
        )
        for vllm in ("official", "envelope")
    )
    assert ours["groups"] == [True]
    assert 0 < ours["kernels"] <= 1.2 * stock["kernels"]


def test_groups_grow_as_far_beside_an_explicit_kv_cache(tmp_path: Path) -> None:
    """The logits of 1,024 sequences take more than a prefill."""
    many = CASE["llm"] | {"max_num_seqs": 1024, "max_num_batched_tokens": 1024}
    rooms = [
        run(
            "short_prompts",
            CASE | {"v2": True, "llm": many | given},
            vllm="envelope",
            device={"memory": "4GiB"},
            hooks=HOOKS,
            folder=tmp_path,
        )["room"]
        for given in ({}, {"kv_cache_memory_bytes": 2**30})
    ]
    assert rooms[0] == rooms[1] > 0

"""Prompt logprobs take no more of the device than the sampler was profiled with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vgpu.engine.harness import BASE, HOOKS, run

MIB = 2**20
CASE = {
    "model": "dense",
    "llm": {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "hf_overrides": {"vocab_size": 128256},
    },
}


@pytest.mark.skipif(BASE == "0.26.0", reason="not carried over")
@pytest.mark.parametrize(
    "vllm", [pytest.param("official", marks=pytest.mark.long), "envelope"]
)
def test_prompt_logprobs_take_what_is_profiled(vllm: str, tmp_path: Path) -> None:
    took = run(
        "prompt_rows",
        CASE,
        vllm=vllm,
        device={"memory": "16GiB"},
        hooks=HOOKS,
        folder=tmp_path,
    )
    logits = 1024 * 128256 * 2
    if vllm == "official":
        assert took["logprobs"] > logits > took["sampler"]
    else:
        assert took["logprobs"] <= took["sampler"]


@pytest.mark.skipif(BASE == "0.26.0", reason="not carried over")
@pytest.mark.parametrize("v2", [False, True])
def test_lora_writes_the_rows_that_it_is_given(v2: bool, tmp_path: Path) -> None:
    """Kernels write as many rows as are mapped: no more than there are."""
    llm = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_num_seqs": 16}
    case = {"v2": v2, "llm": llm | {"max_num_batched_tokens": 2048}}
    long, short = run(
        "lora_rows",
        case,
        vllm="envelope",
        device={"memory": "8GiB"},
        hooks=HOOKS,
        folder=tmp_path,
    )["prompts"]
    for rows, mapped in long + short:
        assert rows == mapped
    assert len(long) > 1  # in parts
    stock = run(
        "lora_rows",
        case,
        vllm="official",
        device={"memory": "8GiB"},
        hooks=HOOKS,
        folder=tmp_path,
    )["prompts"]
    # V1 computes those of the prompt alone.
    assert v2 or any(rows < mapped for rows, mapped in stock[1])

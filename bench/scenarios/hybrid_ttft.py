"""Time to first token of many short prompts at once, of a hybrid of gated delta nets.

The argument is that of start.py, of an engine that computes all prompts in one step;
the model is "hybrid" unless another is named. The start's answer comes first, then one
for each line of stdin, "PROMPTS ROUNDS": the milliseconds until each of the prompts has
its token, their median and quartiles, and the peak of PyTorch's memory. On the virtual
device the V2 runner needs counts.toml: hooks.toml counts tokens of 128 requests.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from bench.scenarios import serve, start

TOKENS = 16
CASE: dict[str, Any] = {"model": "hybrid"}
LLM: dict[str, Any] = {
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 1024 * TOKENS,
    # By default GPUs of the Hopper generation and later take FlashInfer's kernels.
    "gdn_prefill_backend": "triton",
}


def main() -> None:
    asked = CASE | json.loads(sys.argv[1])
    asked["llm"] = LLM | asked.get("llm", {})
    result: dict[str, Any] = {"outcome": "started"}
    try:
        llm = start.engine(asked, result)
        for line in ("", *sys.stdin):
            if line.split():
                prompts, rounds = map(int, line.split())
                result = prefill(llm, prompts, rounds)
            serve.answer(result)
    except Exception as error:  # an outcome, not an accident
        serve.answer({"outcome": type(error).__name__, "error": str(error)[:2000]})


def prefill(llm: Any, prompts: int, rounds: int) -> dict[str, Any]:
    import torch

    seconds_of_round(llm, prompts)  # Triton compiles and tunes kernels
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = [1000 * seconds_of_round(llm, prompts) for _ in range(rounds)]
    low, median, high = statistics.quantiles(times, n=4)
    return {
        "prompts": prompts,
        "milliseconds": times,
        "median": median,
        "quartiles": [low, high],
        "peak": torch.cuda.max_memory_allocated(),
        "of_the_step": torch.cuda.max_memory_allocated() - held,
    }


def seconds_of_round(llm: Any, prompts: int) -> float:
    """From the first step to the last first token: the prompts were all there."""
    import torch
    from vllm import SamplingParams

    engine = llm.llm_engine
    parameters = SamplingParams(
        temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True
    )
    for i in range(prompts):
        tokens = [(7 * i + 13 * j) % 31000 + 3 for j in range(TOKENS)]
        engine.add_request(str(i), {"prompt_token_ids": tokens}, parameters)
    torch.cuda.synchronize()
    began = time.perf_counter()
    left = prompts
    while left > 0:
        left -= len(engine.step())
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

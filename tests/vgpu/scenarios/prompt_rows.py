"""The memory of prompt logprobs, next to the sampler's profiled memory.

The argument is a case of start.py. Prints a RESULT line with bytes: the peaks of the
profiled sampler, and of the logprobs of a prompt as long as a batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from bench.scenarios.result import print_result


def main() -> None:
    from bench.scenarios import start

    llm = start.engine(json.loads(sys.argv[1]), {})
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    print_result(peaks(llm, runner.model_runner))


def peaks(llm: Any, runner: Any) -> dict[str, int]:
    import torch
    from vllm import SamplingParams

    config = llm.llm_engine.vllm_config
    rows = config.scheduler_config.max_num_seqs
    tokens = config.scheduler_config.max_num_batched_tokens
    size = config.model_config.get_hidden_size()
    hidden = torch.zeros(rows, size, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        sampler = peak(lambda: runner._dummy_sampler_run(hidden))
    worker = runner.prompt_logprobs_worker
    compute = worker.compute_prompt_logprobs
    found = {}

    def watched(*given: Any) -> Any:
        result = []
        found["logprobs"] = peak(lambda: result.append(compute(*given)))
        return result[0]

    worker.compute_prompt_logprobs = watched
    asked = SamplingParams(
        max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True
    )
    prompt = {"prompt_token_ids": [7] * (tokens - 1)}
    llm.generate([prompt], asked, use_tqdm=False)
    return {"rows": rows, "sampler": sampler} | found


def peak(compute: Callable[[], object]) -> int:
    """The peak of a second call, in bytes above the allocations before it."""
    import torch

    compute()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compute()
    return int(torch.cuda.max_memory_allocated() - before)


if __name__ == "__main__":
    main()

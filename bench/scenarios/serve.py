"""Start an engine and do what stdin asks for, a line each; a JSON line answers each.

The argument is that of start.py, whose answer comes first. The orders:

    tokens     greedy and sampled with a seed, from weights that a seed makes
    sleep      level 1, woken in two stages: bytes used at each
    decode N   N steps of a full batch: seconds
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from bench.scenarios.result import print_result

BATCH = 16


def main() -> None:
    from bench.scenarios import start

    result: dict[str, Any] = {"outcome": "started"}
    try:
        llm = start.engine(json.loads(sys.argv[1]), result)
        llm.collective_rpc(fill_weights)
    except Exception as error:  # an outcome, not an accident
        answer({"outcome": type(error).__name__, "error": str(error)[:2000]})
        return
    answer(result)
    for line in sys.stdin:
        match line.split():
            case ["tokens"]:
                answer({"greedy": tokens(llm, 0.0), "sampled": tokens(llm, 0.8)})
            case ["sleep"]:
                answer(start.sleep(llm, 1))
            case ["decode", steps]:
                answer({"seconds": decode(llm, int(steps)), "batch": BATCH})


def answer(result: dict[str, Any]) -> None:
    print_result(result)


def fill_weights(worker: Any) -> None:
    """Dummy weights are so small that all tokens are alike."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in worker.get_model().parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)  # of a norm
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)


def tokens(llm: Any, temperature: float) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * j) % 31000 + 3 for j in range(16 + 5 * i)]}
        for i in range(4)
    ]
    parameters = SamplingParams(
        temperature=temperature, seed=1, max_tokens=32, detokenize=False,
        ignore_eos=True,
    )  # fmt: skip
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def decode(llm: Any, steps: int) -> float:
    import torch
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(range(3 + i, 35 + i))} for i in range(BATCH)]
    parameters = SamplingParams(
        temperature=0.0, max_tokens=steps, detokenize=False, ignore_eos=True
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    llm.generate(prompts, parameters, use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

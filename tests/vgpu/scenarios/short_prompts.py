"""Prefill many short prompts of a Mamba2 model in one step.

The argument is a case of start.py. Prints the kernels that the device ran for it, the
prompts of the step, for each of its groups of sequences whether states stayed in the
cache, and the bytes by which a group may grow; no group where the release builds none.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

from bench.scenarios.result import print_result

LENGTH = 16


def main() -> None:
    from bench.scenarios import start

    llm = start.engine(asked := json.loads(sys.argv[1]), {})
    from vllm import SamplingParams
    from vllm.v1.attention.backends import mamba2_attn

    from vgpu import control

    builder = mamba2_attn.Mamba2AttentionMetadataBuilder
    build = builder.build
    groups: list[bool] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        metadata = build(*arguments, **options)
        of_step = getattr(metadata, "prefill_groups", None) or []
        groups[:] = [group.in_cache for group in of_step]
        return metadata

    builder.build = watched
    prompts = [{"prompt_token_ids": [7] * LENGTH}] * asked["llm"]["max_num_seqs"]
    one = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
    llm.generate(prompts, one, use_tqdm=False)  # kernels of the first step are compiled
    before = control.kernels()
    llm.generate(prompts, one, use_tqdm=False)
    kernels = control.kernels() - before
    told = {"kernels": kernels, "prompts": len(prompts), "groups": groups}
    with suppress(ImportError):  # stock vLLM has none
        from vllm.model_executor.layers.mamba.prefill_profile import get_prefill_room

        told["room"], _ = get_prefill_room(llm.llm_engine.vllm_config)
    print_result(told)


if __name__ == "__main__":
    main()

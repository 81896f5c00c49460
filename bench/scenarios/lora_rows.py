"""The rows of logits that LoRA's kernels are given for prompt logprobs, beside those of
their mapping, which they write.

The argument is a case of start.py. Prints a RESULT line with "prompts": for a long prompt
and a short one, the rows and the rows mapped of each computation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = 68, 5
RANK = 8


def main() -> None:
    from bench.scenarios import start

    case = json.loads(sys.argv[1])
    llm = start.engine(case, {})
    prompts = [rows(llm, tokens) for tokens in PROMPTS]
    print("RESULT " + json.dumps({"prompts": prompts}), flush=True)


def rows(llm: Any, tokens: int) -> list[list[int]]:
    """Of a prompt beside sequences that decode, each with an adapter."""
    from vllm import SamplingParams
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.lora.request import LoRARequest

    engine = llm.llm_engine
    sequences = engine.vllm_config.scheduler_config.max_num_seqs
    hidden_size = engine.model_config.get_hidden_size()
    folder = Path(tempfile.mkdtemp())
    loras = [
        LoRARequest(f"{tokens}-{i}", tokens * 2 + i, adapter(folder / str(i), hidden_size))
        for i in (1, 2)
    ]
    sampling: dict[str, Any] = {"detokenize": False, "ignore_eos": True}
    add_logits = PunicaWrapperGPU.add_lora_logits
    found: list[list[int]] = []

    def watched(self: Any, y: Any, x: Any, *given: Any, **named: Any) -> Any:
        caller, names = sys._getframe(1), set()
        while caller:
            names.add(caller.f_code.co_name)
            caller = caller.f_back  # type: ignore[assignment]
        if any("prompt_logprobs" in name for name in names):
            found.append([x.shape[0], self.sampler_indices.shape[0]])
        return add_logits(self, y, x, *given, **named)

    decode = SamplingParams(max_tokens=8, **sampling)
    for i in range(sequences - 1):
        prompt = {"prompt_token_ids": [7] * 5}
        engine.add_request(f"{tokens}-{i}", prompt, decode, lora_request=loras[i % 2])
    engine.step()
    engine.step()
    PunicaWrapperGPU.add_lora_logits = watched  # type: ignore[method-assign]
    engine.add_request(
        f"{tokens}",
        {"prompt_token_ids": [7] * tokens},
        SamplingParams(max_tokens=1, prompt_logprobs=1, **sampling),
        lora_request=loras[0],
    )
    while engine.has_unfinished_requests():
        engine.step()
    PunicaWrapperGPU.add_lora_logits = add_logits  # type: ignore[method-assign]
    return found


def adapter(folder: Path, hidden_size: int) -> str:
    """Of the queries."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    weights = {
        f"{name}A.weight": torch.zeros(RANK, hidden_size),
        f"{name}B.weight": torch.zeros(hidden_size, RANK),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


if __name__ == "__main__":
    main()

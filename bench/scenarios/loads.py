"""Loads of requests, and the engines that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """Requests that arrive at random, drawn evenly from the ranges and choices."""

    requests: int
    prompts: tuple[tuple[int, int], ...]  # tokens
    outputs: tuple[int, ...]  # tokens
    bursts: tuple[int, ...]  # requests that arrive before a step
    prompt_logprobs: bool = False  # of every other request
    images: bool = False


SHORT, MEDIUM, LONG = (8, 256), (256, 2048), (2048, 7800)
LOADS = {
    # As many short prompts as medium and long ones together.
    "mixed": Load(
        40, (SHORT, SHORT, MEDIUM, LONG), (1, 8, 32, 64), (0, 0, 1, 1, 2, 4, 16)
    ),
    "chat": Load(120, (SHORT, MEDIUM), (64, 256), (0, 0, 0, 1, 2, 4)),
    "long context": Load(12, ((8000, 30000),), (1, 8, 32), (0, 0, 1, 2)),
    # A batch of the shortest prompts, and prompts that fill a batch.
    "full batches": Load(80, ((8, 64), (2040, 2041)), (3, 6, 32), (0, 0, 0, 1, 2, 32)),
    "bursts": Load(512, (SHORT,), (1, 8, 32), (0,) * 9 + (128,)),
    "all at once": Load(1024, ((8, 64),), (8, 32), (1024,)),
    "prompt logprobs": Load(
        40, (SHORT, MEDIUM, LONG), (1, 8, 32), (0, 0, 1, 2, 4), prompt_logprobs=True
    ),
    "images": Load(40, (SHORT, MEDIUM), (1, 8, 32), (0, 0, 1, 2, 4), images=True),
}
# What a client may ask of the sampler, as vLLM's own warm-up of it does
# (`SamplingParams.for_sampler_warmup`); logprobs of prompts have a load of their own.
ALL_OF_THE_SAMPLER: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
    "logit_bias": {0: -1.0, 1: 0.5},
    "logprobs": 5,
}
V2 = {"v2": True}
# Half of the device, as the utilization. Stock vLLM has no such option.
LIMIT = {"gpu_memory_limit_bytes": 24 << 30}
LONG_CONTEXT = {
    "max_model_len": 32768,
    "hf_overrides": {"max_position_embeddings": 32768},
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def hybrid(**llm: Any) -> dict[str, Any]:
    return {"model": "hybrid", "llm": {"gdn_prefill_backend": "triton"} | llm}


COMPILED = {"graphs": True, "compile": True}
DEEP = {"hf_overrides": {"num_hidden_layers": 32}}  # the others have 8 layers
# What is tried; see environment(), too.
CASES: dict[str, dict[str, Any]] = {
    "8B": {},
    "8B, V2": V2,
    "8B of 32 layers": {"llm": DEEP},
    "8B, 2048 tokens a batch": {"llm": {"max_num_batched_tokens": 2048}},
    "8B, 16384 tokens a batch": {"llm": {"max_num_batched_tokens": 16384}},
    "8B, LoRA": {"lora": True},
    "8B, CUDA graphs": {"graphs": True},
    "8B, compiled": COMPILED,
    "8B, expandable segments": {},
    "8B, EAGLE, V2": V2 | {"draft": 3},
    "8B, chat": {"load": "chat"},
    "8B, long context": {"load": "long context", "llm": LONG_CONTEXT},
    "8B, bursts": {"load": "bursts"},
    "8B, 1024 sequences": {"load": "all at once", "llm": {"max_num_seqs": 1024}},
    "8B, prompt logprobs": {"load": "prompt logprobs"},
    "8B, prompt logprobs, V2": V2 | {"load": "prompt logprobs"},
    "vision": {"load": "images", "model": "vision"},
    "vision, V2": V2 | {"load": "images", "model": "vision"},
    "8B, limit in bytes": {"llm": LIMIT},
    "8B of 32 layers, limit in bytes": {"llm": LIMIT | DEEP},
    "8B, limit in bytes, V2": V2 | {"llm": LIMIT},
    "8B, limit in bytes, 16384 tokens a batch": {
        "llm": LIMIT | {"max_num_batched_tokens": 16384}
    },
    "8B, limit in bytes, compiled": COMPILED | {"llm": LIMIT},
    "8B, limit in bytes, expandable segments": {"llm": LIMIT},
    "8B, limit in bytes, prompt logprobs": {"load": "prompt logprobs", "llm": LIMIT},
    "8B, limit in bytes, long context": {
        "load": "long context",
        "llm": LIMIT | LONG_CONTEXT,
    },
    "30B-A3B": {"model": "qwen-30b-a3b"},
    "30B-A3B, limit in bytes": {"model": "qwen-30b-a3b", "llm": LIMIT},
    "hybrid": hybrid(),
    "hybrid, V2": V2 | hybrid(),
    "hybrid, 2048 tokens a batch": hybrid(max_num_batched_tokens=2048),
    "hybrid, 2048 tokens a batch, V2": V2 | hybrid(max_num_batched_tokens=2048),
    "hybrid, 2048 tokens a batch, compiled": COMPILED
    | hybrid(max_num_batched_tokens=2048),
    "hybrid, 2048 tokens a batch, drafts, compiled": COMPILED
    | hybrid(max_num_batched_tokens=2048, speculative_config=NGRAM),
    "hybrid, 2048 tokens a batch, 32 sequences, drafts, compiled": COMPILED
    | {"load": "full batches"}
    | hybrid(max_num_batched_tokens=2048, max_num_seqs=32, speculative_config=NGRAM),
    "small": {"model": "dense"},
}


def environment(case: str) -> dict[str, str]:
    """The variables that a case is started with."""
    expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return expandable if "expandable" in case else {}


def with_image(
    prompt: list[int], size: tuple[int, int], color: int = 0
) -> dict[str, Any]:
    """A prompt that ends with an image of width and height, which has one color."""
    from PIL import Image

    return {
        # <|vision_start|> <|image_pad|> <|vision_end|>, see models.py
        "prompt_token_ids": [*prompt, 3, 5, 4],
        "multi_modal_data": {"image": Image.new("RGB", size, color)},
    }


def with_sound(prompt_token_ids: list[int]) -> dict[str, Any]:
    """A prompt of the decoder, for half a minute of silence."""
    import numpy as np

    return {
        "prompt_token_ids": prompt_token_ids,
        "multi_modal_data": {"audio": (np.zeros(30 * 16000, np.float32), 16000)},
    }

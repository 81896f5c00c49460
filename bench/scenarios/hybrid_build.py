"""Processor time and kernels of building a hybrid's metadata, for prompts of 16 tokens.

The argument has "builds" and "cases": "layer" (triton, flashinfer or mamba2),
"prompts", and "room", the bytes that are set aside beyond the profiled prefill. For
each case it prints the least milliseconds of a build, its kernels and groups. Shapes
are those of 32 heads of 128 x 128.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from bench.scenarios import serve
from vgpu import control

TOKENS, MOST_TOKENS = 16, 16384
SHAPES = ((3, 3 * 4096), (32, 128, 128))
MAMBA2_SHAPES = ((3, 4096 + 2 * 8 * 128), (32, 128, 128))  # 8 groups of heads


def main() -> None:
    asked = json.loads(sys.argv[1])
    builders = {case["layer"]: builder_of(case["layer"]) for case in asked["cases"]}
    for case in asked["cases"]:
        builder = builders[case["layer"]]
        profiled = SimpleNamespace(
            prefill_peak=0, prefill_room=case["room"], prefill_token_bytes=0
        )
        if case["layer"] == "mamba2":
            profiled.prefills_in_cache = True
            builder._layers = [profiled]
        layers = builder.vllm_config.compilation_config.static_forward_context
        layers["layer"] = profiled
        serve.answer(build(builder, case["prompts"], asked["builds"]))


def build(builder: Any, number: int, builds: int) -> dict[str, Any]:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.arange(number + 1).int() * TOKENS
    lengths = torch.full((number,), TOKENS).int()
    milliseconds = []
    kernels = 0
    for _ in range(builds):
        # Of its own: it keeps computed values.
        batch = CommonAttentionMetadata(
            query_start_loc=starts.cuda(),
            query_start_loc_cpu=starts.clone(),
            seq_lens=lengths.cuda(),
            num_reqs=number,
            num_actual_tokens=TOKENS * number,
            max_query_len=TOKENS,
            max_seq_len=TOKENS,
            block_table_tensor=torch.zeros(number, 1).int().cuda(),
            slot_mapping=torch.zeros(TOKENS * number).long().cuda(),
            is_prefilling=torch.ones(number, dtype=torch.bool),
            seq_lens_cpu_upper_bound=lengths,
        )
        before = control.kernels()
        began = time.thread_time()
        metadata = builder.build(0, batch)
        milliseconds.append(1000 * (time.thread_time() - began))
        kernels = control.kernels() - before
    ends = getattr(metadata, "chunk_groups", None)
    groups = getattr(metadata, "prefill_groups", None)
    count = len(ends) - 1 if ends else len(groups or [None])
    return {"milliseconds": min(milliseconds), "kernels": kernels, "groups": count}


def builder_of(layer: str) -> Any:
    from vllm.model_executor.layers.mamba import abstract
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    abstract.MambaBase = SimpleNamespace  # What a layer has noted suffices.
    name = "_resolve_gdn_prefill_backend"
    setattr(qwen_gdn_linear_attn, name, lambda config: ("auto", layer))
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: False)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=graphs,
            max_cudagraph_capture_size=None,
            static_forward_context={},
        ),
        speculative_config=None,
        num_speculative_tokens=0,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, use_ubatching=False
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=1024, max_num_batched_tokens=MOST_TOKENS
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none",
            hash_block_size=None,
            cache_hit_alignment_tokens=None,
            use_replayssm=False,
            replayssm_buffer_len=0,
        ),
        additional_config={},
        use_v2_model_runner=False,
        num_hash_lookahead_tokens=0,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            dtype=torch.bfloat16,
            get_mamba_chunk_size=lambda: 256,
            max_model_len=2048,
        ),
    )
    of_mamba2 = layer == "mamba2"
    spec = MambaSpec(
        block_size=2048,
        shapes=MAMBA2_SHAPES if of_mamba2 else SHAPES,
        dtypes=(torch.bfloat16, torch.float32),
    )
    builder = (
        Mamba2AttentionMetadataBuilder if of_mamba2 else GDNAttentionMetadataBuilder
    )
    return builder(spec, ["layer"], config, torch.device("cuda"))


if __name__ == "__main__":
    main()

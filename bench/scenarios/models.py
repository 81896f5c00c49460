"""Small models of the kinds whose memory differs; weights are dummies.

One file, however long: each model is a few lines of data.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.scenarios import processors

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "draft": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    },
    # The shapes of Llama 3.1 8B, in a quarter of its layers.
    "llama-8b": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    # Every other layer looks at a window.
    "sliding": COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 128,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_local_base_freq": 10000.0,
    },
    # The shapes of Qwen3 30B-A3B, in a twelfth of its layers.
    "qwen-30b-a3b": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    # Encoding an image of 2048 tokens takes more than a batch of the language model.
    "vision": COMMON
    | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 1280,
            "hidden_size": 512,
            "num_heads": 16,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "image_token_id": 5,
        "video_token_id": 6,
    },
    "shared experts": COMMON
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "qkv_bias": True,
    },
    # Gated DeltaNet layers: 1 MiB of float32 state a sequence, layer and 16 heads.
    "hybrid": COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        # vLLM requires a layer of experts in this architecture.
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": list(range(7)),
        "partial_rotary_factor": 0.25,
    },
}
# Its text model is that of "hybrid", all dense.
MODELS["vision hybrid"] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        key: value
        for key, value in MODELS["hybrid"].items()
        if not re.search("experts|architectures|moe|mlp_only|partial|sparse", key)
    }
    | {
        "model_type": "qwen3_5_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
            "partial_rotary_factor": 0.25,
        },
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 512,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "deepstack_visual_indexes": [],
    },
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
}
# Quantized weights. Kernels want another layout than the checkpoint: loading has both
# for a moment. Of the experts it has a layer twice, which is most of the model.
EXPERTS = MODELS["qwen-30b-a3b"] | {"vocab_size": 32000, "num_hidden_layers": 2}
MODELS |= {
    "GPTQ experts": EXPERTS
    | {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "sym": True,
            "dynamic": {"-:.*gate$": {}},
        }
    },
    "AWQ experts": EXPERTS
    | {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["gate"],
        }
    },
    "FP8 experts": EXPERTS
    | {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate"],
        }
    },
}

# Large enough to keep a GPU busy; two of them fit on one with 16 GiB.
LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
MODELS["large dense"] = MODELS["dense"] | LARGE
MODELS["large moe"] = (
    MODELS["moe"]
    | LARGE
    | {"num_hidden_layers": 8, "num_experts": 32, "moe_intermediate_size": 768}
)
# States of a sequence take 12 MiB, as those of "hybrid".
MODELS["large hybrid"] = MODELS["hybrid"] | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
}

MODELS["llama-8b draft"] = MODELS["llama-8b"] | {"num_hidden_layers": 1}
# The whole models, as published.
MODELS["Qwen3-8B"] = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MODELS["Qwen3-14B"] = MODELS["Qwen3-8B"] | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
MODELS["Llama-3.1-8B"] = MODELS["llama-8b"] | {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_hidden_layers": 32,
}
MODELS["Qwen3-30B-A3B"] = MODELS["qwen-30b-a3b"] | {
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "num_hidden_layers": 48,
}
MODELS["Qwen2-VL-7B"] = MODELS["vision"] | {
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vision_config": MODELS["vision"]["vision_config"]
    | {"depth": 32, "hidden_size": 3584},
}
MODELS["Qwen3-Next-80B-A3B"] = MODELS["hybrid"] | {
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000.0,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mlp_only_layers": [],
}

# One of each further kind; "make bench-stock MORE=1" starts them.
ONLY_MAMBA: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "num_hidden_layers": 4,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "residual_in_fp32": True,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS |= {
    "pooling": MODELS["dense"],
    "MLA": COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
    },
    "Mamba1": ONLY_MAMBA
    | {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "state_size": 16,
        "time_step_rank": 32,
    },
    "Mamba2": ONLY_MAMBA
    | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 1024,
        "state_size": 128,
        "num_heads": 32,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 256,
        "rms_norm": True,
    },
    "Falcon-H1": COMMON
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_d_ssm": 1024,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "mamba_use_mlp": True,
        "projectors_bias": False,
        "mlp_bias": False,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "ssm_out_multiplier": 1.0,
    },
    "Jamba": COMMON
    | {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 32,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "use_mamba_kernels": False,
        "pad_token_id": 0,
    },
    "LFM2": COMMON
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_dim": 512,
        "conv_dim": 512,
        "conv_dim_out": 512,
        "block_ff_dim": 1408,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1, 3],
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "GPT-OSS": COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "intermediate_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "Whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        "num_mel_bins": 80,
        "d_model": 512,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
}
MODELS["MXFP4"] = MODELS["GPT-OSS"] | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_local_experts": 64,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
# With heads as DeepSeek-V2-Lite, two of its layers, and smaller experts.
MODELS["MLA, 64 experts"] = MODELS["MLA"] | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 352,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
}


def write(name: str, folder: Path) -> str:
    """Write a model's configuration; returns the folder, as vLLM takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    processors.write_json(folder / "config.json", MODELS[name])
    if vision := MODELS[name].get("vision_config"):
        processors.write_processor(folder, vision["patch_size"])
    elif name == "Whisper":
        processors.write_audio_processor(folder, MODELS[name]["num_mel_bins"])
    elif name == "pooling":  # its prompts go through a tokenizer
        processors.write_tokenizer(folder, {})
    return str(folder)


def write_loras(name: str, folder: Path, count: int, rank: int = 16) -> list[str]:
    """Write adapters of a model's attention; returns their folders."""
    import torch
    from safetensors.torch import save_file

    model = MODELS[name]
    hidden, head = model["hidden_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    shapes = {
        "q_proj": (hidden, heads * head),
        "k_proj": (hidden, kv_heads * head),
        "v_proj": (hidden, kv_heads * head),
        "o_proj": (heads * head, hidden),
    }
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for module, (wide, out) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            weights[key + "A.weight"] = torch.zeros(rank, wide, dtype=torch.bfloat16)
            weights[key + "B.weight"] = torch.zeros(out, rank, dtype=torch.bfloat16)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": list(shapes),
    }
    folders = [folder / f"lora{i}" for i in range(count)]
    for lora in folders:
        lora.mkdir()
        (lora / "adapter_config.json").write_text(json.dumps(config))
        save_file(weights, lora / "adapter_model.safetensors")
    return [str(lora) for lora in folders]

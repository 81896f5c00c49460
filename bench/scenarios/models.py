"""Small models of the kinds whose memory differs; weights are dummies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def write(name: str, folder: Path) -> str:
    """Write a model's configuration; returns the folder, as vLLM takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    if vision := MODELS[name].get("vision_config"):
        write_processor(folder, vision["patch_size"])
    return str(folder)


def write_processor(folder: Path, patch_size: int) -> None:
    """Write what turns images and a few words into tokens, without a hub: Qwen2-VL's,
    or Qwen3-VL's with its patches of 16 pixels.
    """
    newer = patch_size == 16
    kind = "Qwen3VL" if newer else "Qwen2VL"
    words = ["<unk>", "<s>", "</s>", "<|vision_start|>", "<|vision_end|>"]
    words += ["<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"]
    least, most = (size * (2 * patch_size) ** 2 for size in (4, 2048))
    sizes = (
        {"size": {"shortest_edge": least, "longest_edge": most}}
        if newer
        else {"min_pixels": least, "max_pixels": most}
    )
    patches = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2}
    special = [
        {
            "id": token,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, word in enumerate(words)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": f"{kind}Processor",
        }
        | sizes
        | patches,
        "video_preprocessor_config.json": {
            "video_processor_type": f"{kind}VideoProcessor"
        }
        | sizes
        | patches,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": f"{kind}Processor",
            "unk_token": words[0],
            "bos_token": words[1],
            "eos_token": words[2],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


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

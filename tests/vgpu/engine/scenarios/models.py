"""Small models of the kinds whose memory differs; weights are dummies."""

from __future__ import annotations

import json
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
        # vLLM wants one layer of experts in this architecture.
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
# Of a size that keeps a GPU busy, and leaves room for two on one of 16 GiB.
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


def write(name: str, folder: Path) -> str:
    """Write a model's configuration; returns the folder, as vLLM takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
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

#!/usr/bin/env bash
# hf-mem 0.5.6: KV bytes of a token for models with latent and with linear attention.
# Guess: DeepSeek-V3 70,272 bytes (61 layers x (512 + 64) x 2), and a quarter of the
# layers of Qwen3-Next: 12 x 2 x 2 heads x 256 x 2 = 24,576.
# Seen: 1,748,992 and 98,304. Latent attention is counted as 128 heads of 56, and a
# linear-attention layer as one that keeps keys and values of each token.
. "$(dirname "$0")/common.sh"
environment peer hf-mem==0.5.6
cat > "$work/program.py" << 'PY'
from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size as size

deepseek_v3 = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
qwen3_next = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
}
print(size(deepseek_v3, "BF16", 1), size(qwen3_next, "BF16", 1))
PY
expect '1748992 98304' peer/bin/python program.py

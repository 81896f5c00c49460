#!/usr/bin/env bash
# transformers 5.20.2: head_dim of a config with multi-head latent attention.
# Guess: 192 (qk_nope_head_dim + qk_rope_head_dim), the size of a query's head.
# Seen: 64, the rotary part alone. KV bytes by 2 x heads x head_dim are wrong twice:
# the cache of a token and layer is kv_lora_rank + qk_rope_head_dim values.
. "$(dirname "$0")/common.sh"
environment transformers transformers==5.20.2
cat > "$work/program.py" << 'PY'
from transformers import AutoConfig

for name in "deepseek_v2", "deepseek_v3":
    config = AutoConfig.for_model(name)
    print(name, config.head_dim, config.qk_nope_head_dim, config.qk_rope_head_dim)
PY
expect 'deepseek_v2 64 128 64
deepseek_v3 64 128 64' transformers/bin/python program.py

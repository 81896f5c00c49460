#!/usr/bin/env bash
# hf-mem 0.5.6: the KV cache's type of a checkpoint with FP8 weights and no KV scheme.
# Guess: BF16, as vLLM keeps it unless --kv-cache-dtype or the checkpoint says otherwise.
# Seen: F8_E4M3, half the bytes, for the quantization_config that Qwen3-32B-FP8 publishes.
. "$(dirname "$0")/common.sh"
environment peer hf-mem==0.5.6
cat > "$work/program.py" << 'PY'
from hf_mem.safetensors.kv_cache import resolve_kv_cache_dtype

config = {
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
print(resolve_kv_cache_dtype(config, "auto", None, "model"))
PY
expect 'F8_E4M3' peer/bin/python program.py

#!/usr/bin/env bash
# aiconfigurator-core 0.12.0: bytes on one GPU of Llama 3.1 8B with pipeline parallelism.
# Guess: with 4 stages a quarter of the weights, and of the KV cache of a token: each stage
# keeps its own 8 of 32 layers, 32,768 of 131,072 bytes.
# Seen: the weights are a quarter, the KV cache is that of all layers. So it plans for 557,656
# tokens where vLLM 0.19.0 logged 2,257,264 on four H100s (results/real-cards/peers.json).
. "$(dirname "$0")/common.sh"
environment peer aiconfigurator-core==0.12.0
cat > "$work/program.py" << 'PY'
from aiconfigurator_core.sdk.memory import estimate_kv_cache

for stages in 1, 4:
    told = estimate_kv_cache(
        "meta-llama/Meta-Llama-3.1-8B",
        "h100_sxm",
        "vllm",
        "current",
        max_num_tokens=8192,
        max_batch_size=256,
        memory_fraction_kind="of_total",
        memory_fraction_value=0.9,
        pp_size=stages,
    )
    weights = told["memory_breakdown"]["weights_bytes"]
    print(stages, weights, told["kv_size_per_token_bytes"])
PY
expect '1 16059990016 131072
4 4014997504 131072' peer/bin/python program.py

#!/usr/bin/env bash
# hf-vram-calc 1.0.9: Llama 3.1 8B in 16 bits with 131,072 tokens.
# Guess: the total of inference is at least the model and the KV cache of its own row,
# 14.96 + 16.0 GiB.
# Seen: 17.95 GiB, 1.2 times the weights. The cache and the activations stand in the row and
# are in no total.
. "$(dirname "$0")/common.sh"
environment peer hf-vram-calc==1.0.9 transformers==5.20.2 accelerate==1.15.0 torch==2.14.0 \
  numpy==2.4.6
cat > "$work/config.json" << 'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
 "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
 "max_position_embeddings": 131072, "tie_word_embeddings": false}
JSON
cat > "$work/program.py" << 'PY'
import json
import subprocess

command = ["peer/bin/hf-vram-calc", "--model", "llama", "--model_path", ".", "--dtype"]
command += ["bf16", "--max_seq_len", "131072", "--output_json", "told.json"]
subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
(row,) = json.load(open("told.json"))["memory_requirements"]
print(row["model_size_gib"], row["kv_cache_size_gib"], row["inference_total_gib"])
PY
expect '14.96 16.0 17.95' peer/bin/python program.py

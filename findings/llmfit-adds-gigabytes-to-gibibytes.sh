#!/usr/bin/env bash
# llmfit 1.1.17: the plan for Llama 3.1 8B in 16 bits with a context of 131,072 tokens.
# Guess: one unit: 14.96 GiB of weights (8,030,261,248 x 2 bytes) and 16 GiB of KV cache
# (131,072 tokens x 131,072 bytes), or 16.06 GB and 17.18 GB.
# Seen: 16.06 and 16.0: weights in GB and a cache in GiB, added to 0.5 as 32.56. So 32G are
# "TooTight", though all three are 31.46 GiB.
. "$(dirname "$0")/common.sh"
environment peer llmfit==1.1.17
cat > "$work/program.py" << 'PY'
import json
import subprocess

arguments = ["plan", "meta-llama/Llama-3.1-8B", "--quant", "F16", "--context", "131072"]
command = ["peer/bin/llmfit", "--memory", "32G", *arguments, "--json"]
told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
cache = next(kv for kv in told["kv_alternatives"] if kv["kv_quant"] == "fp16")
print(round(told["disk_size_gb"], 3), cache["kv_cache_gb"])
print(round(cache["memory_required_gb"], 3), told["current"]["fit_level"])
PY
expect '16.061 16.0
32.561 TooTight' peer/bin/python program.py

#!/usr/bin/env bash
# transformers 5.20.2: what DynamicCache holds of a sliding layer after a long prompt.
# Guess: keys of the window, 15 tokens of 256 bytes, for a prompt of 1,000 tokens.
# Seen: the keys are a view of all 1,000, until the next token replaces them. So while a
# prompt runs through the model, the window saves nothing: the peak has every layer's prompt.
. "$(dirname "$0")/common.sh"
environment transformers transformers==5.20.2 torch==2.14.0
cat > "$work/program.py" << 'PY'
import torch
from transformers import AutoConfig, DynamicCache

config = AutoConfig.for_model(
    "mistral",
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    sliding_window=16,
)
cache = DynamicCache(config=config)
for tokens in 1000, 1:
    for index, layer in enumerate(cache.layers):
        cache.update(torch.zeros(1, 4, tokens, 16), torch.zeros(1, 4, tokens, 16), index)
    for layer in cache.layers:
        keys = layer.keys
        print(keys.shape[-2], keys.nbytes, keys.untyped_storage().nbytes())
PY
expect '15 3840 256000
15 3840 256000
15 3840 4096
15 3840 4096' transformers/bin/python program.py

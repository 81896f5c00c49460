#!/usr/bin/env bash
# transformers 5.20.2 with compressed-tensors 0.20.0: bytes of a model with weights of 4 bits,
# after loading and after the first forward pass.
# Guess: the same: the weights stay packed, and each layer unpacks its own for its product.
# Seen: the first forward pass replaces all packed weights by bfloat16, for good. What is
# measured after loading is 29 % of what the model takes then. A docstring says so, no warning.
. "$(dirname "$0")/common.sh"
environment transformers transformers==5.20.2 compressed-tensors==0.20.0 accelerate==1.15.0 \
  torch==2.14.0 numpy==2.4.6
cat > "$work/program.py" << 'PY'
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=128,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
print("bfloat16", model.get_memory_footprint())
weights = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
groups = {"group": QuantizationScheme(targets=["Linear"], weights=weights)}
apply_quantization_config(
    model,
    QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="pack-quantized"),
)
for module in model.modules():
    if hasattr(module, "weight_scale"):
        largest = module.weight.data.unflatten(1, (-1, 128)).abs().amax(-1)
        module.weight_scale.data = largest / 7
compressor = ModelCompressor.from_pretrained_model(model)
compressor.compress_model(model)
model.save_pretrained("model")
compressor.update_config("model")

model = AutoModelForCausalLM.from_pretrained("model")
print("loaded", model.get_memory_footprint())
model(torch.zeros(1, 4, dtype=torch.long))
print("used", model.get_memory_footprint())
print(model.model.layers[0].mlp.up_proj.weight.dtype)
PY
expect 'bfloat16 2755328
loaded 809952
used 2776032
torch.bfloat16' transformers/bin/python program.py

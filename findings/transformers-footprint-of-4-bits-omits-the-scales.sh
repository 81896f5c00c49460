#!/usr/bin/env bash
# transformers 5.20.2 with bitsandbytes 0.50.2: get_memory_footprint of a model in NF4.
# Guess: it counts the packed weights and their scales, a float32 for 64 weights.
# Seen: the scales are attributes of a parameter, not parameters or buffers. They are not
# counted: an eighth of the weights' bytes, or 3 % with double quantization.
. "$(dirname "$0")/common.sh"
environment transformers transformers==5.20.2 bitsandbytes==0.50.2 accelerate==1.15.0 \
  torch==2.14.0 numpy==2.4.6
cat > "$work/program.py" << 'PY'
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

config = LlamaConfig(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=8,
    vocab_size=128,
)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("model")
for double in False, True:
    model = AutoModelForCausalLM.from_pretrained(
        "model",
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double,
        ),
    )
    packed = scales = other = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is None:
            other += parameter.nbytes
            continue
        packed += parameter.nbytes
        tensors = [state.absmax]
        if state.nested:
            tensors += [state.state2.absmax]
        scales += sum(tensor.nbytes for tensor in tensors)
    other += sum(buffer.nbytes for buffer in model.buffers())
    print(packed, scales, model.get_memory_footprint() - packed - other)
PY
expect '4194304 524288 0
4194304 133120 0' transformers/bin/python program.py

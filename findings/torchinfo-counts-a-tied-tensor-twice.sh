#!/usr/bin/env bash
# torchinfo 1.8.0 with PyTorch 2.14.0: a model whose head and embedding are one tensor.
# Guess: its parameters and their bytes are counted once, as parameters() has them.
# Seen: both are counted twice, in float32 as in bfloat16.
. "$(dirname "$0")/common.sh"
environment torchinfo torchinfo==1.8.0 torch==2.14.0 numpy==2.4.6
tied_model
cat > "$work/program.py" << 'PY'
import torch
import torchinfo
from tied import Model

for dtype in torch.float32, torch.bfloat16:
    model = Model().to(dtype)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    told = torchinfo.summary(model, input_data=tokens, verbose=0)
    held = sum(tensor.nbytes for tensor in model.parameters())
    print(held, told.total_param_bytes, told.total_params)
PY
expect '1024000 2048000 512000
512000 1024000 512000' torchinfo/bin/python program.py

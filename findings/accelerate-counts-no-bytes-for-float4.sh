#!/usr/bin/env bash
# accelerate 1.15.0 with PyTorch 2.14.0: bytes of an element, by which device maps are made.
# Guess: half a byte or one for float4_e2m1fn_x2 (PyTorch keeps a pair in a byte), and
# one for uint4, of which PyTorch keeps one in a byte.
# Seen: 0 for both: compute_module_sizes says that a float4 model takes no memory.
. "$(dirname "$0")/common.sh"
environment accelerate accelerate==1.15.0 torch==2.14.0 numpy==2.4.6
cat > "$work/program.py" << 'PY'
import torch
from accelerate.utils.modeling import dtype_byte_size

for kind in torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.uint4:
    print(kind, dtype_byte_size(kind), kind.itemsize)
PY
expect 'torch.float8_e4m3fn 1 1
torch.float4_e2m1fn_x2 0 1
torch.uint4 0 1' accelerate/bin/python program.py

#!/usr/bin/env bash
# safetensors 0.8.0 with PyTorch 2.14.0: the shape of a float4 tensor in the header.
# Guess: the header has the shape that PyTorch shows, (4, 8) for 32 bytes.
# Seen: PyTorch counts pairs, the header counts values: [4, 16]. Whoever takes the
# header's number of elements at a byte each, or PyTorch's at half a byte, is off by two.
. "$(dirname "$0")/common.sh"
environment torch torch==2.14.0 safetensors==0.8.0 numpy==2.4.6
cat > "$work/program.py" << 'PY'
import json
import struct

import torch
from safetensors.torch import load_file, save_file

weight = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
save_file({"weight": weight}, "weight.safetensors")
with open("weight.safetensors", "rb") as file:
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))["weight"]
print(tuple(weight.shape), weight.nbytes)
print(header["dtype"], header["shape"], header["data_offsets"])
print(tuple(load_file("weight.safetensors")["weight"].shape))
PY
expect '(4, 8) 32
F4 [4, 16] [0, 32]
(4, 8)' torch/bin/python program.py

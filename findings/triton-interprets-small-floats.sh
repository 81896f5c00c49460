#!/usr/bin/env bash
# Triton 3.8.0, interpreted (TRITON_INTERPRET=1): sums of bfloat16, and casts to float8.
# Guess: 256 + 1 is 256 in bfloat16; 500 saturates to 448 in float8e4nv, as a cast in PyTorch.
# Seen: the sum is about -3.8e-37 (the bit patterns are added as integers), and 500
# becomes 256. Neither warns. A test of equality by the interpreter needs float32.
. "$(dirname "$0")/common.sh"
environment torch torch==2.14.0 triton==3.8.0 numpy==2.4.6
cat > "$work/program.py" << 'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out):
    tl.store(out, tl.load(x) + tl.load(y))


@triton.jit
def cast(x, out):
    tl.store(out, tl.load(x).to(tl.float8e4nv).to(tl.float32))


x = torch.tensor([256.0], dtype=torch.bfloat16)
y = torch.tensor([1.0], dtype=torch.bfloat16)
out = torch.empty_like(x)
add[(1,)](x, y, out)
print(f"{out.item():.2g}", (x + y).item())
large = torch.tensor([500.0])
out = torch.empty(1)
cast[(1,)](large, out)
print(out.item(), large.to(torch.float8_e4m3fn).float().item())
PY
export TRITON_INTERPRET=1
expect '-3.8e-37 256.0
256.0 448.0' torch/bin/python program.py

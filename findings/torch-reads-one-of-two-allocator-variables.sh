#!/usr/bin/env bash
# PyTorch 2.14.0: PYTORCH_ALLOC_CONF next to PYTORCH_CUDA_ALLOC_CONF.
# Guess: the new name wins, as the old one is deprecated; or both are read.
# Seen: only the old name is read. An image that exports it undoes what a user sets
# by the new name, and nothing is printed.
. "$(dirname "$0")/common.sh"
environment torch torch==2.14.0
cat > "$work/program.py" << 'PY'
from torch._C import _accelerator_getAllocatorSettings as get

print(get())
PY
export PYTORCH_ALLOC_CONF=expandable_segments:False
export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128
expect 'max_split_size_mb:128' torch/bin/python program.py

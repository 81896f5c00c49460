#!/usr/bin/env bash
# PyTorch 2.14.0: the getter of the allocator's settings returns text that was refused.
# Guess: after a ValueError the getter still returns the last accepted text.
# Seen: it returns the refused text. A program that saves the text, sets its own and
# sets the saved text again gets the ValueError of somebody else's mistake.
. "$(dirname "$0")/common.sh"
environment torch torch==2.14.0
cat > "$work/program.py" << 'PY'
from torch._C import _accelerator_getAllocatorSettings as get
from torch._C import _accelerator_setAllocatorSettings as put

put("max_split_size_mb:100")
try:
    put("max_split_size:100")
except ValueError as error:
    print(type(error).__name__)
print(get())
PY
expect 'ValueError
max_split_size:100' torch/bin/python program.py

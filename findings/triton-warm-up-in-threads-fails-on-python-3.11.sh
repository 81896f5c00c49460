#!/usr/bin/env bash
# Triton 3.8.0 on CPython 3.11: four threads parse a kernel, as those of AsyncCompileMode do
# first. vLLM 0.33.0 warms its kernels up so (VLLM_TRITON_JIT_WARMUP_NUM_THREADS, 4).
# Guess: parsing needs no lock next to other threads.
# Seen: SystemError within a second, when a garbage collection in ast.parse lets another
# thread parse: both count their depth in one counter of the interpreter. One start of
# stock vLLM failed so. 20 seconds of ast.parse in CPython 3.12 and 3.13 raised nothing.
. "$(dirname "$0")/common.sh"
export PYTHON=python3.11
environment triton-alone triton==3.8.0
cat > "$work/program.py" << 'PY'
import threading
import time

import triton
import triton.language as tl


@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=((0.0 + 1.0) * 2.0 - 1.0) / 3.0)
    for step in range(4):
        if step % 2 == 0:
            value = tl.where(value > 0, value * (1.0 + step), -value)
    tl.store(out + at, value, mask=at < n)


class Collected:
    """Each object refers to itself, and runs Python when it is collected."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        sum(range(200))


def parse():
    while not errors and time.monotonic() < end:
        Collected()
        try:
            kernel.parse()
        except SystemError as error:
            errors.append(str(error).partition(" (")[0])


errors, end = [], time.monotonic() + 60
threads = [threading.Thread(target=parse) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(errors[0] if errors else "no error")
PY
expect 'AST constructor recursion depth mismatch' triton-alone/bin/python program.py

#!/usr/bin/env bash
# nvidia-cuda-nvrtc 13.0.88: NVRTC is loaded by its path, in a process without PyTorch.
# Guess: it compiles, as the library of its builtins is next to it.
# Seen: it looks the builtins up by their name and has no path of its own. PyTorch has
# loaded them; a compiler in a process of its own (humming 0.1.19) needs LD_LIBRARY_PATH.
. "$(dirname "$0")/common.sh"
environment nvrtc-alone nvidia-cuda-nvrtc==13.0.88
cat > "$work/program.py" << 'PY'
import ctypes
import pathlib
import sys

folder = next(pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/lib"))
nvrtc = ctypes.CDLL(str(folder / "libnvrtc.so.13"))


def compile() -> int:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), b"__global__ void f() {}", b"f.cu", 0, None, None
    )
    return nvrtc.nvrtcCompileProgram(program, 0, None)


print("alone:", compile())
ctypes.CDLL(str(folder / "libnvrtc-builtins.so.13.0"), ctypes.RTLD_GLOBAL)
print("builtins loaded:", compile())
PY
expect 'alone: 7
builtins loaded: 0' nvrtc-alone/bin/python program.py

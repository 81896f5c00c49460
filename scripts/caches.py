"""Where runs keep compiled kernels: below build/, never in the user's home.

Caches of an earlier start change a start's measurements: results of autotuning,
compiled models, plans. So each run begins with empty caches, unless it is given its own
folder: the first start in a folder is cold, later ones are warm. Only compiled Triton
kernels, which change no byte, are shared by all runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

# Where a program would look instead of the home folder, if the user has set it.
ELSEWHERE = {
    "CUDA_CACHE_PATH",
    "FLASHINFER_CUBIN_DIR",
    "HF_HOME",
    "TILELANG_CACHE_DIR",
    "TORCH_HOME",
    "TRITON_HOME",
    "VLLM_ASSETS_CACHE",
    "VLLM_CONFIG_ROOT",
    "XDG_DATA_HOME",
}
# Bytecode lies next to the modules of the environment: vLLM has thousands.
BYTECODE = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}


def environment(
    base: Mapping[str, str], folder: Path, kernels: Path | None = None
) -> dict[str, str]:
    """`base`, for processes whose caches are in `folder`.

    `kernels` is the folder that shared_triton_cache.py shares; this repository
    must be on their path.
    """
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    result = {
        key: value for key, value in base.items() if key not in ELSEWHERE | BYTECODE
    }
    result |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "FLASHINFER_WORKSPACE_BASE": str(home),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        # Otherwise humming compiles kernels next to each process that imports vLLM.
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    }
    if sys.version_info < (3, 12):
        # findings/triton-warm-up-in-threads-fails-on-python-3.11.sh
        result.setdefault("VLLM_TRITON_JIT_WARMUP_NUM_THREADS", "1")
    if kernels is not None:
        result |= {
            "TRITON_CACHE_MANAGER": "scripts.shared_triton_cache:SharedCache",
            "SHARED_TRITON_CACHE": str(kernels),
        }
    return result

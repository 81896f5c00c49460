"""Warm up the convolution of gated delta nets where freed memory has other values.

The argument is the case of a start: its model, and arguments of LLM as "llm". Prints
what the warm-up has at most, in bytes.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.warmup import qwen_triton_warmup

from bench.scenarios import models
from bench.scenarios.on_the_host import compute_on_host
from bench.scenarios.result import print_result

DIM, WIDTH = 256, 4


def main() -> None:
    asked = json.loads(sys.argv[1])
    compute_on_host(models.MODELS[asked["model"]], asked.get("llm", {}))
    # Copied there, as no kernel fills it.
    of_others = torch.full((1 << 18,), 1 << 24, dtype=torch.int32)
    freed = [of_others.cuda() for _ in range(8)]
    del freed
    config: Any = SimpleNamespace(
        conv_dim=DIM,
        conv_dtype=torch.bfloat16,
        conv_kernel_size=WIDTH,
        conv_state=torch.empty(2, DIM, WIDTH - 1, dtype=torch.bfloat16, device="cuda"),
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    qwen_triton_warmup._warm_causal_conv1d_fwd_kernel(torch.device("cuda"), config)
    print_result({"peak": torch.cuda.max_memory_allocated() - before})


if __name__ == "__main__":
    main()

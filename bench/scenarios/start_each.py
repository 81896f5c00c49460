"""Start one engine after another, each in a process of its own.

The argument is a JSON list of cases (see start.py); prints a RESULT line for each. The
processes are forked from one that has done a start's imports, which are most of its
time; FlashInfer is hidden, as if it were not installed. A case with a tactic of
FlashInfer's imports for itself, cases in a row with a variable that imports read once
for all of them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

from bench.scenarios import start
from bench.scenarios.result import print_result
from vgpu import frozen

# What a start imports; the rest takes little time.
IMPORTED = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle",
    "vllm.model_executor.models.qwen3_moe",
    "torch._dynamo",
    "torch._inductor.compile_fx",
]


def import_vllm() -> None:
    # It asks the device when it is imported, which no parent of starts may.
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    for name in IMPORTED:
        importlib.import_module(name)
    # On a GPU a start is as a user's, and so is one whose time is measured.
    if "VGPU_RUN" in os.environ and "COLLECT_IMPORTS" not in os.environ:
        frozen.freeze()
        frozen.keep()


def main() -> None:
    import_vllm()
    this = "bench.scenarios.start_each"
    for variables, cases in groupby(json.loads(sys.argv[1]), read_by_imports):
        if variables:
            tell_death(in_process(this, list(cases), os.environ | variables))
            continue
        for case in cases:
            if "flashinfer_tactic" in case:
                # As a user's: it warms up all batches, too.
                environment = dict(os.environ)
                environment.pop("WARM_UP_FEW_BATCHES", None)
                tell_death(in_process(start.__name__, case, environment))
            else:
                tell_death(in_fork(partial(begin, case)))


def in_process(module: str, asked: Any, environment: Mapping[str, str]) -> int:
    """Run it in a process that imports for itself, whose status is returned."""
    sys.stdout.flush()
    command = [sys.executable, "-m", module, json.dumps(asked)]
    return subprocess.run(command, env=environment).returncode


def begin(case: dict[str, Any]) -> None:
    sys.argv[1:] = [json.dumps(case)]
    start.main()


def in_fork(scenario: Callable[[], None]) -> int:
    """Run it in a process forked from this one, whose status is returned."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        scenario()
        sys.stdout.flush()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def read_by_imports(case: dict[str, Any]) -> dict[str, str]:
    """Variables of the case that this process lacks and that are neither vLLM's, which
    reads its own when it needs them, nor of PyTorch's allocator, whose settings the
    first call reads.

    Its backend is "parsed at load time" (CUDAAllocatorConfig.cpp). And the KV cache of
    a forked start differs by some MiB with expandable segments.
    """
    return {
        name: value
        for name, value in case.get("environment", {}).items()
        if os.environ.get(name) != value
        and not name.startswith("VLLM_")
        and (
            not name.endswith("ALLOC_CONF")
            or "backend" in value
            or "expandable_segments" in value
        )
    }


def tell_death(status: int) -> None:
    if status:
        died = {"outcome": "died", "status": status}
        print_result(died)


if __name__ == "__main__":
    main()

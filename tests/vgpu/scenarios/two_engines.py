"""Two engines on one device, each in its own process with utilization 0.45.

The second starts first, and gets its first prompt after the other has served a load:
the other's cache must leave enough memory. The argument is a JSON object with the
"steps" of the load.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.scenarios import start
from bench.scenarios.loads import LOADS
from bench.scenarios.mixed_load import ENGINE, load
from bench.scenarios.on_the_host import inspect_models_here
from bench.scenarios.result import print_result

SECOND = "second"


def engine(folder: str) -> Any:
    from vllm import LLM

    from bench.scenarios import models

    start.configure(False)
    inspect_models_here()
    model = models.write("llama-8b", Path(folder, "model"))
    share = {"enforce_eager": True, "gpu_memory_utilization": 0.45}
    return LLM(model, **start.ENGINE | ENGINE | share)


def second() -> None:
    """Start, say so, wait for a line, and serve a prompt of the largest size."""
    import torch
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        llm = engine(folder)
        print("started", flush=True)
        sys.stdin.readline()
        parameters = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
        try:
            prompt: Any = {"prompt_token_ids": [7] * 8000}
            llm.generate(prompt, parameters, use_tqdm=False)
            print("served", flush=True)
        except torch.OutOfMemoryError as error:
            print(f"out of memory: {error}".splitlines()[0], flush=True)


def line(other: subprocess.Popen[str]) -> str:
    """The next of its lines that is not vLLM's."""
    assert other.stdout is not None
    for text in other.stdout:
        if text.startswith(("started", "served", "out of memory")):
            return text.strip()
    return "ended"


def main() -> None:
    if sys.argv[1] == SECOND:
        return second()
    from vgpu import control

    case = json.loads(sys.argv[1])
    command = [sys.executable, "-m", "tests.vgpu.scenarios.two_engines", SECOND]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        told = line(other)
        assert told == "started", told
        llm = engine(folder)
        result = load(
            llm.llm_engine,
            LOADS["mixed"],
            random.Random(0),
            [],
            control.memory(),
            case["steps"],
        )
        result["held"] = control.process_used()
        assert other.stdin is not None
        other.stdin.write("go\n")
        other.stdin.flush()
        result["second"] = line(other)
        other.stdin.close()
    print_result(result)


if __name__ == "__main__":
    main()

"""Processor time of decoding, and of the patches around each step of a worker.

The argument is that of start.py, with "rounds" of 200 steps of 16 sequences. Every
round prints its milliseconds a step; the last line has the "calls" of Python and C a
step, the "microseconds" that the patches add around a worker's call, the least of
batches, and how often NVML was initialized until the engine had started.
"""

from __future__ import annotations

import json
import sys
import time
from types import FrameType
from typing import Any

from bench.scenarios import device, serve, start

STEPS = 200
BATCHES, TIMES = 20, 1000


def main() -> None:
    asked = json.loads(sys.argv[1])
    rounds = asked.pop("rounds")
    llm = start.engine(asked, {})
    initializations = device.nvml_initializations()
    serve.decode(llm, STEPS)
    for _ in range(rounds):
        began = time.process_time()
        serve.decode(llm, STEPS)
        serve.answer({"milliseconds": 1000 * (time.process_time() - began) / STEPS})
    (microseconds,) = llm.collective_rpc(around_a_step)
    calls = count_calls(llm) / STEPS
    last = {"calls": calls, "microseconds": microseconds}
    serve.answer(last | {"nvml_initializations": initializations})


def count_calls(llm: Any) -> int:
    """Unlike time, they are the same in each run."""
    number = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        serve.decode(llm, STEPS)
    finally:
        sys.setprofile(None)
    return number


def around_a_step(worker: Any) -> float:
    try:
        from vllm.v1.worker.serving_memory import in_serving_memory
    except ImportError:  # stock vLLM
        return 0.0
    nothing = in_serving_memory(lambda _worker: None)
    least = float("inf")
    for _ in range(BATCHES):
        began = time.process_time()
        for _ in range(TIMES):
            nothing(worker)
        least = min(least, time.process_time() - began)
    return 1e6 * least / TIMES


if __name__ == "__main__":
    main()

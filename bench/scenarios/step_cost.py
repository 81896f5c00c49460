"""Processor time of decoding, and of the patches around each step of a worker.

The argument is that of start.py, with "rounds" of 200 steps of 16 sequences. Every
round prints its milliseconds a step; the last line has the "calls" of Python and C a
step, and the "microseconds" in which the memory of a call is set and put back, the
least of batches, where there is that.
"""

from __future__ import annotations

import json
import sys
import time
from types import FrameType
from typing import Any

from bench.scenarios import serve, start

STEPS = 200
BATCHES, TIMES = 20, 1000


def main() -> None:
    asked = json.loads(sys.argv[1])
    rounds = asked.pop("rounds")
    llm = start.engine(asked, {})
    serve.decode(llm, STEPS)
    for _ in range(rounds):
        began = time.process_time()
        serve.decode(llm, STEPS)
        serve.answer({"milliseconds": 1000 * (time.process_time() - began) / STEPS})
    (microseconds,) = llm.collective_rpc(around_a_step)
    calls = count_calls(llm) / STEPS
    serve.answer({"calls": calls, "microseconds": microseconds})


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
    memory = getattr(worker, "serving_memory", None)
    if memory is None:
        return 0.0
    least = float("inf")
    for _ in range(BATCHES):
        began = time.process_time()
        for _ in range(TIMES):
            with memory.step():
                pass
        least = min(least, time.process_time() - began)
    return 1e6 * least / TIMES


if __name__ == "__main__":
    main()

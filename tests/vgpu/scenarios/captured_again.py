"""PyTorch alone: memory of a graph that is gone, while its stream captures the next.

The argument says whether the first graph's memory lies in expandable segments: "True"
or "False". Another thread empties PyTorch's cache meanwhile. Prints a RESULT line: how
that and the capture ended. See docs/upstream.md, "Reports for PyTorch".
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from bench.scenarios.result import print_result


def main() -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{sys.argv[1]}")
    result: dict[str, Any] = {}

    def empty_cache() -> None:
        result["emptied"] = ended(torch.cuda.empty_cache)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            graph.reset()  # Its memory is cached from now on.
            graph.capture_begin(capture_error_mode="thread_local")
            torch.empty(2**24, dtype=torch.uint8, device="cuda")
            if "captured" in result:
                other = threading.Thread(target=empty_cache)
                other.start()
                other.join()
            result["captured"] = ended(graph.capture_end)
    print_result(result)


def ended(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "done"


if __name__ == "__main__":
    main()

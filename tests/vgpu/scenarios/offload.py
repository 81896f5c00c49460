"""Host memory that an engine pins for weights that it offloads.

The argument is a JSON object: "model", a name in models.py, "layers", and "offload",
the engine's arguments for it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.scenarios.result import print_result
from tests.vgpu.scenarios import host_memory


def main() -> None:
    case = json.loads(sys.argv[1])
    llm = host_memory.engine(case, **case["offload"])
    from vgpu import control

    (offloaded,) = llm.collective_rpc(offloaded_bytes)
    result = {
        "offloaded": offloaded,
        "pinned": control.pinned(),
        "peak": control.pinned_peak(),
    }
    print_result(result)


def offloaded_bytes(worker: Any) -> int:
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    return getattr(offloader, "cpu_offload_bytes", 0) or offloader.total_offloaded_bytes


if __name__ == "__main__":
    main()

"""Warm up a worker that serves, as elastic expert parallelism does when it scales.

The argument is a case of start.py's with "kept": bytes that serving has taken since the
start, in addition to the request. Ranks are not needed: their communicator is left out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.scenarios.result import print_result


def main() -> None:
    asked = json.loads(sys.argv[1])
    kept = asked.pop("kept")
    import torch

    from bench.scenarios import start

    def scale(worker: Any) -> int:
        from vllm.distributed.elastic_ep import elastic_execute

        elastic_execute.get_ep_all2all_manager = lambda: None
        held = torch.empty(kept, dtype=torch.uint8, device="cuda")
        elastic_execute.ElasticEPScalingExecutor(worker.worker).warm_and_capture()
        return int(torch.cuda.memory_reserved() - held.nbytes)

    result: dict[str, Any] = {}
    try:
        llm = start.engine(asked, result)
        result["outcome"] = "started"
        result["reserved"] = llm.collective_rpc(scale)[0]
    except Exception as error:  # an outcome, not an accident
        result |= {"outcome": type(error).__name__, "error": str(error)[:2000]}
    print_result(result)


if __name__ == "__main__":
    main()

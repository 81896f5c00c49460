"""Host memory that an engine pins for weights that it offloads.

The argument is a JSON object: "model", a name in models.py, "layers", and "offload",
the engine's arguments for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    case = json.loads(sys.argv[1])
    import models
    import start

    start.configure(v2=True)
    from vllm import LLM

    from vgpu import control

    models.MODELS[case["model"]]["num_hidden_layers"] = case["layers"]
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            models.write(case["model"], Path(folder)),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            attention_backend="TRITON_ATTN",
            disable_log_stats=True,
            **case["offload"],
        )
        (offloaded,) = llm.collective_rpc(offloaded_bytes)
    result = {
        "offloaded": offloaded,
        "pinned": control.pinned(),
        "peak": control.pinned_peak(),
    }
    print("RESULT " + json.dumps(result), flush=True)


def offloaded_bytes(worker: Any) -> int:
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    return getattr(offloader, "cpu_offload_bytes", 0) or offloader.total_offloaded_bytes


if __name__ == "__main__":
    main()

"""Host memory that an engine pins when it sleeps at level 1, and has after waking up.

The argument is a JSON object: "model", a name in models.py, "layers", and variables of
the "environment", if any.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.scenarios.on_the_host import inspect_models_here
from bench.scenarios.result import print_result


def main() -> None:
    case = json.loads(sys.argv[1])
    os.environ |= case.get("environment", {})
    llm = engine(case, enable_sleep_mode=True)
    from vgpu import control

    (weights,) = llm.collective_rpc(weights_bytes)
    before = control.pinned()
    llm.sleep(level=1)
    asleep = control.pinned() - before
    llm.wake_up()
    awake = control.pinned() - before
    result = {"weights": weights, "asleep": asleep, "awake": awake}
    print_result(result)


def engine(case: dict[str, Any], **arguments: Any) -> Any:
    """Of a case's "model" with as many "layers", and a small KV cache."""
    from bench.scenarios import models, start

    start.configure(v2=True)
    inspect_models_here()
    from vllm import LLM

    models.MODELS[case["model"]]["num_hidden_layers"] = case["layers"]
    with tempfile.TemporaryDirectory() as folder:
        return LLM(
            models.write(case["model"], Path(folder)),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            attention_backend="TRITON_ATTN",
            disable_log_stats=True,
            **arguments,
        )


def weights_bytes(worker: Any) -> int:
    model = worker.get_model()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


if __name__ == "__main__":
    main()

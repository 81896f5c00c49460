"""What vLLM's own code makes of the KV cache of a model: the model is built without
memory, and its layers, with the specs of their memory, form groups as in a start.
kv_table.py runs it in the environment of the release, on the virtual device.

The argument is a JSON list of "name", "model" (a folder) and "length". Prints "RESULT"
and one JSON object for each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from typing import Any

from bench.plan_engine import VARIABLES, innermost, parse
from bench.scenarios.on_the_host import inspect_models_here, own_process
from bench.scenarios.result import print_result

LENGTH = 8192
AVAILABLE = 64 << 30
FLAGS = [
    *("--enforce-eager", "--max-num-seqs", "16", "--gdn-prefill-backend", "triton"),
    *("--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}'),
]


def main() -> None:
    os.environ |= VARIABLES
    own_process()
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    inspect_models_here()
    torch.cuda.set_device(0)
    store = tempfile.TemporaryDirectory()  # each group of ranks asks it
    parallel_state.init_distributed_environment(
        1, 0, f"file://{store.name}/store", 0, "gloo"
    )
    for case in json.loads(sys.argv[1]):
        told: dict[str, Any] = {"name": case["name"]}
        try:
            config = engine_config(case["model"], case["length"])
            with set_current_vllm_config(config):
                parallel_state.destroy_model_parallel()
                parallel_state.initialize_model_parallel(1)  # experts' groups, too
                told |= specs(config)
        except Exception as error:
            told["error"] = innermost(error)
        print_result(told)


def engine_config(model: str, length: int) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    own = ["--load-format", "dummy", "--skip-tokenizer-init"]
    arguments = parse([model, *FLAGS, *own, "--max-model-len", str(length)])
    engine_args = AsyncEngineArgs.from_cli_args(arguments)
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def specs(config: Any) -> dict[str, Any]:
    """The groups of layers, and their part of a KV cache of AVAILABLE."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_planning import (
        get_global_kv_cache_groups,
        get_kv_cache_configs,
    )
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.worker_base import get_current_attn_backends

    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with torch.device("meta"):
            model = initialize_model(vllm_config=config)
            current_platform.update_block_size_for_backend(config)
            layers = get_kv_cache_spec(config)
            layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
            names = [layout.name for layout in layouts]
            resolve_kv_cache_layout(config, [names], list(layers.values()))
            groups = get_global_kv_cache_groups(config, [layers])
            (made,) = get_kv_cache_configs(config, [layers], [AVAILABLE], groups)
            tokens, _ = get_kv_cache_capacity(config, made)
    finally:
        torch.set_default_dtype(before)
    counted = Counter(json.dumps(spec_of(spec)) for spec in layers.values())
    return {
        "fp8": any("8" in str(getattr(s, "dtype", "")) for s in layers.values()),
        "specs": [{"layers": n} | json.loads(spec) for spec, n in counted.items()],
        "groups": [
            [len(group.layer_names), type(group.kv_cache_spec).__name__]
            for group in made.kv_cache_groups
        ],
        "tokens": tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def spec_of(spec: Any) -> dict[str, Any]:
    window = getattr(spec, "sliding_window", None)
    return {
        "kind": type(spec).__name__,
        "block": spec.block_size,
        "page": getattr(spec, "real_page_size_bytes", spec.page_size_bytes),
        "dtype": str(getattr(spec, "dtype", "")),
        "window": window or getattr(spec, "attention_chunk_size", None),
    }


if __name__ == "__main__":
    main()

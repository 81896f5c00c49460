"""Sleep at level 2, wake up and reload the weights, many times, over swept pools.

The argument is a JSON object: "rounds", and "sweep", whether the pool is swept before
each module's conversion instead of under pressure only.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    case = json.loads(sys.argv[1])
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import models
    import torch
    from safetensors.torch import save_file
    from vllm import LLM
    from vllm.device_allocator import get_mem_allocator_instance

    from vgpu import control

    if case["sweep"]:
        sweep_always()
    with tempfile.TemporaryDirectory() as folder:
        path = models.write("dense", Path(folder))
        weights = checkpoint(models.MODELS["dense"])
        save_file(weights, Path(folder) / "model.safetensors")
        llm = LLM(
            path,
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            gpu_memory_utilization=0.5,
            attention_backend="TRITON_ATTN",
            disable_log_stats=True,
        )
        allocator = get_mem_allocator_instance()
        gc.freeze()  # sleep() and wake_up() collect garbage; not all of vLLM each time
        rounds = []
        for _ in range(case["rounds"]):
            llm.sleep(level=2)
            asleep = control.used()
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            rounds.append(
                {
                    "asleep": asleep,
                    "awake": control.used(),
                    "reserved": torch.cuda.memory_reserved(),
                    "records": len(allocator.pointer_to_data),
                    "recorded": allocator.get_current_usage(),
                }
            )
    (embedding,) = llm.collective_rpc(first_row)
    result = {
        "rounds": rounds,
        "reloaded": embedding == weights["model.embed_tokens.weight"][0].tolist(),
    }
    print("RESULT " + json.dumps(result), flush=True)


def first_row(worker: Any) -> Any:
    return worker.get_model().model.embed_tokens.weight[0].cpu().tolist()


def sweep_always() -> None:
    from vllm import device_allocator
    from vllm.model_executor.model_loader import utils

    def sweep(needed_bytes: int) -> None:
        pool = device_allocator.live_pool.get()
        assert pool is not None
        pool.sweep()

    utils.sweep_pool_under_pressure = sweep


def checkpoint(config: dict[str, Any]) -> dict[str, Any]:
    import torch

    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
        for name, out in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (out * head, hidden)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, heads * head)
        for name in ("gate", "up"):
            shapes[f"{layer}mlp.{name}_proj.weight"] = (
                config["intermediate_size"],
                hidden,
            )
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, config["intermediate_size"])
    torch.manual_seed(0)
    return {name: torch.randn(s, dtype=torch.bfloat16) for name, s in shapes.items()}


if __name__ == "__main__":
    main()

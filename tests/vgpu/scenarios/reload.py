"""Sleep, wake up by tags and update the weights, many times: reinforcement learning.

The argument is a JSON object: "rounds", "level" of sleep, and "v2", the model runner.
The first round is on a device with memory to spare; then another process leaves 5 % of
the peak.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.scenarios.on_the_host import inspect_models_here
from bench.scenarios.result import print_result


def main() -> None:
    case = json.loads(sys.argv[1])
    from bench.scenarios import models, start

    start.configure(case["v2"])
    inspect_models_here()
    import torch
    from safetensors.torch import save_file
    from vllm import LLM
    from vllm.device_allocator import get_mem_allocator_instance

    from vgpu import control

    with tempfile.TemporaryDirectory() as folder:
        versions = [Path(folder) / name for name in ("even", "odd")]
        for seed, version in enumerate(versions):
            models.write("dense", version)
            weights = checkpoint(models.MODELS["dense"], seed)
            save_file(weights, version / "model.safetensors")
        llm = LLM(
            str(versions[0]),
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

        def held() -> dict[str, int]:
            return {
                "awake": control.used() - control.other(),
                "reserved": torch.cuda.memory_reserved(),
                "records": len(allocator.pointer_to_data),
                "recorded": allocator.get_current_usage(),
                "pinned": control.pinned(),
            }

        before = held()
        rounds = []
        control.reset_peak()
        for i in range(case["rounds"]):
            llm.sleep(level=case["level"])
            asleep = control.used() - control.other()
            llm.wake_up(tags=["weights"])
            path = str(versions[i % 2])
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            llm.wake_up(tags=["kv_cache"])
            rounds.append(held() | {"asleep": asleep})
            if i == 0:
                control.other_process(control.memory() - control.peak() * 105 // 100)
        (embedding,) = llm.collective_rpc(first_row)
        last = checkpoint(models.MODELS["dense"], (case["rounds"] - 1) % 2)
    result = {
        "before": before,
        "rounds": rounds,
        "reloaded": embedding == last["model.embed_tokens.weight"][0].tolist(),
    }
    print_result(result)


def first_row(worker: Any) -> Any:
    return worker.get_model().model.embed_tokens.weight[0].cpu().tolist()


def checkpoint(config: dict[str, Any], seed: int) -> dict[str, Any]:
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
    torch.manual_seed(seed)
    return {name: torch.randn(s, dtype=torch.bfloat16) for name, s in shapes.items()}


if __name__ == "__main__":
    main()

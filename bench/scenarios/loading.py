"""Load a small model from a checkpoint of a format, and from dummies as `make plan`
does, and print what stays and what loading takes at most.

The argument names formats, keys of FORMATS. Each is loaded in both ways.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.scenarios.models import COMMON
from bench.scenarios.on_the_host import count_repeats_on_host, count_unique_on_host
from bench.scenarios.result import print_result
from bench.scenarios.start_each import in_fork

if TYPE_CHECKING:
    import torch

Tensors = Iterator[tuple[str, "torch.Tensor"]]
LAYERS, HIDDEN, EXPERTS, INNER, HEAD = 2, 2048, 64, 768, 128
HEADS, KV_HEADS = 16, 4
MODEL = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": INNER,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}


def plain(name: str, out: int, into: int) -> Tensors:
    import torch

    yield f"{name}.weight", torch.zeros(out, into, dtype=torch.bfloat16)


def gptq(name: str, out: int, into: int) -> Tensors:
    import torch

    groups = into // 128
    yield f"{name}.qweight", torch.zeros(into // 8, out, dtype=torch.int32)
    yield f"{name}.qzeros", torch.zeros(groups, out // 8, dtype=torch.int32)
    yield f"{name}.scales", torch.ones(groups, out, dtype=torch.float16)
    yield f"{name}.g_idx", (torch.arange(into) // 128).int()


def awq(name: str, out: int, into: int) -> Tensors:
    import torch

    groups = into // 128
    yield f"{name}.qweight", torch.zeros(into, out // 8, dtype=torch.int32)
    yield f"{name}.qzeros", torch.zeros(groups, out // 8, dtype=torch.int32)
    yield f"{name}.scales", torch.ones(groups, out, dtype=torch.float16)


def fp8(name: str, out: int, into: int) -> Tensors:
    import torch

    yield f"{name}.weight", torch.zeros(out, into, dtype=torch.float8_e4m3fn)
    yield f"{name}.weight_scale_inv", torch.ones(out // 128, into // 128)


def nvfp4(name: str, out: int, into: int) -> Tensors:
    import torch

    scales = torch.ones(out, into // 16).to(torch.float8_e4m3fn)
    yield f"{name}.weight", torch.zeros(out, into // 2, dtype=torch.uint8)
    yield f"{name}.weight_scale", scales
    yield f"{name}.weight_scale_2", torch.ones(())
    yield f"{name}.input_scale", torch.ones(())


# A format's tensors of a matrix, and its quantization_config.
FORMATS: dict[str, tuple[Callable[[str, int, int], Tensors], dict[str, Any]]] = {
    "bf16": (plain, {}),
    "GPTQ": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
        | {"desc_act": False, "dynamic": {r"-:.*\.gate$": {}}},
    ),
    "AWQ": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
        | {"version": "gemm", "modules_to_not_convert": ["mlp.gate"]},
    ),
    "FP8": (
        fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic"}
        | {"weight_block_size": [128, 128]},
    ),
    "NVFP4": (
        nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        | {"kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*gate"]},
    ),
    "MXFP4": (plain, {"quant_method": "mxfp4"}),
}


def main() -> None:
    """Each load in a process of its own, forked from one that has imported vLLM."""
    import vllm.v1.worker.gpu_worker  # noqa: F401

    for name, dummies in itertools.product(sys.argv[1].split(), (False, True)):
        in_fork(partial(load_one, name, dummies))


def load_one(name: str, dummies: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = {"format": name, "dummies": dummies}
        told["stored"] = write(name, Path(folder))
        print_result(told | load(folder, dummies))


def write(name: str, folder: Path) -> int:
    """Make the model's folder; returns the bytes of its weights."""
    from safetensors.torch import save_file

    matrix, scheme = FORMATS[name]
    mxfp4 = name == "MXFP4"
    config = (GPT_OSS if mxfp4 else MODEL) | (
        {"quantization_config": scheme} if scheme else {}
    )
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(gpt_oss() if mxfp4 else qwen(matrix))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def qwen(matrix: Callable[[str, int, int], Tensors]) -> Tensors:
    import torch

    yield from ends()
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        yield from attention(layer, matrix)
        for name in "q_norm", "k_norm":
            weight = torch.ones(HEAD, dtype=torch.bfloat16)
            yield f"{layer}self_attn.{name}.weight", weight
        yield from plain(f"{layer}mlp.gate", EXPERTS, HIDDEN)
        for n in range(EXPERTS):
            expert = f"{layer}mlp.experts.{n}."
            yield from matrix(f"{expert}gate_proj", INNER, HIDDEN)
            yield from matrix(f"{expert}up_proj", INNER, HIDDEN)
            yield from matrix(f"{expert}down_proj", HIDDEN, INNER)


def gpt_oss() -> Tensors:
    import torch

    def biases(name: str, *shape: int) -> tuple[str, torch.Tensor]:
        return name, torch.zeros(*shape, dtype=torch.bfloat16)

    yield from ends()
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        yield from attention(layer, plain)
        sizes = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
        for name, size in (sizes | {"o": HIDDEN}).items():
            yield biases(f"{layer}self_attn.{name}_proj.bias", size)
        yield biases(f"{layer}self_attn.sinks", HEADS)
        yield from plain(f"{layer}mlp.router", EXPERTS, HIDDEN)
        yield biases(f"{layer}mlp.router.bias", EXPERTS)
        for name, out, into in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            experts = f"{layer}mlp.experts.{name}_"
            shape = EXPERTS, out, into // 32
            yield f"{experts}blocks", torch.zeros(*shape, 16, dtype=torch.uint8)
            yield f"{experts}scales", torch.zeros(shape, dtype=torch.uint8)
            yield biases(f"{experts}bias", EXPERTS, out)


def attention(layer: str, matrix: Callable[[str, int, int], Tensors]) -> Tensors:
    import torch

    for name, heads in ("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS):
        yield from matrix(f"{layer}self_attn.{name}_proj", heads * HEAD, HIDDEN)
    yield from matrix(f"{layer}self_attn.o_proj", HIDDEN, HEADS * HEAD)
    for name in "input_layernorm", "post_attention_layernorm":
        yield f"{layer}{name}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)


def ends() -> Tensors:
    import torch

    vocabulary = COMMON["vocab_size"]
    yield from plain("model.embed_tokens", vocabulary, HIDDEN)
    yield from plain("lm_head", vocabulary, HIDDEN)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)


def load(folder: str, dummies: bool) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port
    from vllm.v1.worker.gpu_worker import Worker

    from bench import plan_engine
    from vgpu import control

    count_repeats_on_host()
    count_unique_on_host()
    if dummies:
        plan_engine.change_loading()
    config = EngineArgs(
        model=folder,
        load_format="dummy" if dummies else "auto",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        attention_backend="TRITON_ATTN",
    ).create_engine_config()
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    with set_current_vllm_config(config):
        worker = Worker(config, 0, 0, address, is_driver_worker=True)
        worker.init_device()
        held = control.process_used(0)
        worker.load_model()
    torch.accelerator.empty_cache()
    return {
        "weights": int(worker.model_runner.model_memory_usage),
        "peak": control.process_peak(0) - held,
    }


if __name__ == "__main__":
    main()

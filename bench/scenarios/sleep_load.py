"""Load weights in vLLM's sleep-mode pool, and print the device's memory meanwhile.

Runs with the vLLM and PyTorch of the interpreter that it is called with, on a GPU or
on the virtual device, and needs nothing else of this project:

    python bench/scenarios/sleep_load.py experts --free 8GiB

TRACES are conversions as allocation sizes, through vLLM's own
process_weights_after_loading. MODELS are configurations with dummy weights, through
vLLM's own worker and loader. One JSON object goes to stdout, after "RESULT ":

    outcome   "loaded", or the error's type; then also "error"
    live      bytes of tensors at the end
    needed    the most that tensors held at any one moment, in bytes: no allocator can
              load with less
    peak      the most that the device lent to this process meanwhile, in bytes
    seconds   duration of the load
    after     bytes the device lends to this process after the load
    reserved  bytes that PyTorch says it holds after the load
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 2**20


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"a size like 8GiB is needed, not '{text}'")
    units = {None: 1, "B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30}
    return int(float(match[1]) * units[match[2]])


Empty = Callable[[int], Any]  # a tensor of that many bytes
Convert = Callable[[Empty], list[Any]]  # allocates like a conversion; new weights


def churn() -> Iterator[tuple[list[int], Convert]]:
    """Transients of varied size next to small weights that stay (vllm #43951)."""
    for i in range(24):

        def convert(empty: Empty, i: int = i) -> list[Any]:
            transient = empty(1900 * MIB - i * 40 * MIB + i % 3 * 90 * MIB)
            weights = [empty(100 * MIB)]
            del transient
            return weights

        yield [100 * MIB], convert


def growing() -> Iterator[tuple[list[int], Convert]]:
    """Every transient is larger than the one before, so no cached block fits."""
    for i in range(40):

        def convert(empty: Empty, i: int = i) -> list[Any]:
            transient = empty(1000 * MIB + i * 70 * MIB)
            weights = [empty(90 * MIB), empty(3 * MIB)]
            del transient
            return weights

        yield [90 * MIB, 3 * MIB], convert


def experts() -> Iterator[tuple[list[int], Convert]]:
    """A mixture of experts, shuffled and relaid one expert at a time, then stacked.

    The list-and-stack pattern of FlashInfer's TRT-LLM layouts (vllm #43951, #52511):
    an expert is copied twice, the second copy is kept, and all are stacked. The
    second half of the layers has fewer and larger experts, so that the pieces that
    the first half left in the pool are of no use to it.
    """
    for i in range(16):
        number, expert = (128, 12 * MIB) if i < 8 else (48, 32 * MIB)

        def convert(empty: Empty, number: int = number, expert: int = expert) -> Any:
            pieces = []
            for _ in range(number):
                shuffled = empty(expert)
                pieces.append(empty(expert))
                del shuffled
            return [empty(number * expert)]

        yield [number * expert], convert


TRACES = {"churn": churn, "growing": growing, "experts": experts}

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    # Marlin repacks the experts of each layer, and pads them: 1312 is no multiple of
    # its tile (vllm #48680).
    "nvfp4": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1312,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head", "*gate", "*self_attn*"],
        },
    },
}


def load_trace(name: str, requested: int | None, watch: Watch) -> Any:
    import torch
    from vllm.config import ModelConfig
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    device = torch.device("cuda", 0)

    def empty(bytes_: int) -> Any:
        tensor = torch.empty(bytes_, dtype=torch.uint8, device=device)
        watch.look()
        return tensor

    def parameters(weights: list[Any]) -> torch.nn.ParameterList:
        return torch.nn.ParameterList(
            torch.nn.Parameter(weight, requires_grad=False) for weight in weights
        )

    class Trace(QuantizeMethodBase):
        def __init__(self, convert: Convert) -> None:
            self.convert = convert

        def create_weights(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError

        def apply(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: Any) -> None:
            for i, weight in enumerate(self.convert(empty)):
                layer.register_parameter(f"weight{i}", parameters([weight])[0])

    def module(sizes: list[int], convert: Convert) -> torch.nn.Module:
        layer = torch.nn.Module()
        for i, bytes_ in enumerate(sizes):
            layer.register_parameter(f"weight{i}", parameters([empty(bytes_)])[0])
        layer.quant_method = Trace(convert)
        return layer

    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig(model=write("dense", folder), skip_tokenizer_init=True)
    allocator = get_mem_allocator_instance()
    if requested is not None:
        free, _ = torch.cuda.mem_get_info()
        allocator.unrequested_memory = free - requested
    # As the worker has it while loading.
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    with watch, allocator.use_memory_pool("weights"):
        model = torch.nn.Sequential(*(module(*m) for m in TRACES[name]()))
        process_weights_after_loading(model, config, device)
    return model


def load_model(name: str, requested: int | None, watch: Watch) -> Any:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port
    from vllm.v1.worker.gpu_worker import Worker

    free, total = torch.cuda.mem_get_info()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineArgs(
            model=write(name, folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            enforce_eager=True,
            max_model_len=2048,
            attention_backend="TRITON_ATTN",
            moe_backend="marlin" if name == "nvfp4" else "auto",
            gpu_memory_utilization=(requested or free - 64 * MIB) / total,
        ).create_engine_config()
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    with set_current_vllm_config(config):
        worker = Worker(config, 0, 0, address, is_driver_worker=True)
        worker.init_device()
        with watch:
            worker.load_model()
    return worker


def write(name: str, folder: str) -> str:
    (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
    return folder


class Watch:
    """The most that the device lends from here on, and how long the context lasts."""

    peak = 0
    seconds = 0.0

    def __init__(self) -> None:
        import torch

        self._free = torch.cuda.mem_get_info
        self._before = self._free()[0]
        self._base: int = torch.cuda.memory_allocated()
        self._held = torch.cuda.max_memory_allocated
        self._needed = 0
        self._control: Any = None
        self._lock = threading.Lock()
        # As device.py has it, which is not there where this runs as a file.
        if "VGPU_RUN" in os.environ and os.environ.get("ENVELOPE_METER") != "NVML":
            from vgpu import control

            control.reset_peak()
            self._used, self._control = control.used(), control
        self._reset = torch.cuda.reset_peak_memory_stats
        torch.cuda.reset_peak_memory_stats = self._keep_peak

    def _keep_peak(self, device: Any = None) -> None:
        """vLLM resets PyTorch's peak at the end of a load."""
        self._needed = self.needed() + self._base
        self._reset(device)

    def needed(self) -> int:
        return max(self._needed, int(self._held())) - self._base

    def lent(self) -> int:
        return int(self._before - self._free()[0])

    def __enter__(self) -> None:
        self._sampled = 0
        self._stop = self._sample() if self._control is None else self._counted
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.peak = self._stop()

    def _counted(self) -> int:
        return int(self._control.peak() - self._used)

    def look(self) -> None:
        """On a GPU there is no counter: ask for the memory lent now."""
        if self._control is None:
            with self._lock:
                self._sampled = max(self._sampled, self.lent())

    def _sample(self) -> Callable[[], int]:
        """Look every millisecond, too, which a busy machine may miss."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(0.001):
                self.look()

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()

        def stop() -> int:
            ended.set()
            thread.join()
            self.look()
            return self._sampled

        return stop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=[*TRACES, *MODELS])
    parser.add_argument(
        "--free", type=size, help="hold all device memory but this, e.g. 8GiB"
    )
    parser.add_argument(
        "--requested", type=size, help="memory that the instance may use (default: all)"
    )
    asked = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import torch

    if "VGPU_RUN" in os.environ:
        from bench.scenarios.on_the_host import inspect_models_here

        inspect_models_here()
    free, total = torch.cuda.mem_get_info()
    held = None
    if asked.free is not None:
        if asked.free > free:
            parser.error(f"--free {asked.free}: only {free} of {total} bytes are free")
        held = torch.empty(free - asked.free, dtype=torch.uint8, device="cuda")
    watch = Watch()
    base = torch.cuda.memory_allocated()
    load = load_trace if asked.case in TRACES else load_model
    result: dict[str, Any] = {"outcome": "loaded"}
    loaded = None
    try:
        loaded = load(asked.case, asked.requested, watch)
    except (RuntimeError, ValueError) as error:  # torch.OutOfMemoryError is the first
        result = {"outcome": type(error).__name__, "error": str(error)[:500]}
    gc.collect()
    torch.cuda.empty_cache()
    print(
        "RESULT "
        + json.dumps(
            result
            | {
                "live": torch.cuda.memory_allocated() - base,
                "needed": watch.needed(),
                "peak": watch.peak,
                "seconds": round(watch.seconds, 3),
                "after": watch.lent(),
                "reserved": torch.cuda.memory_reserved() - base,
            }
        ),
        flush=True,
    )
    del loaded, held


if __name__ == "__main__":
    main()

"""Start vLLM's engine as `vllm serve` would, with dummy weights, on the device that it
runs on: simulated_start.py runs it in the environment of the release.

The argument is a JSON object: "model" (a folder), "flags" (of `vllm serve`) and
"environment" (variables, read as vLLM is imported). Prints "PHASE name" as each begins
and ends with "RESULT" and one JSON object; sizes in bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import pickle
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bench.plan_watch import watch
from bench.scenarios.on_the_host import (
    compare_scales_on_host,
    count_repeats_on_host,
    index_chunks_on_host,
    inspect_models_here,
    own_process,
)
from bench.scenarios.result import print_result

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


TOLD = "PLAN_TOLD"
# Modules of FlashInfer.
SILENT = "rope", "sampling", "topk", "trtllm_comm", "trtllm_mnnvl_comm"


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ |= VARIABLES | asked.get("environment", {})
    result: dict[str, Any] = {"outcome": "started"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report, told = Path(folder, "report.json"), Path(folder, "told.json")
        os.environ["VLLM_STARTUP_MEMORY_REPORT"] = str(report)
        try:
            start(asked, result, told)
        except Exception as error:  # an outcome, not an accident
            result["outcome"] = type(error).__name__
            result["error"] = innermost(error)
            traceback.print_exc()  # for the log
        if told.exists():
            result = json.loads(told.read_text()) | result
        for name in report, report.with_name("report.json.rank0"):
            if name.exists():
                result["report"] = json.loads(name.read_text())
    result["seconds"] = time.perf_counter() - began
    print_result(result)


def start(asked: dict[str, Any], result: dict[str, Any], told: Path) -> None:
    print("PHASE imports", flush=True)
    own_process()
    arguments = parse([asked["model"], *asked["flags"]])
    if (arguments.data_parallel_size or 1) > 1:
        raise ValueError("the ranks of one engine are predicted, not several engines")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    result["version"] = importlib.import_module("vllm").__version__
    count_tokens(result)
    inspect_models_here()
    os.environ[TOLD] = str(told)
    change_worker(result)
    engine_args = AsyncEngineArgs.from_cli_args(arguments)
    made = engine_args.create_model_config()
    refuse_dropped(made, engine_args.hf_overrides)
    untie_as_the_checkpoint(made)
    engine_args.create_model_config = lambda: made
    engine = LLMEngine.from_engine_args(
        engine_args, usage_context=UsageContext.OPENAI_API_SERVER
    )
    result["model_type"] = engine.model_config.hf_config.model_type
    # --max-model-len auto is known after profiling alone.
    result["max_model_len"] = engine.model_config.max_model_len
    cache = engine.vllm_config.cache_config
    for key, name in {
        "kv_tokens": "kv_cache_size_tokens",
        "concurrency": "kv_cache_max_concurrency",
    }.items():
        if (counted := getattr(cache, name, None)) is not None:
            result[key] = counted


class Dropped(Exception):
    """vLLM would start with another model than the requested one, without a word."""


def refuse_dropped(made: Any, overrides: Any) -> None:
    """
    Raises:
        Dropped: vLLM's config of the model lacks what was asked for, or its
            quantization.
    """
    if isinstance(overrides, dict):
        configs = made.hf_config, made.hf_text_config
        if lines := list(dropped(*configs, overrides)):
            raise Dropped(f"--hf-overrides: {'; '.join(lines)}.")
    said = quantization_of(made.hf_config) or quantization_of(made.hf_text_config)
    if said and made.quantization is None:
        dtype = str(made.dtype).removeprefix("torch.")
        raise Dropped(
            f"vLLM knows no {said}, as the model's config has it. It starts with "
            f"weights in {dtype}, which the checkpoint "
            "does not have: give one in a format of vLLM's (`quant_method`), or a "
            "config without quantization."
        )


def quantization_of(config: Any) -> str:
    """What a config says of it, wherever checkpoints have it; empty: nothing."""
    for name in "quantization_config", "compression_config", "quantization":
        if isinstance(told := getattr(config, name, None), dict) and told:
            return f"{name} {json.dumps(told, default=str)[:300]}"
    return ""


def dropped(
    config: Any, text: Any, asked: dict[str, Any], inside: str = ""
) -> Iterator[str]:
    """Numbers that were asked for and that the config of a model does not take.
    `text` is its language model's, or the same."""
    for name, value in asked.items():
        inner = getattr(config, name, None)
        if isinstance(value, dict) and hasattr(inner, "model_type"):
            yield from dropped(inner, inner, value, f"{inside}{name}.")
        if type(value) not in (int, float):
            continue
        if inner is not None and inner != value:
            more = ""
            if name == "num_hidden_layers" and hasattr(config, "layers_block_type"):
                more = ", the length of layers_block_type: give a shorter list"
            yield f"{inside}{name} stays {inner} for {config.model_type}{more}"
        elif text is not config and not hasattr(type(config), name):
            kept = getattr(text, name, value)
            if kept != value:
                part = next(k for k, v in vars(config).items() if v is text)
                nested = json.dumps({part: {name: value}})
                yield f"{name} stays {kept} for {text.model_type}: write {nested}"


def change_worker(result: dict[str, Any]) -> None:
    watch(result, Path(os.environ[TOLD]))
    sample_without_kernels()
    change_loading()
    compare_scales_on_host()
    count_repeats_on_host()
    broadcast_objects_without_kernels()
    reduce_by_own_kernel()
    with contextlib.suppress(ModuleNotFoundError):  # releases without these layers
        index_chunks_on_host()


def change_loading() -> None:
    """Load dummies as a checkpoint is loaded."""
    quantize_without_weights()
    fill_without_copies()


def parse(flags: list[str]) -> Any:
    """What `vllm serve` makes of its arguments.

    Raises:
        ValueError: it refuses them.
    """
    # Its module differs between releases.
    for place in "common", "launchers", "openai":
        with contextlib.suppress(ModuleNotFoundError):
            cli = importlib.import_module(f"vllm.entrypoints.{place}.cli_args")
            break
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = cli.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = parser.parse_args(flags)
    except SystemExit:
        lines = said.getvalue().strip().splitlines()
        raise ValueError(lines[-1].partition("error: ")[2] or lines[-1]) from None
    if getattr(arguments, "model_tag", None) is not None:
        arguments.model = arguments.model_tag
    return arguments


def count_tokens(result: dict[str, Any]) -> None:
    """The engine's own count, as older releases have it in their log alone: hybrid
    models share blocks."""
    patterns = {
        "kv_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
        "concurrency": re.compile(r"per request: ([\d.,]+)x"),
    }

    def read(record: logging.LogRecord) -> bool:
        for key, pattern in patterns.items():
            if found := pattern.search(record.getMessage()):
                number = found[1].replace(",", "")
                result[key] = int(number) if key == "kv_tokens" else float(number)
        return True

    logger = logging.getLogger("vllm.v1.core.kv_cache_utils")
    logger.setLevel(logging.INFO)  # whatever VLLM_LOGGING_LEVEL is
    logger.addFilter(read)


def sample_without_kernels() -> None:
    """FlashInfer would compile its sampler, and its all-reduce of several ranks, in
    minutes, for kernels that do nothing here. Its memory is allocated by its Python,
    which runs as it is."""
    with contextlib.suppress(ImportError):
        from flashinfer.jit.core import JitSpec

        load = JitSpec.build_and_load

        def build_and_load(spec: Any, *args: Any, **options: Any) -> Any:
            if spec.name in SILENT:
                return Silent()
            return load(spec, *args, **options)

        JitSpec.build_and_load = build_and_load
    # The bindings of CUDA have a runtime linked into them, which does not start here.
    # FlashInfer sets the device by it, before it allocates what ranks share.
    for name in "cuda.bindings.runtime", "cuda.cudart":
        with contextlib.suppress(ImportError):
            set_device_by_torch(importlib.import_module(name))


def set_device_by_torch(bindings: Any) -> None:
    import torch

    def set_device(ordinal: int) -> tuple[Any]:
        torch.cuda.set_device(ordinal)
        return (bindings.cudaError_t.cudaSuccess,)

    bindings.cudaSetDevice = set_device


def quantize_without_weights() -> None:
    """GPTQ looks up in a checkpoint which layers are quantized. Where there is none,
    older releases quantize none: here all layers are, but no embedding and no head."""
    place = "vllm.model_executor.layers.quantization"
    utils = importlib.import_module(f"{place}.utils.gptq_utils")
    if utils.is_layer_gptq_quantized("", []):
        return
    for module, name in (
        ("auto_gptq", "AutoGPTQConfig"),
        ("gptq_marlin", "GPTQMarlinConfig"),
        ("gptq", "GPTQConfig"),
    ):
        with contextlib.suppress(ModuleNotFoundError):
            quantize_all(getattr(importlib.import_module(f"{place}.{module}"), name))


def quantize_all(config_class: Any) -> None:
    look_up = config_class.maybe_update_config

    def maybe_update_config(config: Any, *args: Any, **options: Any) -> None:
        look_up(config, *args, **options)
        config.modules_in_block_to_quantize = config.modules_in_block_to_quantize or [
            ".layers."
        ]

    config_class.maybe_update_config = maybe_update_config


def fill_without_copies() -> None:
    """Dummies of 8 bits are made from a copy of 16, which a checkpoint's weights are
    not, and those in pinned memory take that of the host: leave both as they are, as
    kernels compute nothing here."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    name = "initialize_single_dummy_weight"
    fill = getattr(weight_utils, name)

    def initialize(param: Any, *args: Any, **options: Any) -> None:
        copied = param.is_cuda and param.is_floating_point() and param.itemsize == 1
        if not (copied or param.is_pinned()):
            fill(param, *args, **options)

    for module in weight_utils, dummy_loader:
        if hasattr(module, name):
            setattr(module, name, initialize)


def untie_as_the_checkpoint(made: Any) -> None:
    """Where a config says that the head is tied to the embeddings, and its checkpoint
    has another, vLLM loads that. It looks up neither for dummies."""
    untie = getattr(made, "maybe_untie_word_embeddings", None)  # not in older releases
    tied = getattr(made.hf_config, "tie_word_embeddings", False)
    if untie and tied and has_own_head(Path(made.model)):
        untie()
        # Otherwise vLLM compares them once they are loaded: dummies are equal.
        made.word_embeddings_untied_by_checkpoint = False


def has_own_head(folder: Path) -> bool:
    """Whether a checkpoint has a head that is no copy of its embeddings."""
    import torch
    from safetensors import safe_open

    rows = 1 << 12
    with contextlib.ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for path in folder.glob("*.safetensors"):
            file = opened.enter_context(safe_open(path, "pt"))
            tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        head = next((name for name in tensors if name.endswith("lm_head.weight")), None)
        if head is None:
            return False
        own = tensors.pop(head)
        shape = own.get_shape()
        return not any(
            all(
                torch.equal(own[i : i + rows], other[i : i + rows])
                for i in range(0, shape[0], rows)
            )
            for other in tensors.values()
            if other.get_shape() == shape
        )


def broadcast_objects_without_kernels() -> None:
    """Over NCCL, PyTorch sums the sizes of the objects on the device, which computes
    nothing. Send them in a tensor of one size."""
    import torch
    from torch import distributed as dist

    room = 1 << 20
    broadcast = dist.broadcast_object_list

    def broadcast_object_list(
        objects: list[Any], src: Any = None, group: Any = None, **options: Any
    ) -> None:
        if dist.get_backend(group) != "nccl":
            broadcast(objects, src, group, **options)
            return
        told = pickle.dumps(objects)
        sent = torch.frombuffer(bytearray(told.ljust(room, b"\0")), dtype=torch.uint8)
        tensor = sent.cuda()
        options.pop("device", None)
        dist.broadcast(tensor, src, group, **options)
        objects[:] = pickle.loads(tensor.cpu().numpy().tobytes())

    dist.broadcast_object_list = broadcast_object_list


def reduce_by_own_kernel() -> None:
    """GPUs with multicast reach each other, so vLLM has its own all-reduce there: one
    node of a graph, where the next best is three. Virtual GPUs do not reach each other.
    Its buffers are allocated as on a GPU, and no rank sees another's."""
    import torch
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    own = custom_all_reduce.CustomAllreduce
    platform = type(custom_all_reduce.current_platform)
    initialize = own.__init__

    def yes(*_: Any) -> bool:
        return True

    def initialize_reached(*args: Any, **options: Any) -> None:
        here = torch.cuda.current_device()
        if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, here):
            initialize(*args, **options)
            return
        with (
            mock.patch.object(custom_all_reduce, "_can_p2p", yes),
            mock.patch.object(platform, "is_fully_connected", yes),
        ):
            initialize(*args, **options)

    def create_shared_buffer(size: int, group: Any, **_: Any) -> list[int]:
        place = CudaRTLibrary().cudaMalloc(size).value
        return [place] * torch.distributed.get_world_size(group)

    own.__init__ = initialize_reached
    own.create_shared_buffer = staticmethod(create_shared_buffer)
    own.register_graph_buffers = lambda _: None


class Silent:
    """A compiled module whose functions launch a kernel and return nothing. A graph of
    several ranks has one for each all-reduce, and memory for it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self.launch

    @staticmethod
    def launch(*_: Any) -> None:
        import torch

        torch.cuda._sleep(0)


def innermost(error: BaseException) -> str:
    """What it says, in one line."""
    text = str(error) or type(error).__name__
    return re.sub(r"\s+", " ", text)[:2000]


if __name__ == "__main__":
    main()
elif TOLD in os.environ:  # a worker, which imports what started it
    change_worker({})

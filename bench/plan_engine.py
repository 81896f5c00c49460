"""Start vLLM's engine as `vllm serve` would, with dummy weights, on the device that it
runs on: foresee.py runs it in the environment of the release.

The argument is a JSON object: "model" (a folder), "flags" (of `vllm serve`) and
"environment" (variables, read as vLLM is imported). Prints "PHASE name" as each begins
and ends with "RESULT" and one JSON object; sizes in bytes.
"""

from __future__ import annotations

import contextlib
import gc
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

from bench.scenarios.on_the_host import (
    index_chunks_on_host,
    inspect_models_here,
    own_process,
)

PHASES = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "profiling",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "warming up",
}
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


TOLD = "PLAN_TOLD"
# Modules of FlashInfer.
SILENT = "sampling", "topk", "trtllm_comm", "trtllm_mnnvl_comm"


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
    print("RESULT " + json.dumps(result), flush=True)


def start(asked: dict[str, Any], result: dict[str, Any], told: Path) -> None:
    print("PHASE imports", flush=True)
    own_process()
    arguments = parse([asked["model"], *asked["flags"]])
    if (arguments.data_parallel_size or 1) > 1:
        raise ValueError("the ranks of one engine are foreseen, not several engines")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    result["version"] = importlib.import_module("vllm").__version__
    count_tokens(result)
    inspect_models_here()
    os.environ[TOLD] = str(told)
    change_worker(result)
    engine_args = AsyncEngineArgs.from_cli_args(arguments)
    engine = LLMEngine.from_engine_args(
        engine_args, usage_context=UsageContext.OPENAI_API_SERVER
    )
    result["model_type"] = engine.model_config.hf_config.model_type


def change_worker(result: dict[str, Any]) -> None:
    watch(result, Path(os.environ[TOLD]))
    sample_without_kernels()
    broadcast_objects_without_kernels()
    with contextlib.suppress(ModuleNotFoundError):  # releases without these layers
        index_chunks_on_host()


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


def watch(result: dict[str, Any], told: Path) -> None:
    """Note what the first worker measures while it starts. Of several ranks it is a
    process of its own, and writes that to a file."""
    from vllm.v1.worker import gpu_worker

    worker_class = gpu_worker.Worker

    def begin(name: str, after: Callable[[Any, Any], None] | None) -> None:
        method = getattr(worker_class, name)

        def phase(worker: Any, *args: Any, **options: Any) -> Any:
            if worker.rank > 0:
                return method(worker, *args, **options)
            print(f"PHASE {PHASES[name]}", flush=True)
            result["phase"] = PHASES[name]
            try:
                done = method(worker, *args, **options)
            except Exception as error:
                if name == "load_model":
                    result.update(weights_of(worker.vllm_config, error))
                if worker.parallel_config.world_size > 1:
                    told.write_text(json.dumps(result))
                raise
            if after is not None:
                after(worker, done)
            if worker.parallel_config.world_size > 1:
                told.write_text(json.dumps(result | {"outcome": "started"}))
            return done

        setattr(worker_class, name, phase)

    def device(worker: Any, _: Any) -> None:
        now = worker.init_snapshot
        config = worker.vllm_config
        result["total"] = now.total_memory
        result["free"] = now.free_memory
        result["non_torch_before"] = now.non_torch_memory
        result["requested"] = int(worker.requested_memory)
        result["max_model_len"] = config.model_config.max_model_len
        result["max_num_seqs"] = config.scheduler_config.max_num_seqs
        result["max_num_batched_tokens"] = (
            config.scheduler_config.max_num_batched_tokens
        )
        result["v2"] = bool(getattr(worker, "use_v2_model_runner", False))
        result["device"] = str(worker.device)

    def loaded(worker: Any, _: Any) -> None:
        result["weights"] = int(worker.model_runner.model_memory_usage)
        result["weights_fp8"] = in_eight_bits(worker.get_model())
        result["attention"] = backends(worker)

    profiles: list[Any] = []

    def profiled(worker: Any, available: Any) -> None:
        result["kv_available"] = int(available)
        for profile in profiles[:1]:  # none with --kv-cache-memory-bytes
            # The worker may have corrected it since it was measured.
            result["activations"] = int(profile.torch_peak_increase)
            result["non_torch"] = int(profile.non_torch_increase)
            after = profile.after_profile
            held = getattr(after, "torch_allocated", None)  # not before 0.23
            peak = result["activations"]
            if held is not None:
                peak = after.torch_peak - held
            result["peak_activations"] = int(peak)
        result["graphs_estimated"] = int(
            getattr(worker, "cudagraph_memory_estimate", 0)
        )

    def allocated(worker: Any, _: Any) -> None:
        kv = worker.model_runner.kv_cache_config
        sizes = [tensor.size for tensor in kv.kv_cache_tensors]
        # Since 0.31.0 all lie in one allocation, of which each tells the size.
        shared = any(hasattr(tensor, "layers") for tensor in kv.kv_cache_tensors)
        result["kv_cache"] = max(sizes) if shared else sum(sizes)
        result["blocks"] = kv.num_blocks

    def ready(worker: Any, _: Any) -> None:
        result.update(account(worker.init_snapshot, result))
        if "VGPU_RUN" in os.environ:
            from vgpu import control

            result["peak"] = control.process_peak(worker.device.index)

    after = {
        "init_device": device,
        "load_model": loaded,
        "determine_available_memory": profiled,
        "initialize_from_config": allocated,
        "compile_or_warm_up_model": ready,
    }
    for name in PHASES:
        begin(name, after.get(name))

    profiling = gpu_worker.memory_profiling

    @contextlib.contextmanager
    def measured(*args: Any, **options: Any) -> Iterator[Any]:
        with profiling(*args, **options) as profile:
            profiles.append(profile)
            yield profile

    gpu_worker.memory_profiling = measured
    with contextlib.suppress(ImportError):  # ours has a module for it
        from vllm.v1.worker import explicit_kv_cache

        explicit_kv_cache.memory_profiling = measured
    for runner in runners():
        record_capture(runner, result)


def weights_of(config: Any, error: BaseException) -> dict[str, int]:
    """What the parameters of a model take that did not fit, as they are and in 8 bits;
    empty: nobody knows."""
    import torch

    traceback.clear_frames(error.__traceback__)  # they hold what was loaded
    gc.collect()
    torch.accelerator.empty_cache()
    with contextlib.suppress(Exception):
        from vllm.model_executor.model_loader.utils import initialize_model

        dtype = torch.get_default_dtype()
        config.compilation_config.static_forward_context.clear()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                model = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(dtype)
        return {
            "weights": sum(int(parameter.nbytes) for parameter in model.parameters()),
            "weights_fp8": in_eight_bits(model),
        }
    return {}


def in_eight_bits(model: Any) -> int:
    """Bytes that its parameters take with --quantization fp8, which leaves embeddings,
    the head and what is no matrix as they are."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )

    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)  # the head is one, too
        for parameter in module.parameters()
    }
    return sum(
        int(parameter.nbytes)
        if parameter.dim() < 2 or id(parameter) in kept
        else int(parameter.numel())
        for parameter in model.parameters()
    )


def account(first: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Where the memory went, in the form of VLLM_STARTUP_MEMORY_REPORT, which the
    official release does not have."""
    import torch

    torch.accelerator.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    consumed = first.free_memory - free
    torch_consumed = torch.cuda.memory_reserved() - first.torch_memory
    graphs, graphs_torch = (
        result.get(key, 0) for key in ("cuda_graphs", "cuda_graphs_torch")
    )
    known = result["weights"] + result["kv_cache"] + graphs_torch
    in_use = {
        "weights": result["weights"],
        "kv_cache": result["kv_cache"],
        "cuda_graphs": graphs,
        "other_torch": torch_consumed - known,
        "outside_torch": consumed - torch_consumed - (graphs - graphs_torch),
    }
    set_aside = {"peak_activations": result.get("peak_activations", 0)}
    left = result["requested"] - consumed - sum(set_aside.values())
    return {"in_use": in_use, "set_aside": set_aside, "left": left}


def count_tokens(result: dict[str, Any]) -> None:
    """The engine's own count, from its log: hybrid models share blocks."""
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

    logging.getLogger("vllm.v1.core.kv_cache_utils").addFilter(read)


def runners() -> Iterator[Any]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    yield GPUModelRunner
    with contextlib.suppress(ModuleNotFoundError):
        yield importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner


def record_capture(runner: Any, result: dict[str, Any]) -> None:
    import torch

    capture = runner.capture_model

    def capturing(self: Any, **options: bool) -> int:
        print("PHASE CUDA graphs", flush=True)
        torch.accelerator.empty_cache()
        before = torch.cuda.memory_reserved()
        taken = int(capture(self, **options) or 0)
        torch.accelerator.empty_cache()
        if not options.get("profile_only"):
            result["cuda_graphs"] = taken
            result["cuda_graphs_torch"] = min(
                taken, torch.cuda.memory_reserved() - before
            )
        return taken

    runner.capture_model = capturing


def backends(worker: Any) -> list[str]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    found = set()
    for layer in layers:
        if hasattr(layer, "get_attn_backend"):
            with contextlib.suppress(Exception):
                found.add(layer.get_attn_backend().get_name())
    return sorted(found)


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

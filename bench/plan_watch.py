"""What the first worker of plan_engine.py measures while it starts."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.scenarios.wrap import wrap
from vgpu import control

PHASES = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "profiling",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "warming up",
    "extend_kv_cache": "KV cache",
}


def watch(result: dict[str, Any], told: Path) -> None:
    """Note the measurements of the first worker. Of several ranks it is a process of
    its own, and writes them to a file."""
    from vllm.v1.worker import gpu_worker

    measured = Measured(result)
    after: dict[str, Callable[[Any, Any], None]] = {
        "init_device": measured.device,
        "load_model": measured.weights,
        "determine_available_memory": measured.profile,
        "initialize_from_config": measured.kv_cache,
        "compile_or_warm_up_model": measured.whole,
    }
    if hasattr(gpu_worker.Worker, "extend_kv_cache"):  # not in the release
        after["extend_kv_cache"] = measured.extended
    for name, note in after.items():
        watch_phase(gpu_worker.Worker, name, note, result, told)
    profiling = measured.profiling(gpu_worker.memory_profiling)
    gpu_worker.memory_profiling = profiling
    with contextlib.suppress(ImportError):  # patched has a module for it
        from vllm.v1.worker import explicit_kv_cache

        explicit_kv_cache.memory_profiling = profiling
    for runner in runners():
        record_capture(runner, result)


def watch_phase(
    owner: Any,
    name: str,
    note: Callable[[Any, Any], None],
    result: dict[str, Any],
    told: Path,
) -> None:
    """Print that a phase of the first worker begins, and `note` its result."""

    def wrapper(method: Any) -> Any:
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
            note(worker, done)
            if worker.parallel_config.world_size > 1:
                told.write_text(json.dumps(result | {"outcome": "started"}))
            return done

        return phase

    wrap(owner, name, wrapper)


class Measured:
    """Fills in the result, after each phase."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self.profiles: list[Any] = []  # none with --kv-cache-memory-bytes
        self.held = 0

    def device(self, worker: Any, _: Any) -> None:
        now = worker.init_snapshot
        model = worker.vllm_config.model_config
        scheduler = worker.vllm_config.scheduler_config
        self.result |= {
            "total": now.total_memory,
            "free": now.free_memory,
            "non_torch_before": now.non_torch_memory,
            "requested": int(worker.requested_memory),
            "max_model_len": model.max_model_len,
            "quantization": model.quantization,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "v2": bool(getattr(worker, "use_v2_model_runner", False)),
            "device": str(worker.device),
        }
        if "VGPU_RUN" in os.environ:
            self.held = control.process_used(worker.device.index)

    def weights(self, worker: Any, _: Any) -> None:
        self.result["weights"] = int(worker.model_runner.model_memory_usage)
        self.result["weights_fp8"] = in_eight_bits(worker.get_model())
        self.result["attention"] = backends(worker)
        if "VGPU_RUN" in os.environ:
            peak = control.process_peak(worker.device.index)
            self.result["loading_peak"] = peak - self.held

    def profiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def measured(*args: Any, **options: Any) -> Iterator[Any]:
            with original(*args, **options) as profile:
                self.profiles.append(profile)
                yield profile

        return measured

    def profile(self, worker: Any, available: Any) -> None:
        self.result["kv_available"] = int(available)
        for profile in self.profiles[:1]:
            # The worker may have corrected it since it was measured.
            self.result["activations"] = int(profile.torch_peak_increase)
            self.result["non_torch"] = int(profile.non_torch_increase)
            after = profile.after_profile
            held = getattr(after, "torch_allocated", None)  # not before 0.23
            peak = self.result["activations"]
            if held is not None:
                peak = after.torch_peak - held
            self.result["peak_activations"] = int(peak)
        self.result["graphs_estimated"] = int(
            getattr(worker, "cudagraph_memory_estimate", 0)
        )

    def kv_cache(self, worker: Any, _: Any) -> None:
        kv = worker.model_runner.kv_cache_config
        sizes = [tensor.size for tensor in kv.kv_cache_tensors]
        # Since 0.31.0 all lie in one allocation, of which each tells the size.
        shared = any(hasattr(tensor, "layers") for tensor in kv.kv_cache_tensors)
        self.result["kv_cache"] = max(sizes) if shared else sum(sizes)
        self.result["blocks"] = kv.num_blocks

    def extended(self, worker: Any, _: Any) -> None:
        """The KV cache has its size when all else is there."""
        report = worker.startup_memory.report
        self.result |= {
            "kv_available": int(worker.available_kv_cache_memory_bytes),
            "kv_cache": int(report.kv_cache),
            "kv_cache_in_torch": False,
            "blocks": int(report.kv_cache_blocks),
            "activations": int(report.peak_activations),
            "peak_activations": int(report.peak_activations),
        }
        self.whole(worker, None)

    def whole(self, worker: Any, _: Any) -> None:
        self.result.update(account(worker.init_snapshot, self.result))
        if "VGPU_RUN" in os.environ:
            self.result["peak"] = control.process_peak(worker.device.index)


def weights_of(config: Any, error: BaseException) -> dict[str, int]:
    """What the parameters of a model take that did not fit, as they are and in 8 bits;
    empty: nobody knows."""
    import torch

    traceback.clear_frames(error.__traceback__)  # they hold loaded tensors
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
    the head and all but matrices as they are."""
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
    if not result.get("kv_cache_in_torch", True):
        torch_consumed += result["kv_cache"]
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


def runners() -> Iterator[Any]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    yield GPUModelRunner
    with contextlib.suppress(ModuleNotFoundError):
        yield importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner


def record_capture(runner: Any, result: dict[str, Any]) -> None:
    import torch

    def wrapper(capture: Any) -> Any:
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

        return capturing

    wrap(runner, "capture_model", wrapper)


def backends(worker: Any) -> list[str]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    found = set()
    for layer in layers:
        if hasattr(layer, "get_attn_backend"):
            with contextlib.suppress(Exception):
                found.add(layer.get_attn_backend().get_name())
    return sorted(found)

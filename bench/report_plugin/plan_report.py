"""A plugin of vLLM's for ``make plan REPORT=``: VLLM_STARTUP_MEMORY_REPORT also says
what starts the same again elsewhere, with dummy weights.

With this folder on PYTHONPATH, vLLM finds it. It needs nothing else of the project.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

# The memory of a start depends on them.
VARIABLES = (
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_V2_MODEL_RUNNER",
)


def install() -> None:
    """Add "start" and "card" to the reports of this process's worker."""
    if not os.environ.get("VLLM_STARTUP_MEMORY_REPORT"):
        return
    from vllm.v1.worker.startup_memory import StartupMemory

    begin = StartupMemory.__init__

    @wraps(begin)
    def described(self: Any, worker: Any) -> None:
        begin(self, worker)
        start, as_dict = describe_start(worker.vllm_config), self.report.as_dict

        def as_described() -> Any:
            if has_tied_again(worker):
                start["model"]["tie_word_embeddings"] = True
            return as_dict() | {"start": start, "card": describe_card(worker.device)}

        self.report.as_dict = as_described

    StartupMemory.__init__ = described


def has_tied_again(worker: Any) -> bool:
    """Whether the head shares the memory of the embeddings, of which it is a copy. The
    config says no more that it is tied, as the checkpoint has one."""
    model = getattr(worker.model_runner, "model", None)
    if model is None or not worker.model_config.word_embeddings_untied_by_checkpoint:
        return False
    return not any("lm_head" in name for name, _ in model.named_parameters())


def describe_start(config: Any) -> dict[str, Any]:
    """The version, flags as they were resolved, and the model's config, of a
    `VllmConfig`. No names, paths or tokens."""
    from vllm.version import __version__

    model, cache = config.model_config, config.cache_config
    scheduler, parallel = config.scheduler_config, config.parallel_config
    options = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "gpu_memory_limit_bytes": cache.gpu_memory_limit_bytes,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "kv_cache_dtype": cache.cache_dtype,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "fragmentation_buffer_bytes": cache.fragmentation_buffer_bytes,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enforce_eager": bool(model.enforce_eager),
        "enable_sleep_mode": bool(model.enable_sleep_mode),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
    }
    # The quantization of a checkpoint is in its config.
    model_config = without_names(model.hf_config.to_dict())
    if "quantization_config" not in model_config:
        options["quantization"] = model.quantization
    if not model.enforce_eager:
        sizes = config.compilation_config.cudagraph_capture_sizes
        options["cudagraph_capture_sizes"] = sizes
    return {
        "vllm": __version__,
        "options": {key: value for key, value in options.items() if value is not None},
        "environment": {
            name: os.environ[name] for name in VARIABLES if name in os.environ
        },
        "model": model_config,
    }


def without_names(value: Any) -> Any:
    """Of a model's config, what cannot say whose it is or where it lies."""
    if isinstance(value, dict):
        return {
            str(key): without_names(item)
            for key, item in value.items()
            if not str(key).endswith("name_or_path") and key != "auto_map"
        }
    if isinstance(value, (list, tuple)):
        return [without_names(item) for item in value]
    if isinstance(value, (int, float, type(None))):
        return value
    text = str(value).removeprefix("torch.")
    return None if text.startswith(("/", "~")) else text


def describe_card(device: Any) -> dict[str, int | str]:
    """Properties that vLLM chooses kernels and sizes by, of a CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "shared_optin": properties.shared_memory_per_block_optin,
        "shared_per_sm": properties.shared_memory_per_multiprocessor,
        "l2_bytes": properties.L2_cache_size,
        "integrated": bool(properties.is_integrated),
    }

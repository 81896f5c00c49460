"""Replace what vLLM reads back from a kernel, or starts a process for, in a start."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


def compute_on_host(model: dict[str, Any], llm: dict[str, Any]) -> None:
    """What an engine of this model's configuration, and with these arguments of LLM,
    reads back from kernels."""
    if "linear_num_value_heads" in model.get("text_config", model):
        index_chunks_on_host()
        convolve_lengths_of_host()
    if llm.get("enable_lora"):
        count_unique_on_host()
    if llm.get("speculative_config", {}).get("method") == "ngram":
        accept_drafts()


def index_chunks_on_host() -> None:
    """Compute lengths of sequences on the host: lists have sizes that a kernel
    computes.

    Raises:
        ModuleNotFoundError: the release has no gated delta nets.
    """
    try:
        index = importlib.import_module(
            "vllm.third_party.flash_linear_attention.ops.index"
        )
    except ModuleNotFoundError:  # where older releases have it
        index = importlib.import_module("vllm.model_executor.layers.fla.ops.index")
    name_of = "prepare_chunk_indices"
    prepare = getattr(index, name_of)

    def exact(cu_seqlens: Any, chunk_size: int) -> Any:
        return prepare(cu_seqlens.cpu(), chunk_size).to(cu_seqlens.device)

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(name_of) is prepare:
            vars(module)[name_of] = exact


def convolve_lengths_of_host() -> None:
    """Compute the programs of a convolution without metadata on the host, as they are
    with it. Qwen's warm-up has one, of a length that a kernel computes: its lists had
    the size of whatever is in that memory."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    convolve = causal_conv1d.causal_conv1d_fn

    def exact(*arguments: Any, **options: Any) -> Any:
        call = inspect.signature(convolve).bind(*arguments, **options).arguments
        if call.get("metadata") is None:
            at = call["query_start_loc"]
            programs = compute_causal_conv1d_metadata(at.cpu(), device=at.device)
            names = ("nums_dict", "batch_ptr", "token_chunk_offset_ptr")
            call["metadata"] = SimpleNamespace(
                **dict(zip(names, programs, strict=True))
            )
        return convolve(**call)

    causal_conv1d.causal_conv1d_fn = exact


def accept_drafts() -> None:
    """Accept a random number of each request's drafts (V1): no kernel says how many.

    Every token is 7, as those of the prompts, so that n-grams are found again.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rng = random.Random(0)

    def accepted(
        output_token_ids: Any,
        vocab_size: int,
        discard_req_indices: Sequence[int] = (),
        logprobs_tensors: Any = None,
    ) -> tuple[list[list[int]], None]:
        requests, most = output_token_ids.shape
        tokens = [[7] * rng.randint(1, most) for _ in range(requests)]
        for discarded in discard_req_indices:
            tokens[discarded] = []
        return tokens, None

    def no_drafts(runner: Any, sampled_token_ids: Any) -> list[list[int]]:
        return [[7] for _ in range(len(sampled_token_ids))]

    RejectionSampler.parse_output = staticmethod(accepted)
    GPUModelRunner._to_list = no_drafts


def inspect_models_here() -> None:
    """Inspect models in this process, not in one that imports all of vLLM again."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def warm_up_few_batches() -> None:
    """In tests, compile an expert router's GEMM for the batches of their starts alone.

    vLLM compiles one for each of 1 to 16 tokens, more than half of such a start. One
    that is missing is compiled as it is called.
    """
    if "WARM_UP_FEW_BATCHES" not in os.environ:
        return
    from vllm.model_executor.warmup import kernel_warmup

    kernel_warmup._LL_BF16_WARMUP_M_RANGE = (1, 2, 4)


def count_unique_on_host() -> None:
    """LoRA takes the size of a tensor from what torch.unique counts on the device, and
    loading experts in NVFP4 asks whether there is one value."""
    import torch

    unique = torch.unique

    def counted(tensor: Any, *args: Any, **options: Any) -> Any:
        found = unique(tensor.cpu(), *args, **options)
        if isinstance(found, torch.Tensor):
            return found.to(tensor.device)
        return tuple(each.to(tensor.device) for each in found)

    torch.unique = counted


def compare_scales_on_host() -> None:
    """Compare the scales of an FP8 KV cache on the host. Without a checkpoint, they are
    -1, for which vLLM takes 1."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    process = BaseKVCacheMethod.process_weights_after_loading

    def exact(method: Any, layer: Any) -> None:
        for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            if hasattr(layer, name):
                setattr(layer, name, on_host(getattr(layer, name)))
        process(method, layer)

    BaseKVCacheMethod.process_weights_after_loading = exact


def on_host(parameter: Any) -> Any:
    import torch

    return torch.nn.Parameter(parameter.detach().cpu(), requires_grad=False)


def count_repeats_on_host() -> None:
    """Sum on the host how often a tensor is repeated: it gives the size of a tensor."""
    import torch

    repeat = torch.Tensor.repeat_interleave

    def counted(tensor: Any, repeats: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(repeats, torch.Tensor):
            if repeats.numel() > 1:
                options.setdefault("output_size", int(repeats.cpu().sum()))
            else:
                repeats = int(repeats)
        return repeat(tensor, repeats, *rest, **options)

    torch.Tensor.repeat_interleave = counted


def own_process() -> None:
    """Say that this process is one as vLLM makes for its workers."""
    with contextlib.suppress(ImportError, AttributeError):  # stock vLLM has none
        from vllm.device_allocator import alloc_conf

        alloc_conf.own_process()

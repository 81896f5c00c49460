"""Start an engine on the device it runs on, and say in one JSON line what happened.

The argument is a JSON object; DEFAULTS lists its keys.

One file, however long: each key of a case is read here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.scenarios import block_ids, observe
from bench.scenarios.loads import with_image, with_sound
from bench.scenarios.on_the_host import (
    compute_on_host,
    inspect_models_here,
    own_process,
    warm_up_few_batches,
)
from bench.scenarios.result import print_result
from bench.scenarios.wrap import wrap

DEFAULTS: dict[str, Any] = {
    "model": "dense",
    "v2": True,
    "graphs": False,
    "compile": False,
    "sleep": 0,  # level
    "refused": "",  # the call of the driver that fails, as where it cannot map memory
    "greedy": False,  # another process takes all that is free after the start
    "warm_again": 0,  # how often it warms up again, as after new weights
    "generate": 0,  # tokens
    "beyond": False,  # then name a block that is not there: see block_ids.py
    # Serve the largest batches within the request, or with so many bytes left, or
    # "alone": nobody else takes the rest.
    "serve": False,
    "context": 0,  # what one takes of the device: it is no part of a request
    "held": 0,  # what another process holds before the start
    "neighbour": 0,  # what another process of the run (or container) holds
    "free": 0,  # what another process leaves, if given
    "moved": "",  # what another process takes or releases as a phase begins
    "moved_at": "profile",  # the phase
    "moment": "",  # when another process holds memory: see observe.hold_for_a_moment
    "moment_holds": 0,  # how much, in bytes; below 0: all but so much
    "profiles": 1,  # how often memory is profiled
    "details": False,  # of the time of a start
    "report": False,  # the worker's memory report is wanted
    "draft": 0,  # tokens that an EAGLE head of the model proposes
    "tensors": 0,  # bytes of the caller's own tensors before the start
    "thread": 0,  # bytes that another thread allocates and frees meanwhile
    "beside": {},  # the case of an engine that is started first in the process
    "caller": False,  # somebody else allocates in the engine's process
    "asleep": 0,  # the sleep level of that engine while this one starts; 0: awake
    # What a tactic asks FlashInfer's autotuner for, in bytes: {"transient", "kept"}.
    "flashinfer_tactic": {},
    "graph_support": "",  # attention's support of CUDA graphs (AttentionCGSupport)
    "workspace": 0,  # bytes of attention's metadata builder after a batch
    "folder": "",  # where the model is written: a key of compile caches
    "environment": {},  # variables; some are read by imports (see start_each.py)
    "llm": {},  # further arguments of LLM
}
ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.5,
    "attention_backend": "TRITON_ATTN",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "seed": 0,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}
HELD: list[Any] = []  # tensors and a process that live as long as this process


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ |= asked.get("environment", {})
    from bench.scenarios import device

    if not asked.get("details"):  # watching takes time
        device.watch_peak()
    result: dict[str, Any] = {"outcome": "started"}
    benchmarked = observe.time_benchmarks()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        if asked.get("report"):
            os.environ["VLLM_STARTUP_MEMORY_REPORT"] = str(report)
        try:
            run(asked, result)
        except Exception as error:  # an outcome, not an accident
            result["outcome"] = type(error).__name__
            result["error"] = str(error)[:2000]
        if report.exists():
            result["report"] = json.loads(report.read_text())
    result["least_available"] = device.least_available()
    result["processor_seconds"] = time.process_time() - benchmarked[0]
    result["peak"] = device.peak()
    peak = result.pop("start_peak", device.process_peak())
    result["process_peak"] = peak - result.get("before", 0)
    if asked.keys() & {"moved", "held", "greedy", "serve"} and device.VIRTUAL:
        from vgpu import control

        control.other_process(-control.other())  # or the next start has less memory
    print_result(result)


def run(asked: dict[str, Any], result: dict[str, Any]) -> None:
    """Start the engine of the case. `result` has the process's memory "before" the
    engine; "process_peak" does not include it."""
    if call := asked.get("refused"):
        from vgpu import control

        control.inject(call, error="not_supported", times=10**9)
    first = beside(asked, result)
    try:
        llm = engine(asked, result)
    finally:
        if first:
            result["lost"] = lost(first)
    if asked.get("greedy"):
        from vgpu import control

        control.other_process(control.available())
    for _ in range(asked.get("warm_again", 0)):
        llm.collective_rpc("compile_or_warm_up_model")
    if tokens := asked.get("generate"):
        result["tokens"] = generate(llm, tokens)
    if asked.get("beyond"):
        llm.collective_rpc(block_ids.pretend_only_one)
        try:
            generate(llm, 1)
        except AssertionError as error:
            result["beyond"] = str(error)
    if asked.get("serve"):
        from bench.scenarios import device

        result["start_peak"] = device.process_peak()
        left = asked["serve"]
        if left is True:
            before = result["before" if device.VIRTUAL else "before_request"]
            left = before + int(result["requested"])
        if left != "alone":
            result["left"] = left
            device.leave(max(0, left - device.process_used()))
        result["served"] = serve(llm)
    if level := asked.get("sleep"):
        result["sleep"] = sleep(llm, level)


def beside(asked: dict[str, Any], result: dict[str, Any]) -> Any:
    """The engine that is started first, and the addresses that it holds."""
    if not asked.get("beside"):
        return None
    level = asked.get("asleep", 0)
    told: dict[str, Any] = {}
    result["beside"] = told
    llm = engine({"sleep": level, "caller": True} | asked["beside"], told)
    if level:
        llm.sleep(level=level)
    result["beside"] = copy.deepcopy(told)  # the next start writes there, too
    import torch

    # Addresses are used again, so frees have to be recorded.
    torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 20)
    return llm, blocks()


def blocks() -> dict[int, int]:
    """Address and size of PyTorch's allocations."""
    import torch

    return {
        block["address"]: block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def lost(first: tuple[Any, dict[int, int]]) -> list[int]:
    """Sizes of those blocks that have been freed since."""
    import torch

    _, then = first
    (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    freed = {e["addr"] for e in trace if e["action"] == "free_completed"}
    return sorted(size for at, size in then.items() if at in freed)


def configure(v2: bool, own: bool = True) -> None:
    """Set the engine's environment variables, before vLLM is imported. The process is
    its `own`, as those that vLLM makes, unless somebody else allocates there."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if own:
        own_process()


def graphs(compiled: bool) -> dict[str, Any]:
    """The compilation config of an engine with CUDA graphs."""
    return {
        "cudagraph_capture_sizes": [1, 2, 4],
        "cudagraph_mode": "FULL",
    } | ({} if compiled else {"mode": 0})


def engine(asked: dict[str, Any], result: dict[str, Any]) -> Any:
    """An engine, with what its start took in `result`."""
    assert asked.keys() <= DEFAULTS.keys(), asked
    case = DEFAULTS | asked
    configure(case["v2"], own=not is_shared(case))
    began = time.perf_counter()
    import torch
    from vllm import LLM

    from bench.scenarios import device, models

    seconds = {"import": time.perf_counter() - began}
    result["seconds"] = seconds
    arguments: dict[str, Any] = {
        "enforce_eager": not case["graphs"],
        "enable_sleep_mode": case["sleep"] > 0,
    }
    if case["graphs"]:
        arguments["compilation_config"] = graphs(case["compile"])
    if "vision_config" in models.MODELS[case["model"]]:
        arguments["skip_tokenizer_init"] = False
        arguments["limit_mm_per_prompt"] = {"image": 1, "video": 0}
    if case["neighbour"]:
        start_neighbour(case["neighbour"])
    if case["held"]:
        device.other_process(case["held"])
    if case["free"]:
        device.leave(case["free"])
    if case["moved"]:
        observe.move_as(case["moved_at"], case["moved"])
    if case["moment"]:
        observe.hold_for_a_moment(case["moment"], case["moment_holds"])
    if case["report"]:
        observe.record_reported(result)
    observe.record_graphs(result, case["profiles"])
    if device.VIRTUAL:
        inspect_models_here()
        warm_up_few_batches()
    model = models.MODELS[case["model"]]
    compute_on_host(model, case["llm"])
    if "num_mel_bins" in model:  # which convolves; cuDNN does not start on the device
        torch.backends.cudnn.enabled = False
    if case["workspace"]:
        hold_as_built(case["workspace"])
    if case["graph_support"]:
        support_graphs(case["graph_support"])
    if case["flashinfer_tactic"]:
        from bench.scenarios import tactic

        tactic.add(result, **case["flashinfer_tactic"])
    observe.record_suggestions(result)
    observe.time_phases(seconds)
    if case["details"]:
        result["details"] = observe.time_details()
    hold(case["tensors"])
    if case["thread"]:
        allocate_beside(case["thread"])
    # PyTorch may say that CUDA is initialized where nothing has a context yet.
    result["before"] = device.process_used() or case["context"]
    device.reset_peak()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(case["folder"] or temporary)
        if case["draft"]:
            arguments["speculative_config"] = {
                "method": "eagle",
                "model": models.write("draft", folder / "draft"),
                "num_speculative_tokens": case["draft"],
            }
        llm = LLM(
            models.write(case["model"], folder),
            **(ENGINE | arguments | case["llm"]),
        )
    seconds["engine"] = time.perf_counter() - began
    config = llm.llm_engine.vllm_config
    result |= {
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "v2": bool(getattr(config, "use_v2_model_runner", False)),
        "used": device.used(),
        "reserved": torch.cuda.memory_reserved(),
        "kernels": device.kernels(),
        "told_above": llm.collective_rpc(told_above)[0],
        "memory": llm.collective_rpc(memory)[0] | {"graphs": result.get("graphs", 0)},
    }
    return llm


def start_neighbour(size: int) -> None:
    """Start a process that holds bytes of the device until this one ends."""
    code = (
        "import ctypes, sys\n"
        "cuda, size = ctypes.CDLL('libcuda.so.1'), ctypes.c_size_t(int(sys.argv[1]))\n"
        "print(cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), size), flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "0\n"
    HELD.append(process)


def hold(size: int) -> None:
    """Allocate tensors."""
    import torch

    if size:
        HELD.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def is_shared(case: dict[str, Any]) -> bool:
    """Whether somebody else allocates in the engine's process."""
    return any(case[kind] for kind in ("tensors", "thread", "beside", "caller"))


def allocate_beside(size: int) -> None:
    """Let another thread allocate and free, until this process ends."""
    import torch

    def run() -> None:
        while True:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(size, dtype=torch.uint8, device="cuda")
            time.sleep(0.003)

    threading.Thread(target=run, daemon=True).start()


def hold_as_built(size: int) -> None:
    """As FlashInfer's metadata builder does, whose kernels do not run here."""
    import torch
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    build = TritonAttentionMetadataBuilder.build

    def building(self: Any, *arguments: Any, **options: Any) -> Any:
        if not hasattr(self, "workspace"):
            self.workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        return build(self, *arguments, **options)

    TritonAttentionMetadataBuilder.build = building


def support_graphs(which: str) -> None:
    """As other backends of attention do, whose kernels do not run here."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    TritonAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport[which]


def memory(worker: Any) -> dict[str, int]:
    """What vLLM measured, in bytes; with an explicit KV cache only the model."""
    model = {"model": int(worker.model_runner.model_memory_usage)}
    if not hasattr(worker, "cudagraph_memory_estimate"):
        return model
    estimate = int(worker.cudagraph_memory_estimate)
    # The official release counts the estimate in.
    counted = estimate if set_aside(worker) is None else 0
    return model | {
        "peak_activation": int(worker.peak_activation_memory - counted),
        "graphs_estimated": estimate,
        "kv_cache": int(worker.available_kv_cache_memory_bytes),
    }


def set_aside(worker: Any) -> int | None:
    """For fragmentation, in bytes; None: by the official release, which does not."""
    told = getattr(worker, "startup_memory", None)
    return getattr(told, "fragmentation_buffer", None)


def told_above(worker: Any) -> dict[str, int]:
    """Bytes above the request, by phase of the start; of the release, which tells none,
    nothing."""
    told = getattr(worker, "startup_memory", None)
    return dict(getattr(getattr(told, "report", None), "above_request", {}))


def generate(llm: Any, tokens: int) -> list[int]:
    """The number of tokens of each output."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(range(3, 20 + 5 * i))} for i in range(4)]
    parameters = SamplingParams(
        temperature=0.0, max_tokens=tokens, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs]


def serve(llm: Any, **sampling: Any) -> str:
    """Serve the largest batches.

    A prompt for each sequence that fits into one step, then one that fills it, with the
    largest image if the model takes images, then several; each with sound if it takes
    sound. One of
    the longest length takes more steps, which have its context before them. With MLA
    and prefix caching, as many prompts as fit into a step have that context. With
    drafts, both next to each other then, and the long one next to prompts of one token.
    Returns "lives", or why it does not.
    """
    from vllm import SamplingParams

    from bench.scenarios import device

    if device.VIRTUAL:
        sample_valid_tokens()
    config = llm.llm_engine.vllm_config
    tokens = config.scheduler_config.max_num_batched_tokens
    sequences = config.scheduler_config.max_num_seqs
    outputs = 3
    most = min(tokens, config.model_config.max_model_len) - outputs
    short = [{"prompt_token_ids": [7] * (tokens // sequences)}] * sequences
    long: dict[str, Any] = {"prompt_token_ids": [7] * most}
    several: list[dict[str, Any]] = []
    if config.model_config.is_encoder_decoder:
        short, long = [with_sound(**prompt) for prompt in short], with_sound(**long)
    elif config.model_config.is_multimodal_model:
        # Of 2025 tokens: nearly the largest of processors.py, which is as long as some
        # contexts. Equal images are encoded once.
        side = 45 * 2 * config.model_config.hf_config.vision_config.patch_size
        several = [with_image([7], (side, side), i) for i in range(8)]
        long = several[0]
    batches = [batch for batch in (short, [long], several) if batch]
    # With hooks.toml, each step of a prompt counts as a token.
    steps = config.model_config.max_model_len // tokens
    longest = config.model_config.max_model_len - outputs - steps
    if longest > tokens and config.model_config.runner_type == "generate":
        batches.append([{"prompt_token_ids": [7] * longest}])
    if config.model_config.use_mla and most >= 512:  # decodes for FLASH_ATTN_MLA
        decoded = {"prompt_token_ids": [7] * 512}
        batches.append([decoded] * min(sequences, tokens // 512))
    if config.cache_config.enable_prefix_caching and config.model_config.use_mla:
        # As many as fit into a step, with all the rest of their context before them.
        own = [[7] * (longest - 8) + [10 + i] * 8 for i in range(tokens // 24)]
        batches.append([{"prompt_token_ids": ids} for ids in own[:sequences]])
    if config.speculative_config:
        one_token = {"prompt_token_ids": [7]}
        batches += [[*short[1:], long], [one_token] * 7 + [long]]
    parameters = SamplingParams(
        **{"temperature": 0.8, "top_p": 0.9} | sampling,
        max_tokens=outputs,
        detokenize=False,
        ignore_eos=True,
    )
    try:
        for prompts in batches:
            if config.model_config.runner_type == "pooling":
                llm.embed(prompts, use_tqdm=False)
                continue
            goes_on = len(prompts[-1]["prompt_token_ids"]) > tokens
            parameters.max_tokens = outputs + steps * goes_on
            llm.generate(prompts, parameters, use_tqdm=False)
    except RuntimeError as error:
        if not device.is_out_of_memory(error):
            raise
        return f"out of memory: {str(error)[:200]}"
    return "lives"


@functools.cache
def sample_valid_tokens() -> None:
    """Once a process. Kernels do nothing, so a token that was sampled is what its
    memory held before. A request that is preempted has it in its next prompt: in 32
    bits."""
    from vllm.v1.request import Request

    def wrapper(append: Any) -> Any:
        def call(request: Any, tokens: int | list[int]) -> None:
            append(request, 7 if isinstance(tokens, int) else [7] * len(tokens))

        return call

    wrap(Request, "append_output_token_ids", wrapper)


def sleep(llm: Any, level: int) -> dict[str, int]:
    """Bytes used while asleep and after each stage of waking up."""
    from vllm.device_allocator import get_mem_allocator_instance

    from bench.scenarios import device

    records = get_mem_allocator_instance().pointer_to_data.values()
    pooled = sum(data.handle[1] for data in records)
    awake = device.used()
    llm.sleep(level=level)
    asleep = device.used()
    llm.wake_up(tags=["weights"])
    weights = device.used()
    llm.wake_up(tags=["kv_cache"])
    return {
        "pooled": pooled,
        "awake": awake,
        "asleep": asleep,
        "weights": weights,
        "awake again": device.used(),
    }


if __name__ == "__main__":
    main()

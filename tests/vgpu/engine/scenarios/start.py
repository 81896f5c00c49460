"""Start an engine on the device it runs on, and say in one JSON line what happened.

The argument is a JSON object; DEFAULTS lists its keys.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "model": "dense",
    "v2": True,
    "graphs": False,
    "compile": False,
    "sleep": 0,  # level
    "generate": 0,  # tokens
    "moved": "",  # what another process takes or releases as a phase begins
    "moved_at": "profile",  # the phase
    "report": False,  # the worker's memory report is wanted
    "draft": 0,  # tokens that an EAGLE head of the model proposes
    "llm": {},  # further arguments of LLM
}
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4], "cudagraph_mode": "FULL"}


def main() -> None:
    asked = json.loads(sys.argv[1])
    assert asked.keys() <= DEFAULTS.keys(), asked
    case = DEFAULTS | asked
    result: dict[str, Any] = {"outcome": "started"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        if case["report"]:
            os.environ["VLLM_STARTUP_MEMORY_REPORT"] = str(report)
        try:
            run(case, result)
        except Exception as error:  # an outcome, not an accident
            result["outcome"] = type(error).__name__
            result["error"] = str(error)[:2000]
        if report.exists():
            result["report"] = json.loads(report.read_text())
    from vgpu import control

    result["peak"] = control.peak()
    result["process_peak"] = control.process_peak()
    if case["moved"]:
        control.other_process(-control.other())  # or the next start has less
    result["seconds"] = time.process_time()
    print("RESULT " + json.dumps(result), flush=True)


def run(case: dict[str, Any], result: dict[str, Any]) -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(case["v2"])),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import models
    import torch
    from vllm import LLM, SamplingParams

    from vgpu import control

    arguments: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.5,
        "attention_backend": "TRITON_ATTN",
        "enforce_eager": not case["graphs"],
        "enable_sleep_mode": case["sleep"] > 0,
    }
    if case["graphs"]:
        mode = {} if case["compile"] else {"mode": 0}
        arguments["compilation_config"] = GRAPHS | mode
    if case["moved"]:
        move_as(case["moved_at"], case["moved"])
    if case["report"]:
        record_reported(result)
    record_graphs(result)
    if case["model"] == "hybrid":
        index_chunks_on_host()
    with tempfile.TemporaryDirectory() as folder:
        if case["draft"]:
            arguments["speculative_config"] = {
                "method": "eagle",
                "model": models.write("draft", Path(folder, "draft")),
                "num_speculative_tokens": case["draft"],
            }
        llm = LLM(
            models.write(case["model"], Path(folder)),
            load_format="dummy",
            skip_tokenizer_init=True,
            seed=0,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **(arguments | case["llm"]),
        )
    config = llm.llm_engine.vllm_config
    result |= {
        "blocks": config.cache_config.num_gpu_blocks,
        "v2": bool(getattr(config, "use_v2_model_runner", False)),
        "used": control.used(),
        "reserved": torch.cuda.memory_reserved(),
        "kernels": control.kernels(),
    }
    if case["generate"]:
        result["tokens"] = generate(llm, SamplingParams, case["generate"])
    if case["sleep"]:
        from vllm.device_allocator import get_mem_allocator_instance

        records = get_mem_allocator_instance().pointer_to_data.values()
        pooled = sum(data.handle[1] for data in records)
        awake = control.used()
        llm.sleep(level=case["sleep"])
        asleep = control.used()
        llm.wake_up(tags=["weights"])
        weights = control.used()
        llm.wake_up(tags=["kv_cache"])
        result["sleep"] = {
            "pooled": pooled,
            "awake": awake,
            "asleep": asleep,
            "weights": weights,
            "awake again": control.used(),
        }


def record_graphs(result: dict[str, Any]) -> None:
    """What CUDA graphs were thought to take, and what they keep, in bytes."""
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.gpu_worker import Worker

    from vgpu import control

    profile = Worker.determine_available_memory

    def profiling(worker: Worker) -> int:
        result["requested"] = worker.requested_memory
        result["kv"] = int(profile(worker))
        result["estimate"] = int(worker.cudagraph_memory_estimate)
        return int(result["kv"])

    Worker.determine_available_memory = profiling
    for runner in V1, V2:
        record_capture(runner, result, torch.cuda.empty_cache, control.used)


def record_capture(
    runner: Any,
    result: dict[str, Any],
    empty_cache: Callable[[], None],
    used: Callable[[], int],
) -> None:
    capture = runner.capture_model

    def capturing(self: Any, **options: bool) -> int:
        empty_cache()
        before = used()
        taken = capture(self, **options)
        empty_cache()
        if not options.get("profile_only"):
            result["graphs"] = used() - before
        return int(taken)

    runner.capture_model = capturing


def index_chunks_on_host() -> None:
    """A kernel would compute what sizes these host lists: lengths of sequences."""
    from vllm.third_party.flash_linear_attention.ops import index

    prepare = index.prepare_chunk_indices

    def exact(cu_seqlens: Any, chunk_size: int) -> Any:
        return prepare(cu_seqlens.cpu(), chunk_size).to(cu_seqlens.device)

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(prepare.__name__) is prepare:
            module.prepare_chunk_indices = exact


def move_as(phase: str, size: str) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.gpu_worker import Worker

    from vgpu import control

    beginnings: dict[str, list[tuple[Any, str]]] = {
        "load": [(Worker, "load_model")],
        "profile": [(Worker, "determine_available_memory")],
        "profile_graphs": [(runner, "profile_cudagraph_memory") for runner in (V1, V2)],
        "kv_cache": [(Worker, "initialize_from_config")],
        "capture": [(Worker, "_get_cudagraph_capture_context")],
    }
    for owner, name in beginnings[phase]:
        before(owner, name, lambda: control.other_process(size))


def before(owner: Any, name: str, action: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        action()
        return original(*args, **options)

    setattr(owner, name, wrapped)


def record_reported(result: dict[str, Any]) -> None:
    """What the device lent the process when its worker reported where it went."""
    from vllm.v1.worker.memory_report import StartupMemoryReport

    from vgpu import control

    def record() -> None:
        result["used_at_report"] = control.process_used()

    before(StartupMemoryReport, "table", record)


def generate(llm: Any, sampling: Any, tokens: int) -> list[int]:
    prompts = [{"prompt_token_ids": list(range(3, 20 + 5 * i))} for i in range(4)]
    parameters = sampling(
        temperature=0.0, max_tokens=tokens, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()

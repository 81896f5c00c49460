"""Record figures, and make things happen, while a worker of the engine starts."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.scenarios.wrap import after, before, wrap

PHASES = (
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
)


def record_graphs(result: dict[str, Any], profiles: int) -> None:
    """The estimate of CUDA graphs, their memory, the request, and memory that the
    process held "before_request" (the context, handles of cuBLAS); all in bytes."""
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.gpu_worker import Worker

    from bench.scenarios import device

    def profiling(profile: Any) -> Any:
        def call(worker: Worker) -> int:
            result["requested"] = worker.requested_memory
            since = worker.init_snapshot.free_memory - torch.cuda.mem_get_info()[0]
            result["before_request"] = device.process_used() - since
            result["estimates"] = []
            for _ in range(profiles):
                result["kv"] = int(profile(worker))
                estimate = int(getattr(worker, "cudagraph_memory_estimate", 0))
                result["estimates"].append(estimate)
            result["estimate"] = estimate
            return int(result["kv"])

        return call

    def measuring(measure: Any) -> Any:
        def call(worker: Worker) -> int:
            result["kv"] = int(measure(worker))
            return int(result["kv"])

        return call

    wrap(Worker, "determine_available_memory", profiling)
    if hasattr(Worker, "measure_available_kv_cache_memory"):  # not in the release
        wrap(Worker, "measure_available_kv_cache_memory", measuring)
    for runner in V1, V2:
        record_capture(runner, result)


def record_capture(runner: Any, result: dict[str, Any]) -> None:
    import torch

    from bench.scenarios import device

    def capturing(capture: Any) -> Any:
        def call(self: Any, **options: bool) -> int:
            torch.cuda.empty_cache()
            before = device.used()
            taken = capture(self, **options)
            torch.cuda.empty_cache()
            if not options.get("profile_only"):
                result["graphs"] = device.used() - before
            return int(taken)

        return call

    wrap(runner, "capture_model", capturing)


def record_suggestions(result: dict[str, Any]) -> None:
    """The sizes of --kv-cache-memory that the log names: for the request, for all of
    the device; those that fit."""
    pattern = re.compile(r"--kv-cache-memory=(-?\d+)")

    def read(record: logging.LogRecord) -> bool:
        if sizes := pattern.findall(record.getMessage()):
            result["suggested"] = [int(size) for size in sizes]
        return True

    for module in ("gpu_worker", "startup_memory"):  # the release, ours
        logging.getLogger(f"vllm.v1.worker.{module}").addFilter(read)


def record_reported(result: dict[str, Any]) -> None:
    """What the device lent the process at the time of the worker's memory report."""
    import torch
    from vllm.v1.worker.memory_report import StartupMemoryReport

    from bench.scenarios import device

    def record(*_: Any) -> None:
        # What the last warm-up leaves to steps is set aside, not in use.
        torch.accelerator.empty_cache()
        result["used_at_report"] = device.process_used()

    before(StartupMemoryReport, "table", record)


def time_phases(seconds: dict[str, float]) -> None:
    """Note how long each phase of the worker's start takes."""
    from vllm.v1.worker.gpu_worker import Worker

    def timed(name: str) -> Any:
        def phase(method: Any) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                began = time.perf_counter()
                outcome = method(*arguments, **keywords)
                seconds[name] = seconds.get(name, 0) + time.perf_counter() - began
                return outcome

            return call

        return phase

    for name in PHASES:
        wrap(Worker, name, timed(name))


def time_details() -> dict[str, list[float]]:
    """Seconds and calls of what may wait in a start, by "phase: call"; one call counts
    in another that makes it."""
    import gc

    import torch
    import vllm.third_party.pynvml as nvml
    from vllm.utils import mem_utils
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.gpu_worker import Worker

    details: dict[str, list[float]] = {}
    open_phases = ["engine"]

    def timed(owner: Any, name: str, phase: bool = False) -> None:
        def wrapper(original: Any) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                entry = details.setdefault(f"{open_phases[-1]}: {name}", [0.0, 0])
                open_phases.extend([name] * phase)
                began = time.perf_counter()
                try:
                    return original(*arguments, **keywords)
                finally:
                    entry[0] += time.perf_counter() - began
                    entry[1] += 1
                    del open_phases[len(open_phases) - phase :]

            return call

        if hasattr(owner, name):  # not in each build
            wrap(owner, name, wrapper)

    for name in PHASES:
        timed(Worker, name, phase=True)
    for runner in V1, V2:
        for name in ("profile_run", "profile_cudagraph_memory", "capture_model"):
            timed(runner, name)
    timed(gpu_worker, "kernel_warmup")
    timed(mem_utils.MemorySnapshot, "measure")
    for name in ("synchronize", "empty_cache", "get_memory_info"):
        timed(torch.accelerator, name)
        timed(torch.cuda, name)
    for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetMemoryInfo"):
        timed(nvml, name)
    timed(gc, "collect")
    timed(time, "sleep")
    return details


def time_benchmarks() -> list[float]:
    """Processor time of Triton's autotuning, while it runs. It measures kernels that do
    nothing here, so this part of a start's time is left out."""
    from triton.runtime.autotuner import Autotuner

    seconds = [0.0]
    benchmark = Autotuner._bench

    def timed(*arguments: Any, **keywords: Any) -> Any:
        began = time.process_time()
        outcome = benchmark(*arguments, **keywords)
        seconds[0] += time.process_time() - began
        return outcome

    Autotuner._bench = timed
    return seconds


def move_as(phase: str, size: Any) -> None:
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.gpu_worker import Worker

    from bench.scenarios import device

    beginnings: dict[str, list[tuple[Any, str]]] = {
        "connect": [(gpu_worker, "init_worker_distributed_environment")],
        "groups": [(gpu_worker, "ensure_model_parallel_initialized")],
        "load": [(Worker, "load_model")],
        "profile": [(Worker, "determine_available_memory")],
        "profile_graphs": [(runner, "profile_cudagraph_memory") for runner in (V1, V2)],
        "first_batch": [(V1, "run_largest_batches"), (V2, "run_largest_batches")],
        "first_graph": [
            (V1, "_warmup_and_capture"),
            (cudagraph_utils.ModelCudaGraphManager, "capture"),
        ],
        "kv_cache": [(Worker, "initialize_from_config")],
        "capture": [(Worker, "_get_cudagraph_capture_context")],
        "extend": [(Worker, "extend_kv_cache")],
    }
    moved: list[Any] = []

    def move(*_: Any) -> None:
        if phase == "first_graph" and moved:
            return  # Others come by the same way.
        moved.append(size)
        device.other_process(size)

    for owner, name in beginnings[phase]:
        before(owner, name, move)


def hold_for_a_moment(when: str, size: int) -> None:
    """Let another process take `size` bytes, or all that is free but `-size`, and
    release them soon: "loaded" and before the profiled pass, "profiling" (that pass) or
    "profiled" and before there is a KV cache, "warming up" or "warm" and before the
    start is over.
    """
    import torch
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.gpu_worker import Worker

    from bench.scenarios import device

    held: list[int] = []
    taken: list[int] = []

    def take(*_: Any) -> None:
        if not taken:
            free = torch.cuda.mem_get_info()[0]
            taken.append(size if size > 0 else free + size)
            held.append(taken[0])
            device.other_process(held[0])

    def release(*_: Any) -> None:
        if held:
            device.other_process(-held.pop())

    if when == "loaded":
        before(Worker, "determine_available_memory", take)
        for runner in V1, V2:
            before(runner, "profile_run", release)
    elif when == "profiling":
        for runner in V1, V2:
            before(runner, "profile_run", take)
        before(Worker, "initialize_from_config", release)
    elif when == "profiled":
        profiling = gpu_worker.memory_profiling

        @contextmanager
        def profiled(*args: Any, **options: Any) -> Iterator[Any]:
            with profiling(*args, **options) as result:
                yield result
            take()

        gpu_worker.memory_profiling = profiled
        before(Worker, "initialize_from_config", release)
    elif when == "warming up":
        before(gpu_worker, "kernel_warmup", take)
        after(Worker, "compile_or_warm_up_model", release)
    else:
        after(Worker, "_compile_or_warm_up_model", take)
        after(Worker, "compile_or_warm_up_model", release)

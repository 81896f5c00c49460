"""Changes to each worker of ranks.py, and a worker's account of itself.

A plugin (bench/rank_plugin) that each process loads before it makes its Worker, however
it was started. A `worker_extension_cls` would change how vLLM serves.
"""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
from vllm.v1.worker.gpu_worker import Worker

from bench.scenarios.wrap import before
from vgpu import control

# In the order in which they begin.
PHASES: dict[str, tuple[tuple[Any, ...], str]] = {
    "init_device": ((Worker,), "init_device"),
    "load_model": ((Worker,), "load_model"),
    "profile": ((Worker,), "determine_available_memory"),
    "profile_graphs": ((V1, V2), "profile_cudagraph_memory"),
    "kv_cache": ((Worker,), "initialize_from_config"),
    "warm_up": ((Worker,), "compile_or_warm_up_model"),
    "capture": ((Worker,), "_get_cudagraph_capture_context"),
    "execute_model": ((Worker,), "execute_model"),
}

# By this process, in bytes.
HELD: dict[str, int] = {}


def install() -> None:
    """Let each worker of this process tell what it holds, and fail if it is to."""
    setattr(Worker, "tell", tell)  # noqa: B010
    note_what_is_held()
    setattr(shared_memory, "_SHM_NAME_PREFIX", os.environ["RANKS_SHARED_MEMORY"])  # noqa: B010
    if "RANKS_FAILS" in os.environ:
        fail(**json.loads(os.environ["RANKS_FAILS"]))


def tell(worker: Worker) -> dict[str, Any]:
    """What it holds, in bytes."""
    at = worker.device.index
    allocator = get_mem_allocator_instance()
    pooled = sum(d.handle[1] for d in allocator.pointer_to_data.values())
    return {
        "rank": worker.rank,
        "process": os.getpid(),
        "device": at,
        "requested": int(worker.requested_memory),
        "before": HELD["before"],
        "used": control.process_used(at),
        "pooled": pooled,  # by sleep mode, including unmapped memory
        "peak": control.process_peak(at),
        "kernels": control.kernels(),
        "model": int(worker.model_runner.model_memory_usage),
        "kv": int(getattr(worker, "available_kv_cache_memory_bytes", 0)),
    }


def note_what_is_held() -> None:
    """Record the memory of a rank when its share of the device is decided: its context
    and communicators. What PyTorch has, as cuBLAS's workspaces, is in that share, as
    in start.py."""

    def note(*_: Any) -> None:
        used = control.process_used(torch.cuda.current_device())
        HELD["before"] = used - torch.cuda.memory_reserved()

    before(gpu_worker, "request_memory", note)


def fail(rank: int, phase: str, how: str, when: str) -> None:
    """Make a phase of one rank fail, and note when."""
    workers: list[Worker] = []  # of this process; one

    def making(worker: Worker, *_: Any) -> None:
        workers.append(worker)

    def at_rank(*_: Any) -> None:
        (worker,) = workers
        config = worker.parallel_config
        own = config.data_parallel_index * config.world_size + worker.rank
        if own != rank or os.path.exists(when):
            return
        Path(when).write_text(str(time.monotonic()))
        if how == "memory":
            device = worker.local_rank
            control.other_process(control.memory(device), device)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise RuntimeError(f"rank {rank} fails in {phase}")

    before(Worker, "__init__", making)
    owners, name = PHASES[phase]
    for owner in owners:
        before(owner, name, at_rank)

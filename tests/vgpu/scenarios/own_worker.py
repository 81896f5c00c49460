"""Workers of a caller's own, which derive from vLLM's of 0.33.0."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_worker import (
    MemoryProfilingResult,
    MemorySnapshot,
    Worker,
    memory_profiling,
    request_memory,
)


class OwnProfile(Worker):
    """It profiles for itself, with the names of stock's module."""

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def determine_available_memory(self) -> int:
        now = MemorySnapshot(device=self.device)
        assert request_memory(now, self.cache_config) == self.requested_memory
        weights = int(self.model_runner.model_memory_usage)
        result: MemoryProfilingResult
        with memory_profiling(self.init_snapshot, weights_memory=weights) as result:
            self.model_runner.profile_run()
        graphs = self.model_runner.profile_cudagraph_memory()
        self.total_consumed = result.total_consumed
        self.peak_activation_memory = result.transient_peak_headroom + graphs
        self.cudagraph_memory_estimate = graphs
        self.available_kv_cache_memory_bytes = (
            self.requested_memory - result.non_kv_cache_memory - graphs
        )
        return int(self.available_kv_cache_memory_bytes)


class ReadsConsumed(Worker):
    def determine_available_memory(self) -> int:
        available = int(super().determine_available_memory())
        assert self.total_consumed + available <= self.requested_memory
        return available

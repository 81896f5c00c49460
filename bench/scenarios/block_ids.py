"""Check each block of the KV cache that a batch names: it must exist, and be mapped.

Kernels do nothing on the device, so one that reads past the KV cache is not caught. A
card answers with an illegal access, or with another tensor's memory. vLLM loads this as
a plugin (bench/plugin, which tests have on their path) in each process with a worker:
warm-up, profiling, capture and serving, of both model runners.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from bench.scenarios.wrap import after, wrap

# All that makes a worker run kernels.
CALLS = (
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
    "execute_model",
    "sample_tokens",
    "execute_dummy_batch",
)
_current = threading.local()  # the worker whose call it is
_watched: set[str] = set()
_at_most = sys.maxsize


def install() -> None:
    """Watch each worker that is made in this process from now on."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    after(WorkerWrapperBase, "init_device", _watch)


def _watch(*_: Any) -> None:
    """Watch modules that the worker has imported. An import of our own may take
    memory."""
    for name, watch in WATCHED.items():
        module = sys.modules.get(f"vllm.v1.worker.{name}")
        if module is not None and name not in _watched:
            _watched.add(name)
            watch(module)


def _watch_worker(module: Any) -> None:
    for name in CALLS:
        wrap(module.Worker, name, _as_current)


def _watch_dummy_context(module: Any) -> None:
    if hasattr(module, "set_dummy_context"):  # not in 0.32.0
        wrap(module, "set_dummy_context", _checked(_of_dummy_context))


def _of_all_groups(
    tables: Any, req_index: int, new_block_ids: Any, overwrite: bool
) -> Iterable[int]:
    if getattr(tables, "redirect_writes_to_null_block", False):
        return ()
    return (block for group in new_block_ids for block in group)


def _of_dummy_context(
    batch: Any, tables: Any, length: int, num_kv_blocks: int, *rest: Any, **options: Any
) -> Iterable[int]:
    return (num_kv_blocks - 1,)  # the last one; computed on the device


def _as_current(call: Callable[..., Any]) -> Callable[..., Any]:
    def calling(worker: Any, *arguments: Any, **options: Any) -> Any:
        before = getattr(_current, "worker", None)
        _current.worker = worker
        try:
            return call(worker, *arguments, **options)
        finally:
            _current.worker = before

    return calling


def _checked(
    named: Callable[..., Iterable[int]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Check the blocks that a call names."""

    def wrapper(call: Callable[..., Any]) -> Callable[..., Any]:
        def checking(*arguments: Any, **options: Any) -> Any:
            last = max(named(*arguments, **options), default=-1)
            blocks = num_blocks(_current.worker)
            assert last < blocks, f"block {last} is named, of {blocks} that are mapped"
            return call(*arguments, **options)

        return checking

    return wrapper


WATCHED: dict[str, Callable[[Any], None]] = {
    "gpu_worker": _watch_worker,
    "block_table": lambda module: wrap(
        module.BlockTable, "append_row", _checked(lambda _, ids, row: ids)
    ),
    "gpu.block_table": lambda module: wrap(
        module.BlockTables, "append_block_ids", _checked(_of_all_groups)
    ),
    "utils": lambda module: wrap(
        module.KVBlockZeroer, "zero_block_ids", _checked(lambda _, ids: ids)
    ),
    "gpu.cudagraph_utils": _watch_dummy_context,
    "gpu.model_runner": _watch_dummy_context,
}


def num_blocks(worker: Any) -> int:
    """Blocks that a batch may name now, with the null block."""
    memory = getattr(worker, "startup_memory", None)
    cache = getattr(memory, "extensible_kv_cache", None)
    told = worker.model_runner.kv_cache_config if cache is None else cache
    return min(int(told.num_blocks), _at_most)


def pretend_only_one(worker: Any) -> None:
    """As if only the null block was mapped, so that each batch is wrong."""
    global _at_most
    _at_most = 1

"""Pools of vLLM's allocator, as scenarios of loading have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def loading_allocator() -> Any:
    """The allocator, with a context and PyTorch's settings while a model is loaded."""
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    torch.cuda.mem_get_info()  # a context
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    return CuMemAllocator.get_instance()


@contextlib.contextmanager
def plain_pool(allocator: Any) -> Iterator[None]:
    """A MemPool, without what `use_memory_pool` does."""
    import torch

    pool = torch.cuda.MemPool(allocator._get_pluggable_allocator()._allocator)
    with torch.cuda.use_mem_pool(pool):
        yield
    del pool

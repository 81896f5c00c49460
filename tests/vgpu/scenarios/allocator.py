"""Sequences of operations of the sleep-mode allocator, chosen by hypothesis.

After every step the driver, the allocator's records and PyTorch agree to the byte.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.device_allocator.cumem import CuMemAllocator

from bench.scenarios.result import print_result
from vgpu import control

MIB = 2**20
TAGS = ("weights", "kv_cache")
# Small and large blocks, below and above the split limit; a third of the device.
SIZES = [1, 4096, MIB, 3 * MIB, 12 * MIB, 20 * MIB, 32 * MIB]
CALLS = ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
steps = 0


@contextlib.contextmanager
def failures_allowed() -> Iterator[None]:
    """PyTorch's and the allocator's errors when the driver refuses."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        assert "out of memory" in str(error).lower(), error


class Allocator(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = CuMemAllocator.get_instance()
        self.pool: contextlib.ExitStack | None = None
        self.tag = ""
        # Tensor, its tag, and the number written to it unless that was discarded.
        self.tensors: list[tuple[torch.Tensor, str, int | None]] = []
        self.number = 0

    @precondition(lambda self: self.pool is None)
    @rule(tag=st.sampled_from(TAGS))
    def enter_pool(self, tag: str) -> None:
        with failures_allowed(), contextlib.ExitStack() as pool:
            pool.enter_context(self.allocator.use_memory_pool(tag))
            self.pool, self.tag = pool.pop_all(), tag

    @precondition(lambda self: self.pool is not None)
    @rule()
    def leave_pool(self) -> None:
        assert self.pool is not None
        self.pool.close()
        self.pool = None

    @precondition(lambda self: self.pool is not None)
    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 4))
    def allocate(self, size: int, count: int) -> None:
        for _ in range(count):
            with failures_allowed():
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                self.number = (self.number + 1) % 256
                tensor[:1].copy_(torch.tensor([self.number], dtype=torch.uint8))
                self.tensors.append((tensor, self.tag, self.number))

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        del self.tensors[data.draw(st.integers(0, len(self.tensors) - 1))]

    @rule()
    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    @precondition(lambda self: self.pool is None)
    @rule(offload=st.sampled_from([(), ("weights",), TAGS]))
    def sleep(self, offload: tuple[str, ...]) -> None:
        self.lose([tag for tag in TAGS if tag not in offload])
        self.allocator.sleep(offload)

    @precondition(lambda self: self.pool is None)
    @rule(tag=st.sampled_from(TAGS))
    def discard(self, tag: str) -> None:
        self.lose([tag])
        self.allocator.discard(tag)

    @precondition(lambda self: self.pool is None)
    @rule(tags=st.sampled_from([None, *([tag] for tag in TAGS)]))
    def wake_up(self, tags: list[str] | None) -> None:
        with failures_allowed():
            self.allocator.wake_up(tags)

    @rule(
        call=st.sampled_from(CALLS),
        nth=st.integers(0, 2),
        times=st.integers(1, 3),
    )
    def fail(self, call: str, nth: int, times: int) -> None:
        control.inject(call, nth=nth, times=times)

    @rule()
    def fail_no_more(self) -> None:
        control.clear_injections()

    def lose(self, tags: list[str]) -> None:
        """Forget the contents of tensors that are awake and not offloaded."""
        self.tensors = [
            (tensor, tag, None if tag in tags and self.is_awake(tensor) else number)
            for tensor, tag, number in self.tensors
        ]

    def is_awake(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        (segment,) = (
            data
            for start, data in self.allocator.pointer_to_data.items()
            if start <= address < start + data.handle[1]
        )
        return not segment.is_asleep

    @invariant()
    def agree(self) -> None:
        global steps
        steps += 1
        records = self.allocator.pointer_to_data.values()
        recorded = sum(data.handle[1] for data in records)
        mapped = sum(data.handle[1] for data in records if not data.is_asleep)
        assert control.used() == mapped
        assert torch.cuda.memory_reserved() == recorded
        for tensor, _, number in self.tensors:
            if number is not None and self.is_awake(tensor):
                assert tensor[:1].cpu().item() == number

    def teardown(self) -> None:
        control.clear_injections()
        if self.pool is not None:
            self.pool.close()
        self.tensors.clear()
        gc.collect()
        torch.cuda.empty_cache()
        assert control.used() == torch.cuda.memory_reserved() == 0
        assert not self.allocator.pointer_to_data


def main() -> None:
    case = json.loads(sys.argv[1])
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    gc.freeze()  # sleep() and wake_up() collect garbage; not all of vLLM each time
    result: dict[str, Any] = {"outcome": "agreed"}
    try:
        run_state_machine_as_test(
            Allocator,
            settings=settings(
                max_examples=case["sequences"],
                stateful_step_count=20,
                deadline=None,
                derandomize=True,
                database=None,
                phases=set(Phase) if case["shrink"] else [Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    except Exception as error:  # hypothesis has written the sequence to stdout
        result = {"outcome": type(error).__name__, "error": str(error)[:2000]}
    print_result(result | {"steps": steps})


if __name__ == "__main__":
    main()

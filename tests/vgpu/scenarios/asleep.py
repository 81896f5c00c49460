"""Sleep and wake-up next to a trainer: a thread that allocates, frees what sleeps and
empties PyTorch's cache, while calls of the driver fail.

Graphs are captured, in which pools are entered. The argument is a JSON object:
"cycles", "seed", "fail" (whether calls fail). Contents are written once and read after
each wake-up that succeeded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import threading
from typing import Any

import torch
from vllm.device_allocator.cumem import CuMemAllocator

from bench.scenarios.result import print_result
from vgpu import control

MIB = 2**20
# Not cuMemUnmap: memory that a free cannot unmap is lost.
SLEEP_CALLS = ("cuMemcpyDtoH", "cuMemHostRegister", "cuCtxGetCurrent")
WAKE_CALLS = ("cuMemcpyHtoD", "cuMemCreate", "cuMemMap", "cuMemSetAccess")
COUNTED = "slept woken refused freed trained captured replayed lost"


class Sleeper:
    """The allocator, its tensors, and the trainer that may free them at any time."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.rng = random.Random(case["seed"])
        torch.cuda.mem_get_info()  # a context
        self.allocator = CuMemAllocator.get_instance()
        self.released = watch_context()
        self.tensors: list[tuple[torch.Tensor, int]] = []  # shared, with `lock`
        self.lock = threading.Lock()
        # Held while a graph is captured, as CUDA requires.
        self.quiet = threading.Lock()
        self.done = threading.Event()
        self.count = dict.fromkeys(COUNTED.split(), 0)
        self.graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    # ---- the trainer, in a thread of its own

    def train(self) -> None:
        rng = random.Random(self.case["seed"] + 1)
        while not self.done.is_set():
            with self.quiet:
                self.train_once(rng)

    def train_once(self, rng: random.Random) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            size = rng.randrange(1, 64) * MIB // 2
            torch.empty(size, dtype=torch.uint8, device="cuda")
        with self.lock:
            if len(self.tensors) > 2 and rng.random() < 0.5:
                del self.tensors[rng.randrange(len(self.tensors))]
                self.count["freed"] += 1
        torch.cuda.empty_cache()
        self.count["trained"] += 1

    # ---- calls of the driver that fail

    def fail(self, calls: tuple[str, ...]) -> None:
        if self.case["fail"] and self.rng.random() < 0.5:
            control.inject(self.rng.choice(calls), nth=self.rng.randrange(6))

    def attempt(self, call: Any, *args: Any) -> bool:
        """Whether it succeeds; no call fails after it."""
        try:
            call(*args)
            return True
        except RuntimeError as error:
            assert "out of memory" in str(error).lower(), error
            self.count["refused"] += 1
            return False
        finally:
            fired = self.released.fired
            control.clear_injections()
            self.released = watch_context()
            assert not fired, f"the primary context was released {fired} times"

    # ---- a cycle

    def cycle(self) -> None:
        for _ in range(3):
            with contextlib.suppress(torch.OutOfMemoryError):
                self.load(self.rng.randrange(256))
        if self.rng.random() < 0.3:
            with contextlib.suppress(torch.OutOfMemoryError):
                self.capture()
        self.fail(SLEEP_CALLS)
        self.count["slept"] += self.attempt(self.allocator.sleep, "weights")
        self.fail(WAKE_CALLS)
        # It may not fit next to the trainer at this moment: the next call works.
        while not self.attempt(self.allocator.wake_up):
            pass
        self.count["woken"] += 1
        for graph, _ in self.graphs:
            graph.replay()
            self.count["replayed"] += 1
        self.read()

    def load(self, number: int) -> None:
        with self.allocator.use_memory_pool("weights"):
            size = self.rng.choice([1, 12, 24]) * MIB
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            content = torch.tensor([number], dtype=torch.uint8)
            tensor[:1].copy_(content)
            tensor[-1:].copy_(content)
        with self.lock:
            self.tensors.append((tensor, number))

    def capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with (
            self.quiet,
            self.allocator.cudagraph_pool() as pool,
            torch.cuda.graph(graph, pool=pool),
        ):
            held = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
            with self.allocator.use_memory_pool("workspace"):
                size = self.rng.choice([1, 4, 24]) * MIB // 2
                work = torch.zeros(size, dtype=torch.uint8, device="cuda")
            work[:1].add_(held[:1])
        self.graphs.append((graph, work))
        self.count["captured"] += 1

    def read(self) -> None:
        """Counts the tensors whose contents are lost."""
        with self.lock:
            kept = list(self.tensors)
        for tensor, number in kept:
            ends = torch.stack((tensor[0].cpu(), tensor[-1].cpu())).tolist()
            self.count["lost"] += ends != [number] * 2

    def free(self) -> None:
        with self.lock:
            self.tensors.clear()
        with self.quiet:  # captured graphs are freed
            self.graphs.clear()
            self.allocator.release_pools()


def watch_context() -> Any:
    return control.inject("cuDevicePrimaryCtxRelease*", times=10**6)


def run(sleeper: Sleeper, cycles: int) -> str:
    """How it ended."""
    trainer = threading.Thread(target=sleeper.train)
    trainer.start()
    try:
        for cycle in range(cycles):
            sleeper.cycle()
            if cycle % 10 == 9:
                sleeper.free()
        return "finished"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        sleeper.done.set()
        trainer.join()


def main() -> None:
    case = json.loads(sys.argv[1])
    sleeper = Sleeper(case)
    gc.freeze()
    outcome = run(sleeper, case["cycles"])
    if outcome == "finished":
        sleeper.free()
    sleeper.tensors.clear()
    sleeper.graphs.clear()
    gc.collect()
    if outcome == "finished":
        torch.cuda.empty_cache()
    result = sleeper.count | {
        "outcome": outcome,
        "records": len(sleeper.allocator.pointer_to_data),
        "left": control.used(),
        "pinned": control.pinned(),
    }
    print_result(result)


if __name__ == "__main__":
    main()

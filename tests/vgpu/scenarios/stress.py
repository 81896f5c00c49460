"""Random programs of a process in which an engine serves and its caller allocates.

The argument is a JSON object: "programs", the number of them, "seed", the first one's,
"memory", bytes of the device that a program may take, and "maps", whether the driver
can map memory; if not, no program uses the sleep-mode pool. A program mixes steps,
loads (in the sleep-mode pool, too), sleep and wake-up, the end of another engine's
start, and a caller's tensors. Of three programs one has another thread that allocates
and frees, and one a thread that captures CUDA graphs. A line a program says how it
ended: it "lives", an action was "out of memory", or it was "harmed", which ends the
scenario: PyTorch counts memory that the device does not have, contents changed, or
another call failed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

from bench.scenarios.result import print_result

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch  # noqa: E402

from vgpu import control  # noqa: E402

MIB = 2**20
DEVICE = torch.device("cuda:0")


def allocate(mib: int, fill: int | None = None) -> torch.Tensor:
    """Both ends have the value `fill`, copied there: kernels do nothing."""
    tensor = torch.empty(mib * MIB, dtype=torch.uint8, device=DEVICE)
    if fill is not None:
        for end in (tensor[:1], tensor[-1:]):
            end.copy_(torch.tensor([fill], dtype=torch.uint8))
    return tensor


def layer(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and free as a layer of a Llama 8B does; returns what lives on."""

    def features(number: int) -> torch.Tensor:
        return torch.empty(tokens * number, dtype=torch.bfloat16, device=DEVICE)

    residual, x = features(4096), features(4096)
    normed = features(4096)
    del x
    qkv = features(6144)
    del normed
    attention = features(4096)
    projected = features(4096)
    del attention, qkv
    normed = features(4096)
    del projected
    gate_up = features(28672)
    del normed
    activated = features(14336)
    del gate_up
    return residual, features(4096) if activated is not None else residual


class Process:
    """The engine's worker and its caller."""

    def __init__(self, rng: random.Random, memory: int) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator
        from vllm.v1.worker.gpu_worker import Worker

        self.rng, self.memory = rng, memory
        # A worker that has started, as far as its allocations go.
        self.worker: Any = Worker.__new__(Worker)
        self.worker.device = DEVICE
        self.worker.vllm_config = SimpleNamespace(
            kv_transfer_config=None,
            ec_transfer_config=None,
            weight_transfer_config=None,
        )
        self.worker.cache_config = SimpleNamespace(gpu_memory_limit_bytes=None)
        self.worker.startup_memory = SimpleNamespace(limit=None)
        self.serving_begins()
        self.pool = CuMemAllocator.get_instance()
        self.held: list[tuple[torch.Tensor, int]] = []
        self.weights: list[tuple[torch.Tensor, int]] = []
        self.asleep = False

    def serving_begins(self) -> None:
        """As a start warms up and ends."""
        try:
            from vllm.v1.worker.serving_memory import ServingMemory
        except ImportError:  # the release has no such module
            return
        self.worker.serving_memory = ServingMemory(self.worker)
        self.worker.serving_memory.end()
        self.worker.serving_memory.begin()

    def step(self) -> None:
        tokens = self.rng.choice((64, 256, 2048, 8192))
        tokens = self.rng.randrange(tokens // 8, tokens)
        for _ in range(3):
            kept = layer(tokens)
        del kept

    def load(self) -> None:
        """Load: many transients, few tensors that stay."""
        with self.worker._scoped_allocator_max_split(max_split_size_mb=20):
            for _ in range(self.rng.randrange(1, 6)):
                transient = allocate(self.rng.choice((30, 60, 200)))
                self.hold(self.rng.choice((2, 12, 24)))
                del transient

    def load_asleep(self) -> None:
        """Load in the sleep-mode pool."""
        if self.asleep or self.weights:
            return
        own = {"own_pool": True} if has_own_pool(self.worker) else {}
        with (
            self.pool.use_memory_pool(tag="weights"),
            self.worker._scoped_allocator_max_split(max_split_size_mb=20, **own),
        ):
            for _ in range(self.rng.randrange(1, 4)):
                transient = allocate(self.rng.choice((30, 100)))
                fill = self.rng.randrange(256)
                self.weights.append((allocate(self.rng.choice((4, 24)), fill), fill))
                del transient

    def sleep_or_wake(self) -> None:
        if self.asleep:
            self.pool.wake_up()
        elif self.weights:
            self.pool.sleep(offload_tags=("weights",))
        self.asleep = not self.asleep and bool(self.weights)

    def hold(self, mib: int) -> None:
        fill = self.rng.randrange(256)
        self.held.append((allocate(mib, fill), fill))

    def caller_allocates(self) -> None:
        self.hold(self.rng.choice((2, 4, 12, 24, 40, 160)))

    def caller_frees(self) -> None:
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held)))

    def caller_empties_the_cache(self) -> None:
        torch.accelerator.empty_cache()

    def check(self) -> None:
        asleep = self.pool.get_current_usage() if self.asleep else 0
        if torch.accelerator.memory_allocated() > control.process_used() + asleep:
            raise Harm("PyTorch counts memory that the device has not")
        awake = [] if self.asleep else self.weights
        for tensor, fill in self.held + awake:
            if {int(tensor[0]), int(tensor[-1])} != {fill}:
                raise Harm("contents changed")


class Harm(Exception):
    pass


def has_own_pool(worker: Any) -> bool:
    """The release has no such argument."""
    import inspect

    scope = worker._scoped_allocator_max_split
    return "own_pool" in inspect.signature(scope, follow_wrapped=False).parameters


def allocates(rng: random.Random) -> Generator[None]:
    held: list[torch.Tensor] = []
    while True:
        with contextlib.suppress(torch.OutOfMemoryError):
            held.append(allocate(rng.choice((1, 3, 12, 30))))
        del held[: len(held) - 2]
        yield


def captures(rng: random.Random) -> Generator[None]:
    """In one memory pool, which a graph keeps, as torch.compile and vLLM do."""
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    kept, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for which in chain((kept,), repeat(graph)):
            which.reset()
            which.capture_begin(pool, capture_error_mode="thread_local")
            try:
                for _ in range(rng.randrange(1, 4)):
                    with contextlib.suppress(torch.OutOfMemoryError):
                        allocate(rng.choice((1, 12))).fill_(0)
                    yield
            finally:
                which.capture_end()
            which.replay()
            yield


@contextlib.contextmanager
def in_another_thread(does: Generator[None]) -> Iterator[None]:
    """Another thread. Its caller raises its exception."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.wait(0.0005):
                next(does)
            does.close()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def program(seed: int, memory: int, maps: bool) -> str:
    rng = random.Random(seed)
    process = Process(rng, memory)
    actions: list[Callable[[], None]] = [
        process.step, process.step, process.step, process.caller_allocates,
        process.caller_allocates, process.caller_frees, process.load,
        process.caller_empties_the_cache, process.serving_begins,
        *((process.load_asleep, process.sleep_or_wake) if maps else ()),
    ]  # fmt: skip
    other = random.Random(seed)
    beside = (
        in_another_thread(allocates(other)),
        in_another_thread(captures(other)),
        contextlib.nullcontext(),
    )[seed % 3]
    torch.cuda.set_per_process_memory_fraction(memory / total())
    outcome = "lives"
    with beside:
        for _ in range(60):
            action = rng.choice(actions)
            try:
                action()
            except torch.OutOfMemoryError:
                if action != process.caller_allocates:
                    outcome = f"out of memory: {action.__name__}"
                    break
            process.check()
    if process.asleep:
        process.pool.wake_up()
        process.asleep = False
    process.check()
    return outcome


def total() -> int:
    return int(torch.cuda.get_device_properties(DEVICE).total_memory)


def main() -> None:
    asked = json.loads(sys.argv[1])
    allocate(1)
    if not asked["maps"]:
        control.inject("cuMemCreate", error="not_supported", times=10**9)
    for seed in range(asked["seed"], asked["seed"] + asked["programs"]):
        harm = False
        try:
            outcome = program(seed, asked["memory"], asked["maps"])
        except Exception as error:  # no program may raise anything
            outcome, harm = f"harmed: {type(error).__name__}: {str(error)[:100]}", True
        print_result({"seed": seed, "outcome": outcome})
        if harm:
            os._exit(0)
        gc.collect()
        torch.accelerator.empty_cache()


if __name__ == "__main__":
    main()

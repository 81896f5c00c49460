"""Sleep and wake-up beside a trainer: a thread that allocates, frees what sleeps and
empties PyTorch's cache, while calls of the driver fail.

The argument is a JSON object: "cycles", "seed", "fail" (whether calls fail), "capture"
(whether graphs are captured, in which pools are entered). Contents are written once and
read after each wake-up that succeeded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import threading
from typing import Any

MIB = 2**20
# Not cuMemUnmap: memory that a free cannot unmap is lost.
SLEEP_CALLS = ("cuMemcpyDtoH", "cudaHostRegister", "cuCtxGetCurrent")
WAKE_CALLS = ("cuMemcpyHtoD", "cuMemCreate", "cuMemMap", "cuMemSetAccess")


def main() -> None:
    case = json.loads(sys.argv[1])
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    from vgpu import control

    rng = random.Random(case["seed"])
    torch.cuda.mem_get_info()  # a context
    allocator = CuMemAllocator.get_instance()
    released = control.inject("cuDevicePrimaryCtxRelease*", times=10**6)
    gc.freeze()
    # Shared with the trainer: what it may free at any time.
    mine: list[tuple[torch.Tensor, int]] = []
    lock = threading.Lock()
    quiet = threading.Lock()  # held while a graph is captured, as CUDA requires
    done = threading.Event()
    names = "slept woken refused freed trained captured replayed lost"
    count = dict.fromkeys(names.split(), 0)
    graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
    errors: list[str] = []

    def trainer() -> None:
        rng = random.Random(case["seed"] + 1)
        while not done.is_set():
            with quiet:
                train(rng)

    def train(rng: random.Random) -> None:
        try:
            held = torch.empty(rng.randrange(1, 64) * MIB // 2, dtype=torch.uint8,
                                   device="cuda")  # fmt: skip
            del held
        except torch.OutOfMemoryError:
            pass
        with lock:
            if len(mine) > 2 and rng.random() < 0.5:
                del mine[rng.randrange(len(mine))]
                count["freed"] += 1
        torch.cuda.empty_cache()
        count["trained"] += 1

    def fail(calls: tuple[str, ...]) -> Any:
        if case["fail"] and rng.random() < 0.5:
            return control.inject(rng.choice(calls), nth=rng.randrange(6))
        return None

    def clear() -> None:
        nonlocal released
        fired = released.fired
        control.clear_injections()
        released = control.inject("cuDevicePrimaryCtxRelease*", times=10**6)
        assert not fired, f"the primary context was released {fired} times"

    def attempt(call: Any, *args: Any) -> bool:
        try:
            call(*args)
            return True
        except RuntimeError as error:
            assert "out of memory" in str(error).lower(), error
            count["refused"] += 1
            return False

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with (
            quiet,
            allocator.cudagraph_pool() as pool,
            torch.cuda.graph(graph, pool=pool),
        ):
            held = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
            with allocator.use_memory_pool("workspace"):
                size = rng.choice([1, 4, 24]) * MIB // 2
                work = torch.zeros(size, dtype=torch.uint8, device="cuda")
            work[:1].add_(held[:1])
        graphs.append((graph, work))
        count["captured"] += 1

    def replay() -> None:
        for graph, _ in graphs:
            graph.replay()
            count["replayed"] += 1

    other = threading.Thread(target=trainer)
    try:
        other.start()
        for cycle in range(case["cycles"]):
            for _ in range(3):
                number = rng.randrange(256)
                try:
                    with allocator.use_memory_pool("weights"):
                        size = rng.choice([1, 12, 24]) * MIB
                        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                        content = torch.tensor([number], dtype=torch.uint8)
                        tensor[:1].copy_(content)
                        tensor[-1:].copy_(content)
                except torch.OutOfMemoryError:
                    continue
                with lock:
                    mine.append((tensor, number))
                del tensor
            if case.get("capture") and rng.random() < 0.3:
                with contextlib.suppress(torch.OutOfMemoryError):
                    capture()
            fail(SLEEP_CALLS)
            count["slept"] += attempt(allocator.sleep, "weights")
            clear()
            fail(WAKE_CALLS)
            woken = attempt(allocator.wake_up)
            clear()
            # It may not fit beside the trainer at this moment: the next call works.
            while not woken:
                woken = attempt(allocator.wake_up)
            count["woken"] += 1
            replay()
            with lock:
                kept = list(mine)
            for tensor, number in kept:
                ends = torch.stack((tensor[0].cpu(), tensor[-1].cpu())).tolist()
                count["lost"] += ends != [number] * 2
            del kept, tensor
            if cycle % 10 == 9:
                with lock:
                    mine.clear()
                with quiet:  # what was captured is freed
                    graphs.clear()
                    allocator.release_pools()
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}"[:500])
    finally:
        done.set()
        other.join()
    mine.clear()
    graphs.clear()
    errors or allocator.release_pools()
    gc.collect()
    errors or torch.cuda.empty_cache()
    result = count | {
        "outcome": "finished" if not errors else errors[0],
        "records": len(allocator.pointer_to_data),
        "left": control.used(),
        "pinned": control.pinned(),
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

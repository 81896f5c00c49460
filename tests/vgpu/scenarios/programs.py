"""Random programs of allocations in the sleep-mode pool, and in a plain MemPool.

The argument is a JSON object: "programs", "seed", and "named", the programs of NAMED to
run next to them. Each runs twice, on a device of its own size: in use_memory_pool(),
with what vLLM does between modules while loading, and in torch.cuda.use_mem_pool()
without. A program is killed if it fails in the first alone, saved if in the second
alone; those killed run without any pool too, as without sleep mode.

With "only", the index of one of the programs, that one runs in use_memory_pool() alone,
as it must in stock vLLM, where nothing can be allocated after a failure.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
from dataclasses import dataclass, field
from typing import Any

from bench.scenarios.result import print_result
from tests.vgpu.scenarios import pools

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

MIB = 2**20
MEMORY = 16384 * MIB


@dataclass
class Program:
    """Steps: a name and bytes to allocate, a name and 0 to free; ("", weights) ends a
    module of that many bytes of weights. Names that begin with "outside" are allocated
    before the pool is entered. In the pool, each begins with a small tensor that stays,
    as models have: the patched pool holds a segment for small ones in any case."""

    memory: int
    steps: list[tuple[str, int]] = field(default_factory=list)
    outside: list[tuple[str, int]] = field(default_factory=list)
    limit: int = 0  # of PyTorch, if not 0
    released: int = 0  # bytes that a co-tenant releases after the first module


def stranding() -> Program:
    """A program where a sweep strands more in partly used segments than it returns."""
    program = Program(1270 * MIB)
    for i in range(64):
        program.steps += [(f"kept {i}", 2 * MIB), (f"freed {i}", 8 * MIB)]
    program.steps += [(f"piece {i}", 16 * MIB) for i in range(20)]
    program.steps += [(f"freed {i}", 0) for i in range(64)]
    program.steps += [(f"piece {i}", 0) for i in range(20)]
    program.steps += [("", 128 * MIB)]
    for i in range(64):
        program.steps += [(f"kept again {i}", 2 * MIB), (f"freed again {i}", 8 * MIB)]
    return program


def limited() -> Program:
    """A program where PyTorch's limit binds, as a co-tenant has released memory."""
    program = Program(2048 * MIB, limit=2048 * MIB, released=2048 * MIB)
    program.steps += [("kept", 400 * MIB)]
    program.steps += [(f"piece {i}", 16 * MIB) for i in range(60)]
    program.steps += [(f"piece {i}", 0) for i in range(60)]
    return replace_end(program, 400 * MIB, 800 * MIB)


def replace_end(program: Program, weights: int, request: int) -> Program:
    program.steps += [("", weights), ("whole", request)]
    return program


NAMED = {"stranding": stranding, "limited": limited}


def draw(number: random.Random) -> Program:
    palette = [
        number.randint(1, 64 * 8) * MIB // 8 for _ in range(number.randint(1, 5))
    ]
    program = Program(0)
    live: dict[str, int] = {}
    peak = 0

    def step(name: str, size: int) -> None:
        nonlocal peak
        program.steps.append((name, size))
        if size:
            live[name] = size
        else:
            del live[name]
        peak = max(peak, sum(live.values()))

    for i in range(number.randint(0, 2)):
        program.outside.append((f"outside {i}", number.choice(palette) * 4))
        live[f"outside {i}"] = program.outside[-1][1]
    keep = number.choice([0.05, 0.2, 0.5])
    whole = number.random() < 0.5
    for module in range(number.randint(2, 4)):
        if number.random() < 0.5:
            palette[number.randrange(len(palette))] = (
                number.randint(1, 64 * 8) * MIB // 8
            )
        pieces: list[str] = []
        weights = 0
        for i in range(number.randint(4, 24)):
            name = f"{module} {i}"
            step(name, number.choice(palette))
            if number.random() < keep:
                weights += live[name]
            else:
                pieces.append(name)
            if pieces and number.random() < 0.3:
                step(pieces.pop(number.randrange(len(pieces))), 0)
        if whole and pieces:
            step(f"{module} whole", sum(live[p] for p in pieces))
            weights += live[f"{module} whole"]
        for name in pieces:
            step(name, 0)
        for name in [n for n in live if n.startswith("outside")]:
            if number.random() < 0.3:
                step(name, 0)
        program.steps.append(("", weights))
    program.memory = int(peak * number.uniform(1.0, 1.2)) // (2 * MIB) * 2 * MIB
    if number.random() < 0.3:
        program.limit = program.memory
        program.released = program.memory
    return program


def main() -> None:
    case = json.loads(sys.argv[1])
    import torch
    from vllm import device_allocator

    from vgpu import control

    allocator = pools.loading_allocator()
    between_modules = getattr(
        device_allocator, "sweep_pool_under_pressure", lambda needed: None
    )

    def lives(program: Program, pool: contextlib.AbstractContextManager[Any]) -> bool:
        assert control.used() == control.other()
        control.other_process(MEMORY - program.memory - control.other())
        total = torch.cuda.mem_get_info()[1]
        limit = program.limit or total
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit + 0.5) / total))
        tensors: dict[str, Any] = {}
        try:
            for name, size in program.outside:
                tensors[name] = empty(size)
            with pool:
                released = program.released
                tensors["small"] = empty(1024)
                for name, size in program.steps:
                    if not name:
                        control.other_process(-released)
                        released = 0
                        between_modules(2 * size)
                    elif size:
                        tensors[name] = empty(size)
                    else:
                        del tensors[name]
        except torch.OutOfMemoryError:
            return False
        finally:
            tensors.clear()
        return True

    def empty(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def outcome(program: Program) -> str:
        results = []
        for pool in (allocator.use_memory_pool("weights"), pools.plain_pool(allocator)):
            results.append(lives(program, pool))
            torch.cuda.set_per_process_memory_fraction(1.0)
            gc.collect(0)
            torch.cuda.empty_cache()
        return {
            (True, True): "lived",
            (True, False): "saved",
            (False, True): "killed",
            (False, False): "died",
        }[results[0], results[1]]

    gc.freeze()
    number = random.Random(case["seed"])
    if "only" in case:
        program = [draw(number) for _ in range(case["only"] + 1)][-1]
        result = {"lives": lives(program, allocator.use_memory_pool("weights"))}
        print_result(result)
        return
    counts = dict.fromkeys(("lived", "saved", "killed", "died"), 0)
    kills = []
    for i in range(case["programs"]):
        program = draw(number)
        counts[end := outcome(program)] += 1
        if end == "killed":
            without_a_pool = lives(program, contextlib.nullcontext())
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
            kills.append(
                {
                    "program": i,
                    "limited": bool(program.limit),
                    "lives without a pool": without_a_pool,
                }
            )
    named = {name: outcome(NAMED[name]()) for name in case["named"]}
    print_result(counts | {"kills": kills, "named": named})


if __name__ == "__main__":
    main()

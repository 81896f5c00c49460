"""A random program of a process that serves an engine and does other things.

The argument is a JSON object: "v2", "graphs", "seed" and "steps". A step generates
(with or without logprobs, in this thread, another one or on a stream of the
caller's), copies with a library that works on CUDA's default stream, writes allocator
settings that PyTorch accepts or refuses, forks, or allocates, frees and checks tensors.

Each step leaves a line of the "log": what it did and found, whether the current stream
is the one before the start, PyTorch's settings (options and text), and its limit.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from bench.scenarios import start

SIZE = 1 << 20
ACCEPTED = (
    "",
    "garbage_collection_threshold:0.9",
    "max_split_size_mb:64",
    "roundup_power2_divisions:[64:8,>:1]",
    "expandable_segments:True",
    "expandable_segments:False",
    "large_segment_size_mb:40",
    "large_segment_size_mb:20",
    "max_non_split_rounding_mb:64,pinned_use_background_threads:True",
)
REFUSED = (
    "no_such_option:1",
    "roundup_power2_divisions:4,no_such_option:1",
    "max_split_size_mb:1",
    "expandable_segments:maybe",
)


class Program:
    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        import torch

        self.rng = random.Random(case["seed"])
        self.stream = torch.cuda.current_stream()
        self.other = torch.cuda.Stream()
        self.held: list[tuple[Any, int]] = []
        self.source, self.target = (
            torch.zeros(SIZE, dtype=torch.uint8).pin_memory() for _ in range(2)
        )
        self.driver = ctypes.CDLL("libcuda.so.1")
        asked = {"v2": case["v2"], "graphs": case["graphs"], "caller": True}
        self.llm = start.engine(asked | {"folder": str(folder)}, {})

    def generate(self) -> list[int]:
        from vllm import SamplingParams

        rng = self.rng
        prompts: list[Any] = [
            {"prompt_token_ids": [7] * rng.randrange(1, 600)}
            for _ in range(rng.randrange(1, 5))
        ]
        parameters = SamplingParams(
            max_tokens=rng.randrange(1, 4), detokenize=False, ignore_eos=True,
            logprobs=rng.choice((None, 3)),
        )  # fmt: skip
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def generate_in_a_thread(self) -> list[Any]:
        import torch

        done: list[Any] = []

        def run() -> None:
            done.append(self.generate())
            done.append(torch.cuda.current_stream() == self.stream)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return done

    def generate_on_a_stream(self) -> list[Any]:
        import torch

        with torch.cuda.stream(self.other):
            return [self.generate(), torch.cuda.current_stream() == self.other]

    def copy_on_the_default_stream(self) -> list[int]:
        """Written by PyTorch, read by a library, on what should be one stream."""
        import torch

        value = self.rng.randrange(1, 256)
        tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        self.source.fill_(value)
        self.target.zero_()
        torch.cuda.synchronize()
        tensor.copy_(self.source, non_blocking=True)
        self.driver.cuMemcpyDtoHAsync_v2(
            ctypes.c_void_p(self.target.data_ptr()),
            ctypes.c_ulonglong(tensor.data_ptr()),
            ctypes.c_size_t(SIZE),
            None,
        )
        self.driver.cuStreamSynchronize(None)
        return [value, int(self.target[0]), int(self.target[-1])]

    def set_accepted(self) -> str:
        import torch

        conf = self.rng.choice(ACCEPTED)
        try:
            torch._C._accelerator_setAllocatorSettings(conf)
        except ValueError:
            return "a large_segment_size_mb held on"
        return conf

    def set_refused(self) -> str:
        import torch

        try:
            torch._C._accelerator_setAllocatorSettings(self.rng.choice(REFUSED))
        except (ValueError, RuntimeError) as error:
            return type(error).__name__
        return "accepted"

    def fork(self) -> int:
        child = os.fork()
        if child == 0:
            os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def hold(self) -> int:
        import torch

        size, fill = self.rng.choice((1, 3, 24, 60)) << 20, self.rng.randrange(256)
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        for end in (tensor[:1], tensor[-1:]):
            end.copy_(torch.tensor([fill], dtype=torch.uint8))
        self.held.append((tensor, fill))
        return size

    def free(self) -> int:
        while len(self.held) > self.rng.randrange(1, 6):
            self.held.pop(self.rng.randrange(len(self.held)))
        return len(self.held)

    def check(self) -> list[bool]:
        return [{int(t[0]), int(t[-1])} == {fill} for t, fill in self.held]

    def state(self) -> list[Any]:
        import torch

        return [
            torch.cuda.current_stream() == self.stream,
            torch.cuda.memory._snapshot()["allocator_settings"],
            torch.cuda.get_per_process_memory_fraction(),
        ]

    def step(self) -> list[Any]:
        action = self.rng.choice((
            self.generate, self.generate_in_a_thread, self.generate_on_a_stream,
            self.copy_on_the_default_stream, self.copy_on_the_default_stream,
            self.set_accepted, self.set_refused, self.fork, self.hold, self.free,
            self.check,
        ))  # fmt: skip
        return [action.__name__, action(), *self.state()]


def main() -> None:
    case = json.loads(sys.argv[1])
    start.configure(case["v2"], own=False)
    import torch

    torch.empty(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        program = Program(case, Path(folder))
        log = [program.state()]
        log += (program.step() for _ in range(case["steps"]))
        print("RESULT " + json.dumps({"log": log}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

"""A random program of a process that serves an engine and does other things.

The argument is a JSON object: "v2", "graphs", "lora", "sleep" (whether sleep mode is
enabled), "streams" (whether the engine may be called on a stream of the caller's:
stock's V2 runner reads tokens there before they are computed), "seed" and "steps".

A step generates (with or without logprobs, of the prompt, too; with adapters or not; in
this thread, another one or on a stream of the caller's), captures a CUDA graph, while
the engine generates or not, replays one, copies with a library that works on CUDA's
default stream, writes allocator settings that PyTorch accepts or refuses, forks,
allocates, frees and checks tensors, or lets the engine sleep.

Each step leaves a line of the "log": its action and its findings, whether the current
stream is the one before the start, PyTorch's settings (options and text), and its
limit. After them it generates "on_a_stream" of the caller's, whatever "streams" says.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scenarios import models, start
from bench.scenarios.result import print_result

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
# Not "global": a call of another thread's invalidates such a capture, with stock and
# patched, and both hang in the next generate.
CAPTURES = ("thread_local", "relaxed")
ADAPTERS = 3  # of which the engine holds 2


@dataclass
class Captured:
    """A graph that copies from the host, through memory of its own."""

    graph: Any
    source: Any
    copied: Any
    result: Any


class Program:
    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        import torch

        self.rng = random.Random(case["seed"])
        self.stream = torch.cuda.current_stream()
        # Made once: PyTorch hands out 32 streams, and then those of the engine.
        self.other, self.capturing = torch.cuda.Stream(), torch.cuda.Stream()
        self.held: list[tuple[Any, int]] = []
        self.source, self.target = (
            torch.zeros(SIZE, dtype=torch.uint8).pin_memory() for _ in range(2)
        )
        self.driver = ctypes.CDLL("libcuda.so.1")
        asked = {"v2": case["v2"], "graphs": case["graphs"], "caller": True}
        asked |= {"sleep": int(case["sleep"]), "folder": str(folder / "model")}
        self.adapters: list[Any] = [None]
        if case["lora"]:
            asked["llm"] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
            from vllm.lora.request import LoRARequest

            paths = models.write_loras("dense", folder, ADAPTERS)
            self.adapters += [
                LoRARequest(f"lora{i}", i, path) for i, path in enumerate(paths, 1)
            ]
        self.llm = start.engine(asked, {})
        self.streams = case["streams"]
        self.count_tokens()
        self.captured: list[Captured] = []
        self.actions = [
            self.generate, self.generate_in_a_thread, self.generate_on_a_stream,
            self.copy_on_the_default_stream, self.copy_on_the_default_stream,
            self.set_accepted, self.set_refused, self.fork, self.hold, self.free,
            self.check, self.capture, self.replay,
        ]  # fmt: skip
        if case["sleep"]:
            self.actions.append(self.sleep_and_wake_up)

    def count_tokens(self) -> None:
        """Let each token that is sampled be another one: kernels compute none."""
        import torch

        core = self.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        kind = type(runner.sampler)
        name = "forward" if issubclass(kind, torch.nn.Module) else "__call__"
        sample, tokens = getattr(kind, name), itertools.count(7)

        def counted(*arguments: Any, **options: Any) -> Any:
            output = sample(*arguments, **options)
            sampled = output.sampled_token_ids
            values = [next(tokens) % 30_000 for _ in range(sampled.numel())]
            counts = torch.tensor(values, dtype=sampled.dtype).view_as(sampled)
            sampled.copy_(counts.pin_memory(), non_blocking=True)
            return output

        setattr(kind, name, counted)

    def generate(self) -> list[Any]:
        """The tokens of each output, and of how many positions there are logprobs."""
        from vllm import SamplingParams

        rng = self.rng
        prompts: list[Any] = [
            {"prompt_token_ids": [7] * rng.randrange(1, 600)}
            for _ in range(rng.randrange(1, 5))
        ]
        parameters = SamplingParams(
            max_tokens=rng.randrange(1, 4), detokenize=False, ignore_eos=True,
            logprobs=rng.choice((None, 3)), prompt_logprobs=rng.choice((None, 0, 2)),
        )  # fmt: skip
        adapters = [rng.choice(self.adapters) for _ in prompts]
        outputs = self.llm.generate(
            prompts, parameters, use_tqdm=False, lora_request=adapters
        )
        return [
            [
                list(output.outputs[0].token_ids),
                len(output.outputs[0].logprobs or ()),
                len(output.prompt_logprobs or ()),
            ]
            for output in outputs
        ]

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

        stream = self.other if self.streams else self.stream
        with torch.cuda.stream(stream):
            return [self.generate(), torch.cuda.current_stream() == stream]

    def capture(self) -> list[Any]:
        """How a thread's capture ended, and the engine's tokens meanwhile."""
        import torch

        mode = self.rng.choice(CAPTURES)
        source = torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
        graph, begun, go = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
        ended = []

        def run() -> None:
            try:
                with torch.cuda.graph(
                    graph, stream=self.capturing, capture_error_mode=mode
                ):
                    copied = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
                    copied.copy_(source, non_blocking=True)
                    begun.set()
                    go.wait()
                    result = torch.empty_like(copied)
                    result.copy_(copied)
                self.captured.append(Captured(graph, source, copied, result))
                ended.append("captured")
            except RuntimeError as error:
                ended.append(str(error).splitlines()[0])
            finally:
                begun.set()

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        try:
            generated = self.generate() if self.rng.random() < 0.5 else None
        finally:
            go.set()
            thread.join()
        return [mode, ended, generated]

    def replay(self) -> list[list[int]]:
        """Of each graph: the value that it copied, and the one that was meant."""
        import torch

        found = []
        for one in self.captured:
            value = self.rng.randrange(1, 256)
            one.source.fill_(value)
            one.graph.replay()
            torch.cuda.synchronize()
            found.append([value, int(one.copied[-1]), int(one.result[0])])
        return found

    def sleep_and_wake_up(self) -> list[Any]:
        self.llm.sleep(level=1)
        meanwhile = [self.hold(), self.check(), self.copy_on_the_default_stream()]
        self.llm.wake_up()
        return meanwhile

    def three_tokens_on_a_stream(self) -> list[Any]:
        """Of one prompt, and whether the stream is still the current one."""
        import torch
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
        with torch.cuda.stream(self.other):
            (output,) = self.llm.generate(
                {"prompt_token_ids": [7] * 9}, parameters, use_tqdm=False
            )
            is_kept = torch.cuda.current_stream() == self.other
        return [list(output.outputs[0].token_ids), is_kept]

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
        while len(self.captured) > self.rng.randrange(1, 6):
            self.captured.pop(self.rng.randrange(len(self.captured)))
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
        action = self.rng.choice(self.actions)
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
        on_a_stream = program.three_tokens_on_a_stream()
        result = {"log": log, "on_a_stream": on_a_stream}
        print_result(result)
    os._exit(0)


if __name__ == "__main__":
    main()

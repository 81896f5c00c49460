"""Serve prompts while an allocation fails in one layer of one forward pass.

The argument is a JSON object; DEFAULTS lists its keys. Prints a RESULT line with what
each pass was given and did, for a generation without a failure and for each with one:
at each layer of the prefill and of a decode, in both passes of a step, in the logits,
and with an error other than out of memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.scenarios.result import print_result

MIB = 2**20
DEFAULTS: dict[str, Any] = {
    "model": "dense",
    "v2": True,
    "graphs": False,
    "compile": False,
    "thread": False,  # another thread of the process allocates and frees
    "allocator": "",  # PYTORCH_ALLOC_CONF
    "limit": False,  # PyTorch's limit fails the allocation, not the device
    "experts": False,  # allocations fail in routed experts, not in attention
    "llm": {},  # further arguments of LLM
}
TOKENS = 3
DEVICE_CALLS = "cudaMalloc*", "cuMemAlloc*", "cuMemCreate"


class Passes:
    """Watches the forward passes of an engine and lets allocations fail in them."""

    def __init__(self, runner: Any, limit: bool, experts: bool):
        self.limit = limit
        self.error: Exception | None = None  # raised instead
        self.seen: list[dict[str, Any]] = []
        self.at: tuple[int, int] | None = None  # step and layer; -1: the logits
        self.times = 0
        model = runner.get_model()
        # A pass that others see does not run again: they may see values kept here.
        run: Any = getattr(runner, "run_forward", None)
        if hasattr(run, "is_watched"):
            run.is_watched = lambda: False
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        compute_logits = model.compute_logits
        model.compute_logits = lambda *given: self.layer(-1, compute_logits, *given)
        context = runner.vllm_config.compilation_config.static_forward_context
        part, *names = (
            ("routed_experts", "forward_modular", "forward_monolithic")
            if experts
            else ("impl", "forward")
        )
        layers = [layer for layer in context.values() if hasattr(layer, part)]
        self.layers = len(layers)
        for index, layer in enumerate(layers):
            for name in names:
                self.watch(index, getattr(layer, part), name)

    def watch(self, index: int, part: Any, name: str) -> None:
        forward = getattr(part, name)

        def watched(*given: Any, **named: Any) -> Any:
            return self.layer(index, forward, *given, **named)

        object.__setattr__(part, name, watched)

    def begin(self, _: Any, given: Any, named: Any) -> None:
        import torch

        torch.cuda.synchronize()
        ids = named["input_ids"]
        self.seen.append(
            {
                "ids": None if ids is None else ids.tolist(),
                "layers": [],
                "held": torch.cuda.memory_allocated(),
            }
        )

    def layer(
        self, index: int, forward: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        if index >= 0 and self.seen:
            self.seen[-1]["layers"].append(index)
        if self.times and self.at == (len(self.seen) - 1, index):
            step = self.at[0]
            self.times -= 1
            self.at = (step + 1, index)
            if self.error is not None:
                raise self.error
            allocate_in_vain(self.limit)
        return forward(*given, **named)


def allocate_in_vain(limit: bool) -> None:
    import torch

    from vgpu import control

    torch.cuda.empty_cache()  # none of it cached
    before = torch.cuda.get_per_process_memory_fraction()
    if limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    else:
        for call in DEVICE_CALLS:
            control.inject(call, times=1000, over=MIB)
    try:
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        control.clear_injections()
        if limit:
            torch.cuda.set_per_process_memory_fraction(before)


@contextmanager
def company(wanted: bool) -> Iterator[None]:
    """Another thread, as a trainer's, on a stream of its own."""
    import torch

    done = threading.Event()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                with suppress(torch.OutOfMemoryError):  # It may fail here instead.
                    kept = [torch.empty(MIB << i, device="cuda") for i in range(4)]
                    del kept[::2]
                    torch.cuda.empty_cache()

    thread = threading.Thread(target=work)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if wanted:
            thread.join()


def main() -> None:
    case = DEFAULTS | json.loads(sys.argv[1])
    if case["allocator"]:
        os.environ["PYTORCH_ALLOC_CONF"] = case["allocator"]
    from bench.scenarios import start

    keys = "model", "v2", "graphs", "compile", "llm"
    with tempfile.TemporaryDirectory() as folder:
        started = {key: case[key] for key in keys} | {"folder": str(Path(folder, "m"))}
        llm = start.engine(started, {})
        with company(case["thread"]):
            result = serve(llm, case["limit"], case["experts"])
    print_result(result)


def serve(llm: Any, limit: bool, experts: bool) -> dict[str, Any]:
    import torch

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    passes = Passes(runner, limit, experts)
    runs = [generate(llm, passes, None)]
    failures = [(step, layer) for step in (0, 1) for layer in range(passes.layers)]
    for at in failures:
        runs.append(generate(llm, passes, at))
    runs.append(generate(llm, passes, (0, 1), times=2))
    runs.append(generate(llm, passes, (0, -1)))
    passes.error = RuntimeError("shapes differ")
    try:
        raise torch.OutOfMemoryError("Memory was short before.")
    except torch.OutOfMemoryError:  # which the caller handles while it generates
        runs.append(generate(llm, passes, (0, 1)))
    runs.append(generate(llm, passes, None))
    return {"layers": passes.layers, "runs": runs}


def generate(
    llm: Any, passes: Passes, at: tuple[int, int] | None, times: int = 1
) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    engine = llm.llm_engine
    passes.seen.clear()
    passes.at, passes.times = at, times if at else 0
    result: dict[str, Any] = {"at": at, "times": passes.times, "outcome": "served"}
    parameters = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, detokenize=False, ignore_eos=True
    )
    for i in range(3):
        prompt = {"prompt_token_ids": list(range(3 + i, 40 + 20 * i))}
        engine.add_request(str(i), prompt, parameters)
    lengths = []
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    lengths.append(len(output.outputs[0].token_ids))
    except torch.OutOfMemoryError as error:
        result |= {"outcome": "OutOfMemoryError", "error": str(error)}
    except Exception as error:  # an outcome, not an accident
        result |= {"outcome": type(error).__name__, "error": str(error)[:2000]}
    if result["outcome"] != "served":
        names = list(engine.output_processor.request_states)
        engine.abort_request(names, internal=True)
        engine.step()
    left = passes.times
    passes.times = 0
    return result | {"left": left, "lengths": lengths, "passes": list(passes.seen)}


if __name__ == "__main__":
    main()

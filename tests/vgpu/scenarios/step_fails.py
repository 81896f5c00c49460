"""Serve prompts while an allocation fails in one layer of one forward pass.

The argument is a JSON object; DEFAULTS lists its keys. Prints a RESULT line with what a
generation without a failure did, and each with one: in a layer of the prefill and of a
decode, in the logits, and with an error other than out of memory.
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
    "v2": True,
    "thread": False,  # another thread of the process allocates and frees
    "allocator": "",  # PYTORCH_ALLOC_CONF
    "limit": False,  # PyTorch's limit fails the allocation, not the device
}
TOKENS = 3
DEVICE_CALLS = "cudaMalloc*", "cuMemAlloc*", "cuMemCreate"


class Passes:
    """Watches the forward passes of an engine and lets allocations fail in them."""

    def __init__(self, runner: Any, limit: bool):
        self.limit = limit
        self.error: Exception | None = None  # raised instead
        self.seen: list[list[int]] = []  # layers of each pass
        self.at: tuple[int, int] | None = None  # step and layer; -1: the logits
        model = runner.get_model()
        model.register_forward_pre_hook(lambda *_: self.seen.append([]))
        compute_logits = model.compute_logits
        model.compute_logits = lambda *given: self.layer(-1, compute_logits, *given)
        context = runner.vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if hasattr(layer, "impl")]
        self.layers = len(layers)
        for index, layer in enumerate(layers):
            self.watch(index, layer.impl, "forward")

    def watch(self, index: int, part: Any, name: str) -> None:
        forward = getattr(part, name)

        def watched(*given: Any, **named: Any) -> Any:
            return self.layer(index, forward, *given, **named)

        object.__setattr__(part, name, watched)

    def layer(
        self, index: int, forward: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        if index >= 0 and self.seen:
            self.seen[-1].append(index)
        if self.at == (len(self.seen) - 1, index):
            self.at = None
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

    with tempfile.TemporaryDirectory() as folder:
        started = {"v2": case["v2"], "folder": str(Path(folder, "m"))}
        llm = start.engine(started, {})
        with company(case["thread"]):
            runs = serve(llm, case["limit"])
    print_result({"runs": runs})


def serve(llm: Any, limit: bool) -> list[dict[str, Any]]:
    import torch

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    passes = Passes(runner, limit)
    last = passes.layers - 1
    failures = [None, (0, 0), (0, last), (1, last), (0, -1)]
    runs = [generate(llm, passes, at) for at in failures]
    passes.error = RuntimeError("shapes differ")
    try:
        raise torch.OutOfMemoryError("Memory was short before.")
    except torch.OutOfMemoryError:  # which the caller handles while it generates
        runs.append(generate(llm, passes, (0, 1)))
    return [*runs, generate(llm, passes, None)]


def generate(llm: Any, passes: Passes, at: tuple[int, int] | None) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    engine = llm.llm_engine
    passes.seen.clear()
    passes.at = at
    result: dict[str, Any] = {"outcome": "served"}
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
    passes.at = None
    return result | {"lengths": lengths, "layers": list(passes.seen)}


if __name__ == "__main__":
    main()

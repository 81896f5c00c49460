"""Serve loads with exactly the memory that was requested, and say which die.

The argument is a JSON object; DEFAULTS lists its keys. The engine starts on a device
with memory to spare. Another process then takes all that was not requested; with
"buffers", it leaves more or less, by the difference to the engine's own buffer. If it
is "alone", nobody takes anything.

Of a list of such objects, each is served in a process forked from this one, which has
imported vLLM; prints a RESULT line for each.
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.scenarios import start
from bench.scenarios.loads import ALL_OF_THE_SAMPLER, LOADS, Load, with_image
from bench.scenarios.on_the_host import compute_on_host, inspect_models_here
from bench.scenarios.result import print_result
from bench.scenarios.start_each import import_vllm, in_fork, tell_death

MIB = 2**20
DEFAULTS: dict[str, Any] = {
    "model": "llama-8b",
    "load": "mixed",  # of LOADS
    "steps": 0,  # at least so many steps: requests keep coming
    "v2": False,
    "graphs": False,
    "compile": False,
    "lora": False,
    "draft": 0,  # tokens that an EAGLE head of the model proposes
    "seeds": [0],  # a load each
    # MiB, or None: the engine's own reserve. Each load is served with one after
    # the other until it lives.
    "buffers": [None],
    "largest": False,  # serve the largest batches before the loads
    # Or steps in MiB: the least reserve with which each load is served, first without
    # "steps", then with them. Each is at least that of the one before; see least().
    "grain": 0,
    # Then no reserve is tried with which the KV cache would have fewer tokens.
    "beat": 0,
    "alone": False,
    "llm": {},  # further arguments of LLM
}
MOST = 4096  # MiB that are tried with "grain"
# Beside start.ENGINE.
ENGINE: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
}
# Of the driver; the runtime's are calls of these. The last waits for all that runs.
CALLS = {
    "malloc": "cuMemAlloc*",
    "free": "cuMemFree*",
    "create": "cuMemCreate",
    "map": "cuMemMap",
    "set access": "cuMemSetAccess",
    "unmap": "cuMemUnmap",
    "release": "cuMemRelease",
    "synchronize": "cuda[DS]*Synchronize",  # of the runtime: device or stream
}


def main() -> None:
    cases = json.loads(sys.argv[1])
    if isinstance(cases, dict):
        serve_one(cases)
        return
    import_vllm()
    for case in cases:
        tell_death(in_fork(partial(serve_one, case)))


def serve_one(asked: dict[str, Any]) -> None:
    assert asked.keys() <= DEFAULTS.keys(), asked
    case = DEFAULTS | asked
    start.configure(case["v2"])
    with tempfile.TemporaryDirectory() as folder:
        print_result(serve(case, Path(folder)))


def serve(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch
    from vllm import LLM
    from vllm.config import CacheConfig

    from bench.scenarios import models
    from vgpu import control

    arguments = ENGINE | {"enforce_eager": not case["graphs"]}
    if case["graphs"]:
        mode = {} if case["compile"] else {"mode": 0, "cudagraph_mode": "FULL"}
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
        arguments["compilation_config"] = sizes | mode
    if case["lora"]:
        arguments |= {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
    if case["draft"]:
        arguments["speculative_config"] = {
            "method": "eagle",
            "model": models.write(case["model"] + " draft", folder / "draft"),
            "num_speculative_tokens": case["draft"],
        }
    if LOADS[case["load"]].images:
        arguments["skip_tokenizer_init"] = False
        arguments["limit_mm_per_prompt"] = {"image": 1, "video": 0}
    arguments = start.ENGINE | arguments | case["llm"]
    inspect_models_here()
    compute_on_host(models.MODELS[case["model"]], arguments)
    if not hasattr(CacheConfig, "gpu_memory_limit_bytes"):  # stock
        arguments.pop("gpu_memory_limit_bytes", None)
    before = control.process_used()
    llm = LLM(models.write(case["model"], folder / "model"), **arguments)
    engine = llm.llm_engine
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    cache = engine.vllm_config.cache_config
    # Not by the worker's first snapshot: in the release, cuBLAS's workspaces are there.
    budget = before + int(worker.requested_memory)
    above = max(0, control.process_peak() - budget)
    loras = models.write_loras(case["model"], folder, 8) if case["lora"] else []
    set_aside = start.set_aside(worker) or 0
    kind = LOADS[case["load"]]
    runs: list[dict[str, Any]] = []

    available = int(worker.available_kv_cache_memory_bytes)
    # Tensors of a hybrid lie on top of each other.
    block = available // cache.num_gpu_blocks

    def lives(seed: int | None, steps: int, buffer: int | None) -> bool:
        """Whether a load is served with this reserve; None: the largest batches."""
        gc.collect()  # memory that the frames of an exception held
        torch.cuda.empty_cache()
        size = set_aside if buffer is None else buffer * MIB
        limit = budget + size - set_aside
        if not case["alone"]:
            control.other_process(max(0, control.memory() - limit))
        if seed is None:
            run = largest_batches(llm)
        else:
            run = load(engine, kind, random.Random(seed), loras, limit, steps)
        run["process_peak"] = control.process_peak()
        run["process_held"] = control.process_used()
        runs.append({"seed": seed, "buffer": size} | run)
        control.other_process(-control.other())
        if run["outcome"] != "served":
            forget_step(engine)
        return bool(run["outcome"] == "served")

    loads = [(seed, case["steps"]) for seed in case["seeds"]]
    if case["largest"]:
        loads.insert(0, (None, 0))
    needed: int | None = None
    if grain := case["grain"]:
        needed = math.ceil(above / MIB / grain) * grain
        most = (available - case["beat"] // cache.block_size * block) // MIB
        for seed, steps in [(seed, 0) for seed, _ in loads] + loads:
            if needed is not None:
                serves = partial(lives, seed, steps)
                needed = least(serves, needed, grain, min(most, MOST))
    else:
        for seed, steps in loads:
            any(lives(seed, steps, buffer) for buffer in case["buffers"])
    return {
        "start_above": above,
        "needed": needed,  # MiB, with "grain"; None: more than was tried
        "block": block,  # bytes
        "block_size": cache.block_size,
        "activations": worker.peak_activation_memory,
        "tokens": cache.num_gpu_blocks * cache.block_size,
        "available": available,
        "set_aside": set_aside,
        "runs": runs,
    }


def least(
    lives: Callable[[int], bool], known: int, grain: int, most: int
) -> int | None:
    """The least number that lives, `known` and multiples of `grain` more; None: none up
    to `most`. What is above one that lives, lives."""
    if lives(known):
        return known
    died, step = known, grain
    while not lives(lived := died + step):
        died, step = lived, 2 * step
        if died >= most:
            return None
    while lived - died > grain:
        middle = died + (lived - died) // (2 * grain) * grain
        if lives(middle):
            lived = middle
        else:
            died = middle
    return lived


def forget_step(engine: Any) -> None:
    """Forget a step that failed: what was queued behind it would be the result of the
    next one, and holds tensors."""
    core = engine.engine_core.engine_core
    if core.batch_queue:
        core.batch_queue.clear()
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.execute_model_state = None


def largest_batches(llm: Any) -> dict[str, Any]:
    """Serve the largest batches, as a load."""
    served = start.serve(llm)
    if served == "lives":
        asked = ALL_OF_THE_SAMPLER
        if llm.llm_engine.vllm_config.speculative_config:  # refuses these
            refused = {"min_p", "logit_bias"}
            asked = {key: asked[key] for key in asked.keys() - refused}
        served = start.serve(llm, **asked)
    if served == "lives":
        return {"outcome": "served", "each_step": []}
    engine = llm.llm_engine
    requests = list(engine.output_processor.request_states)
    engine.abort_request(requests, internal=True)
    return {"outcome": "OOM", "error": served, "each_step": []}


def load(
    engine: Any,
    kind: Load,
    rng: random.Random,
    loras: list[str],
    limit: int,
    least_steps: int,
) -> dict[str, Any]:
    """Serve requests in `limit` bytes.

    "each_step" has the tokens that a step computed and how often it made each of CALLS.
    """
    import torch

    from bench.scenarios import device
    from vgpu import control

    last = calls()
    steps = arrived = 0
    each_step: list[list[int]] = []
    computed = count_computed(engine)
    result: dict[str, Any] = {"outcome": "served"}
    try:
        while engine.has_unfinished_requests() or (
            arrived < kind.requests or steps < least_steps
        ):
            come = rng.choice(kind.bursts)
            if steps >= least_steps:
                come = min(come, max(0, kind.requests - arrived))
            elif engine.get_num_unfinished_requests() >= kind.requests:
                come = 0  # enough requests wait
            for _ in range(come):
                request(engine, kind, rng, str(arrived), loras)
                arrived += 1
            computed.clear()
            engine.step()
            steps += 1
            now = calls()
            made = [n - before for n, before in zip(now, last, strict=True)]
            each_step.append([sum(computed), *made])
            last = now
    except RuntimeError as error:
        if not device.is_out_of_memory(error):
            raise
        stats = torch.cuda.memory_stats()
        tried, unit = str(error).split("allocate ")[1].split()[:2]
        wanted = float(tried) * {"KiB": 2**10, "MiB": MIB, "GiB": 2**30}[unit[:3]]
        outside = control.process_used() - stats["reserved_bytes.all.current"]
        # What would be left if all that is not allocated were in one piece.
        spare = limit - outside - stats["allocated_bytes.all.current"] - int(wanted)
        result = {"outcome": "OOM", "error": str(error)[:200], "spare": spare}
        requests = list(engine.output_processor.request_states)
        engine.abort_request(requests, internal=True)
    return result | {"steps": steps, "each_step": each_step}


def calls() -> list[int]:
    """How often the process made each of CALLS, as the device counts them."""
    from vgpu import control

    return [control.made(pattern) for pattern in CALLS.values()]


def count_computed(engine: Any) -> list[int]:
    """The tokens of each step, as the scheduler sends them."""
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = type(scheduler).schedule
    computed: list[int] = []

    def scheduling(*arguments: Any, **options: Any) -> Any:
        output = schedule(scheduler, *arguments, **options)
        computed.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = scheduling
    return computed


def request(
    engine: Any, kind: Load, rng: random.Random, name: str, loras: list[str]
) -> None:
    """Add a request that is drawn from the load."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    longest = engine.vllm_config.model_config.max_model_len - max(kind.outputs)
    low, high = rng.choice(kind.prompts)
    prompt = [7] * rng.randrange(low, min(high, longest))
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.8)),
        top_p=rng.choice((1.0, 0.9)),
        max_tokens=rng.choice(kind.outputs),
        prompt_logprobs=1 if kind.prompt_logprobs and rng.random() < 0.5 else None,
        detokenize=False,
        ignore_eos=True,
    )
    lora = None
    if pick := rng.randrange(len(loras) + 1):
        lora = LoRARequest(str(pick), pick, loras[pick - 1])
    asked: dict[str, Any] = {"prompt_token_ids": prompt}
    if engine.vllm_config.model_config.runner_type == "pooling":
        from vllm import PoolingParams

        engine.add_request(name, asked, PoolingParams(task="embed"))
        return
    if kind.images and rng.random() < 0.5:
        size = rng.randrange(56, 1260), rng.randrange(56, 1260)
        asked = with_image(prompt, size)
    engine.add_request(name, asked, sampling, lora_request=lora)


if __name__ == "__main__":
    main()

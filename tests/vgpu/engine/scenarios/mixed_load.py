"""Serve mixed loads with exactly the memory that was requested, and say which die.

The argument is a JSON object; DEFAULTS lists its keys. The engine starts on a device
with room to spare; another process then takes all but what was requested, or as much
more or less as leaves a buffer other than the one that the KV cache left out. If it is
"alone", nobody takes anything.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import start

MIB = 2**20
DEFAULTS: dict[str, Any] = {
    "model": "llama-8b",
    "v2": False,
    "graphs": False,
    "compile": False,
    "lora": False,
    "requests": 40,
    "seeds": [0],  # a load each
    # MiB, or None: what the engine has set aside. Each load is served with one after
    # the other until it lives.
    "buffers": [None],
    "alone": False,
    "llm": {},  # further arguments of LLM
}
# Prompts: short ones are as many as medium and long ones together.
PROMPTS = ((8, 256), (8, 256), (256, 2048), (2048, 7800))
OUTPUTS = (1, 8, 32, 64)
BURSTS = (0, 0, 1, 1, 2, 4, 16)


def main() -> None:
    asked = json.loads(sys.argv[1])
    assert asked.keys() <= DEFAULTS.keys(), asked
    case = DEFAULTS | asked
    start.configure(case["v2"])
    with tempfile.TemporaryDirectory() as folder:
        print("RESULT " + json.dumps(serve(case, Path(folder))), flush=True)


def serve(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import models
    import torch
    from vllm import LLM

    from vgpu import control

    arguments: dict[str, Any] = {
        "max_model_len": 8192,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": not case["graphs"],
    }
    if case["graphs"]:
        mode = {} if case["compile"] else {"mode": 0, "cudagraph_mode": "FULL"}
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
        arguments["compilation_config"] = sizes | mode
    if case["lora"]:
        start.count_on_the_host()
        arguments |= {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
    profile_twice()
    llm = LLM(
        models.write(case["model"], folder / "model"),
        **(start.ENGINE | arguments | case["llm"]),
    )
    engine = llm.llm_engine
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    cache = engine.vllm_config.cache_config
    snapshot = worker.init_snapshot
    held = snapshot.total_memory - snapshot.free_memory
    budget = held + int(worker.requested_memory)
    loras = models.write_loras(case["model"], folder, 8) if case["lora"] else []
    set_aside = getattr(worker, "fragmentation_buffer", 0)  # none: the official release
    runs = []
    for seed in case["seeds"]:
        for buffer in case["buffers"]:
            gc.collect()  # what the frames of an exception held
            torch.cuda.empty_cache()
            size = set_aside if buffer is None else buffer * MIB
            limit = budget + size - set_aside
            if not case["alone"]:
                control.other_process(control.memory() - limit)
            run = load(engine, random.Random(seed), case["requests"], loras, limit)
            run["process_peak"] = control.process_peak()
            runs.append({"seed": seed, "buffer": size} | run)
            control.other_process(-control.other())
            if run["outcome"] == "served":
                break
    return {
        "activations": worker.peak_activation_memory,
        "tokens": cache.num_gpu_blocks * cache.block_size,
        "available": int(worker.available_kv_cache_memory_bytes),
        "set_aside": set_aside,
        "runs": runs,
    }


def profile_twice() -> None:
    """Make profiling run its pass a second time, as serving does.

    The first pass leaves buffers, of the sampler, after its peak: with them, the second
    one peaks higher (64 MiB of a Llama 8B with 8192 tokens a batch). A start does not
    see that, and needs that much more than these loads do.
    """
    from vllm.v1.worker.gpu_worker import Worker

    determine_available_memory = Worker.determine_available_memory

    def determine(worker: Any) -> int:
        runner = worker.model_runner
        profile_run = runner.profile_run

        def twice(**options: bool) -> None:
            profile_run(**options)
            profile_run(**options)

        runner.profile_run = twice
        try:
            return int(determine_available_memory(worker))
        finally:
            del runner.profile_run

    Worker.determine_available_memory = determine


def load(
    engine: Any, rng: random.Random, count: int, loras: list[str], limit: int
) -> dict[str, Any]:
    """Serve `count` requests that arrive at random in `limit` bytes."""
    import torch
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from vgpu import control

    longest = engine.vllm_config.model_config.max_model_len - max(OUTPUTS)
    stats = torch.cuda.memory_stats
    before = stats()
    steps = arrived = 0
    result: dict[str, Any] = {"outcome": "served"}
    try:
        while arrived < count or engine.has_unfinished_requests():
            for _ in range(min(rng.choice(BURSTS), count - arrived)):
                low, high = rng.choice(PROMPTS)
                prompt = [5] * rng.randrange(low, min(high, longest))
                sampling = SamplingParams(
                    temperature=rng.choice((0.0, 0.8)),
                    top_p=rng.choice((1.0, 0.9)),
                    max_tokens=rng.choice(OUTPUTS),
                    detokenize=False,
                    ignore_eos=True,
                )
                pick = rng.randrange(len(loras) + 1)
                engine.add_request(
                    str(arrived),
                    {"prompt_token_ids": prompt},
                    sampling,
                    lora_request=LoRARequest(str(pick), pick, loras[pick - 1])
                    if pick
                    else None,
                )
                arrived += 1
            engine.step()
            steps += 1
    except torch.OutOfMemoryError as error:
        now = stats()
        tried, unit = str(error).split("allocate ")[1].split()[:2]
        wanted = float(tried) * {"KiB": 2**10, "MiB": MIB, "GiB": 2**30}[unit[:3]]
        outside = control.process_used() - now["reserved_bytes.all.current"]
        # What would still be there if all that is not allocated were in one piece.
        spare = limit - outside - now["allocated_bytes.all.current"] - int(wanted)
        result = {"outcome": "OOM", "error": str(error)[:200], "spare": spare}
        requests = list(engine.output_processor.request_states)
        engine.abort_request(requests, internal=True)
    after = stats()
    counted = {"retries": "num_alloc_retries", "segments": "num_device_alloc"}
    return result | {
        "steps": steps,
        **{name: after[key] - before[key] for name, key in counted.items()},
    }


if __name__ == "__main__":
    main()

"""Serve with each connector of the KV cache, and each offloader of weights, that vLLM
itself has.

The argument is a JSON object: "ways", names of WAYS, and "v2". Prints a RESULT line for
each: memory of the engine, and how many bytes of the KV cache came back to it from the
connector. Each is run in a process of its own, forked before CUDA is used.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from bench.scenarios.result import print_result

MIB = 2**20
HOST = {"cpu_bytes_to_use": 64 * MIB}


def connector(name: str, **more: Any) -> dict[str, Any]:
    told = {"kv_connector": name, "kv_role": "kv_both"}
    return {"kv_transfer_config": told | {"kv_connector_extra_config": more}}


FILES = {"shared_storage_path": "FOLDER"}  # each engine has a folder of its own
WAYS: dict[str, dict[str, Any]] = {
    "native": {"kv_offloading_size": 0.0625},
    "tiers": connector(
        "OffloadingConnector",
        **HOST,
        spec_name="TieringOffloadingSpec",
        secondary_tiers=[{"type": "fs", "root_dir": "FOLDER"}],
    ),
    "simple": connector("SimpleCPUOffloadConnector", **HOST),
    "files": connector("ExampleConnector", **FILES),
    # Not with each request: how many blocks it fills then, a kernel says.
    "filled": connector("DecodeBenchConnector", startup_fill=True),
    "several": connector(
        "MultiConnector",
        connectors=[
            connector("OffloadingConnector", **HOST)["kv_transfer_config"],
            connector("ExampleConnector", **FILES)["kv_transfer_config"],
        ],
    ),
    "uva": {"cpu_offload_gb": 0.03},
    "prefetch": {
        "offload_group_size": 2,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
    },
}
# Those that other ways do not include.
FEW = ["native", "simple", "several"]


def engine(way: str, v2: bool) -> Any:
    from bench.scenarios import models, start

    start.configure(v2)
    from vllm import LLM

    from bench.scenarios.on_the_host import inspect_models_here

    inspect_models_here()
    folder = Path(tempfile.mkdtemp())
    more = json.loads(json.dumps(WAYS[way]).replace("FOLDER", str(folder / "kept")))
    eager = {"enable_prefix_caching": True, "enforce_eager": True}
    return LLM(models.write("dense", folder), **(start.ENGINE | eager | more))


def serve(llm: Any) -> list[int]:
    """Tokens of each prompt that were not computed again."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(i * 7 + j) % 30000 for j in range(450)]}
        for i in range(4)
    ]
    told = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    told.ignore_eos = True
    outputs = llm.generate(prompts, told, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 4
    return [output.num_cached_tokens for output in outputs]


def fill(worker: Any, byte: int) -> None:
    """All of the KV cache, by a copy: kernels do nothing."""
    import torch

    for cache in storages(worker):
        cache.copy_(torch.full(cache.shape, byte, dtype=torch.uint8))


def count(worker: Any, byte: int) -> int:
    return sum(int((cache.cpu() == byte).sum()) for cache in storages(worker))


def storages(worker: Any) -> list[Any]:
    import torch

    caches = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage()
        for cache in worker.model_runner.kv_caches
    }
    return [
        torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        for storage in caches.values()
    ]


def run(way: str, v2: bool) -> dict[str, Any]:
    from vgpu import control

    control.reset_peak()
    llm = engine(way, v2)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    result: dict[str, Any] = {
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "requested": int(worker.requested_memory),
    }
    result["cache"] = sum(cache.nbytes for cache in storages(worker))
    fill(worker, 7)
    serve(llm)
    serve(llm)  # some connectors keep what has ended only in a later step
    fill(worker, 0)
    llm.reset_prefix_cache()
    result["cached"] = serve(llm)
    result["back"] = count(worker, 7)
    result |= {"peak": control.peak(), "pinned": control.pinned()}
    return result


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    for way in asked["ways"]:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                result = run(way, asked["v2"])
            except BaseException as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
            print_result({"way": way} | result)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()

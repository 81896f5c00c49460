"""llm-d-planner's tokens of KV cache, by its capacity planner. Parameters come from the
built model, as the hub that it asks is not reached."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

GPU_GIB = 80  # as its catalogue has an H100


def main() -> None:
    peer = import_module("planner.capacity_planner")
    told = {row["id"]: of(peer, row) for row in json.load(sys.stdin)}
    print(json.dumps(told))


def of(peer: Any, row: dict[str, Any]) -> dict[str, Any]:
    if row["parameters"] is None:
        return {"error": "asks the hub for the checkpoint's types"}
    peer.model_params_by_dtype = lambda *_: {"BF16": row["parameters"]}
    config = {"torch_dtype": row["dtype"]} | row["config"]
    asked = json.loads(json.dumps(config), object_hook=lambda d: SimpleNamespace(**d))
    ranks = {"tp": row["tp"], "pp": row["pp"]}
    try:
        detail = peer.KVCacheDetail(row["id"], asked)
        room = peer.allocatable_kv_cache_memory(
            row["id"], asked, GPU_GIB, row["share"], **ranks
        )
    except Exception as error:
        return {"error": str(error)[:100]}
    # Of all GPUs, as its number of requests is counted. Its total_kv_cache_blocks
    # divides the memory of all by the bytes of a token on one.
    every = detail.per_token_memory_bytes
    tokens = int(room * 2**30 / every)
    return {"kv_tokens": tokens, "kv_bytes": every / (row["tp"] * row["pp"])}


if __name__ == "__main__":
    main()

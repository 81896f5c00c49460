"""hf-mem's bytes of KV cache of a token, without its look-ups on the hub. It knows no
card, no ranks and no release, so it has no number of tokens."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    peer = import_module("hf_mem.safetensors.kv_cache")
    told = {row["id"]: of(peer, row) for row in json.load(sys.stdin)}
    print(json.dumps(told))


def of(peer: Any, row: dict[str, Any]) -> dict[str, Any]:
    if row["tp"] * row["pp"] > 1:
        return {"error": "knows one GPU"}
    config = row["config"]
    text = config.get("text_config", config)
    text = {"torch_dtype": row["dtype"]} | config | text
    try:
        dtype = peer.resolve_kv_cache_dtype(text, row["kv_cache_dtype"], None, "")
        length = row["max_model_len"]
        size = peer.compute_safetensors_kv_cache_size(text, dtype, length)
    except Exception as error:
        return {"error": str(error)[:100]}
    return {"kv_bytes": size / length}


if __name__ == "__main__":
    main()

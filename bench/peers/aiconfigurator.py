"""AIConfigurator's tokens of KV cache, by its data of vLLM on an H100. Of the releases
that it has, "current" is the oldest that it answers for."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

RELEASE = "current"


def main() -> None:
    peer = import_module("aiconfigurator_core.sdk.memory")
    told = {row["id"]: of(peer, row) for row in json.load(sys.stdin)}
    print(json.dumps(told))


def of(peer: Any, row: dict[str, Any]) -> dict[str, Any]:
    modes = {}
    if row["kv_cache_dtype"].startswith("fp8"):
        modes["kvcache_quant_mode"] = "fp8"
    if row["quantization"] == "fp8":
        modes["gemm_quant_mode"] = "fp8"
    try:
        told = peer.estimate_kv_cache(
            row["folder"], "h100_sxm", "vllm", RELEASE,
            max_num_tokens=row["batch"], max_batch_size=row["max_num_seqs"],
            memory_fraction_kind="of_total", memory_fraction_value=row["share"],
            tp_size=row["tp"], pp_size=row["pp"], moe_tp_size=row["tp"],
            moe_ep_size=1, **modes,
        )  # fmt: skip
    except Exception as error:
        return {"error": str(error).rpartition("h100_sxm: ")[2][:100]}
    return {
        "kv_tokens": told["total_kv_size_tokens"],
        "kv_bytes": told["kv_size_per_token_bytes"],
        "weights": told["memory_breakdown"]["weights_bytes"],
        "activations": told["memory_breakdown"]["activations_bytes"],
    }


if __name__ == "__main__":
    main()

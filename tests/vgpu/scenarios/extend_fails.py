"""Extend a KV cache while one call of the driver after another fails.

The argument is a JSON object without keys. Prints a RESULT line with the state after
each failure: the bytes mapped and the blocks, minus those before, and the error.
"""

from __future__ import annotations

import sys

import torch

from bench.scenarios.result import print_result

CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")


def main() -> None:
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
    from vllm.v1.worker.extensible_kv_cache import ExtensibleKVCache

    from vgpu import control

    page, layers, blocks = 1 << 18, 4, 1024
    names = [f"layers.{i}" for i in range(layers)]
    tensor = KVCacheTensor(blocks * layers * page, names, blocks * page, page)
    torch.empty(1, device="cuda")
    failures = []
    nothing = used()
    cache = ExtensibleKVCache(
        KVCacheConfig(blocks, [tensor], []), torch.device("cuda", 0), sleeps=True
    )
    cache.extend(8)
    for call in CALLS:
        for nth in range(1, layers + 2):
            before = used(), cache.num_blocks
            injected = control.inject(call, nth=nth)
            failed = ""
            try:
                cache.extend(cache.num_blocks + 64)
            except RuntimeError as error:
                failed = str(error)
            left = used() - before[0], cache.num_blocks - before[1]
            fired = injected.fired
            control.clear_injections()
            failures.append(
                {"call": call, "fired": fired, "left": left, "error": failed}
            )
    mapped = cache.mapped_bytes
    held = used() - nothing
    cache.close()
    told = {"failures": failures, "mapped": mapped, "held": held}
    print_result(told | {"closed": used() - nothing})


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


if __name__ == "__main__":
    main()

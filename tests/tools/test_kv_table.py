"""make kv-table: bytes of KV cache by hand, and by vLLM's own code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import kv_table
from bench.model_files import SCHEME as SCHEME_FILE
from scripts.commands import REPOSITORY

CONFIGS = REPOSITORY / "results/real-cards/configs"
PLAIN = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# docs/kv-cache-of-models.md explains each.
DIFFER = {
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 4 * 2 * 2 * 64 * 2),
        ({"head_dim": 128}, 4 * 2 * 2 * 128 * 2),
        ({"quantization_config": FP8}, 4 * 2 * 2 * 64 * 2),  # of weights alone
        ({"quantization_config": FP8 | SCHEME}, 4 * 2 * 2 * 64),
        (LATENT, 4 * (512 + 64) * 2),
        (
            LATENT | {"index_head_dim": 128, "indexer_types": ["full", "shared"]},
            4 * (512 + 64) * 2 + 128 + 4,
        ),
        ({"hybrid_override_pattern": "ME*-ME*-"}, 2 * 2 * 2 * 64 * 2),
        (
            {
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "num_global_key_value_heads": 1,
                "global_head_dim": 256,
            },
            1 * 2 * 1 * 256 * 2,
        ),
        (
            {
                "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
                "num_kv_shared_layers": 3,
            },
            1 * 2 * 2 * 64 * 2,
        ),
        ({"num_attention_heads": None}, None),
    ],
)
def test_bytes_by_hand(changed: dict[str, Any], expected: int | None) -> None:
    assert kv_table.by_hand(PLAIN | changed) == expected
    quantized = {k: v for k, v in changed.items() if k == "quantization_config"}
    nested = quantized | {"text_config": PLAIN | changed}
    assert kv_table.by_hand(nested) == expected


def test_bytes_of_layers() -> None:
    full = {"layers": 2, "kind": "FullAttentionSpec", "page": 16 * 512, "block": 16}
    layers = [
        full | {"window": None},
        full | {"layers": 1, "kind": "SlidingWindowSpec", "window": 1024},
        {"layers": 1, "kind": "MambaSpec", "page": 4096, "block": 8, "window": None},
    ]
    assert kv_table.of_layers(layers) == (1024, 512, 4096)


def test_vllm_keeps_what_is_counted_by_hand() -> None:
    known = json.loads((REPOSITORY / kv_table.DATA).read_text())
    files = {
        file.stem: file
        for file in CONFIGS.glob("*.json")
        if not file.stem.endswith(SCHEME_FILE)
    }
    assert known.keys() == files.keys()
    assert len(known) >= 40
    counted = {
        name: kv_table.by_hand(kv_table.config_of(file)) for name, file in files.items()
    }
    assert {name: told["by_hand"] for name, told in known.items()} == counted
    differ = {
        name
        for name, told in known.items()
        if counted[name] is not None
        and counted[name] != kv_table.of_layers(told["specs"])[0]
    }
    assert differ == DIFFER

"""Each number that an error or a warning suggests, tried on the device that it was
printed for: the engine starts with it, serves its largest batches, and leaves the host
its reserve.

Those of the log of a start that succeeds: test_suggestion.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import HOOKS, run

MIB, GIB = 2**20, 2**30
CARD: dict[str, object] = {"memory": 8 * GIB}
UNIFIED: dict[str, object] = {"memory": 16 * GIB, "integrated": True}
# The part of its reserve that a host loses while an engine starts.
HOSTS_OWN = 128 * MIB
BUFFER = 64 * MIB  # set aside for fragmentation
# A state for each sequence.
HYBRID: dict[str, Any] = {
    "model": "hybrid",
    "graphs": True,
    "llm": {
        "max_num_seqs": 128,
        "gdn_prefill_backend": "triton",
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": [1, 128],
        },
    },
}


def asks(then: dict[str, Any], serve: bool | str = True, **llm: Any) -> dict[str, Any]:
    """The case, with other arguments of LLM."""
    return then | {"serve": serve, "llm": then.get("llm", {}) | llm}


# The numbers that a start suggests, and its result, as cases that shall start.
Then = Callable[[dict[str, Any], dict[str, Any], tuple[str, ...]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Says:
    """A start that suggests a number, with a pattern for it."""

    case: dict[str, Any]
    pattern: str
    then: Then
    device: Mapping[str, object] = field(default_factory=lambda: CARD)
    outcome: str = "ValueError"
    official: bool = False  # says it, too
    reserve: int = 0  # bytes that the host keeps


def fits_now(serve: bool | str) -> Then:
    return lambda case, _, said: [
        asks(case, serve, gpu_memory_utilization=float(said[0])),
        asks(case, serve, gpu_memory_limit_bytes=int(said[1])),
    ]


def that_kv_cache(case: dict[str, Any], _: dict[str, Any], said: Any) -> Any:
    return [asks(case, "alone", kv_cache_memory_bytes=int(said[0]))]


FITS_NOW = r"at most (\S+) fits now.*at most (\d+) fits now"
SAYS = {
    "a neighbour": Says(
        {"held": 5 * GIB, "llm": {"gpu_memory_utilization": 0.9}},
        FITS_NOW,
        fits_now(True),
    ),
    "a tenant of unified memory": Says(
        {"llm": {"gpu_memory_utilization": 0.9}},
        FITS_NOW,
        fits_now("alone"),
        UNIFIED | {"other": 6 * GIB},
        reserve=2 * GIB,
    ),
    "a limit that takes the host's reserve": Says(
        {"llm": {"gpu_memory_utilization": 1, "gpu_memory_limit_bytes": 14 * GIB}},
        r"set gpu_memory_limit_bytes to at most (\d+)",
        lambda case, _, said: [
            asks(case, "alone", gpu_memory_limit_bytes=int(said[0]))
        ],
        UNIFIED | {"other": GIB // 2},
        outcome="started",
        reserve=31 * GIB // 10,
    ),
    "bytes of KV cache that take it": Says(
        {"llm": {"kv_cache_memory_bytes": 13 * GIB}},
        r"set kv_cache_memory_bytes to at most (\d+)\.",
        that_kv_cache,
        UNIFIED | {"other": GIB // 2},
        outcome="started",
        # A fifth of the memory available next to the model.
        reserve=3 * GIB,
    ),
    "bytes of KV cache that are not free": Says(
        {
            "report": True,
            "held": GIB,
            "graphs": True,
            "llm": {"kv_cache_memory_bytes": 8 * GIB},
        },
        r"set kv_cache_memory_bytes to at most (\d+), or leave",
        that_kv_cache,
    ),
    "bytes of KV cache, and a limit": Says(
        {
            "graphs": True,
            "llm": {
                "kv_cache_memory_bytes": 3040 * MIB,
                "gpu_memory_limit_bytes": 3 * GIB,
            },
        },
        r"set kv_cache_memory_bytes to at most (\d+), or leave",
        lambda case, _, said: [asks(case, kv_cache_memory_bytes=int(said[0]))],
    ),
    "a limit above the device": Says(
        {"llm": {"gpu_memory_limit_bytes": 9 * GIB, "gpu_memory_utilization": 0.9}},
        r"Set it to at most (\d+) or leave it out",
        lambda case, _, said: [asks(case, gpu_memory_limit_bytes=int(said[0]))],
    ),
    "blocks of states": Says(
        HYBRID | {"llm": HYBRID["llm"] | {"kv_cache_memory_bytes": 256 * MIB}},
        r"lower max_num_seqs to at most (\d+)",
        lambda case, _, said: [asks(case, "alone", max_num_seqs=int(said[0]))],
        official=True,
    ),
    "the length of a request": Says(
        {
            "llm": {
                "gpu_memory_utilization": 0.07,
                "max_model_len": 131072,
                "hf_overrides": {"max_position_embeddings": 131072},
            }
        },
        r"estimated maximum model length is (\d+)",
        lambda case, _, said: [asks(case, max_model_len=int(said[0]))],
        official=True,
    ),
}


def start(
    case: dict[str, Any], says: Says, folder: Path, vllm: str = "envelope"
) -> tuple[dict[str, Any], str]:
    """The result, and all that was said."""
    result = run(
        "start", case, vllm=vllm, device=says.device, hooks=HOOKS, folder=folder
    )
    return result, result.get("error", "") + result["stdout"] + result["stderr"]


def tried(says: Says, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Starts with each number that a start suggests."""
    first, text = start(says.case, says, folder)
    assert first["outcome"] == says.outcome, first
    said = re.search(says.pattern, " ".join(text.split()))
    assert said, text[-3000:]
    for case in says.then(says.case, first, said.groups()):
        print(case)
        yield start(case, says, folder)


@pytest.mark.parametrize("name", SAYS)
def test_number_that_is_suggested_starts_and_serves(name: str, tmp_path: Path) -> None:
    says = SAYS[name]
    _, text = start(says.case, says, tmp_path, "official")
    assert bool(re.search(says.pattern, " ".join(text.split()))) == says.official
    for result, text in tried(says, tmp_path):
        assert result["outcome"] == "started", result["error"]
        assert result["served"] == "lives", result["served"]
        if not says.reserve:  # The host's available memory moves from start to start.
            assert not re.search(says.pattern, " ".join(text.split()))
        assert result["least_available"] >= max(says.reserve - HOSTS_OWN, 0)


def test_bytes_of_kv_cache_beside_which_a_step_does_not_fit(tmp_path: Path) -> None:
    """They are free, so the engine starts, as with the release; the log says that a
    full batch will run out of memory, and with which bytes it does not."""
    full = SAYS["bytes of KV cache that are not free"]
    long: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
    eager = full.case | {"graphs": False}
    refused, text = start(asks(eager, **long), full, tmp_path)
    said = re.search(full.pattern, text)
    assert said, refused
    size = int(said[1]) + BUFFER + refused["report"]["peak_activations"] // 2
    says = Says(
        asks(eager, "alone", kv_cache_memory_bytes=size, **long),
        r"To avoid that, set kv_cache_memory_bytes to at most (\d+)",
        lambda case, _, said: [asks(case, "alone", kv_cache_memory_bytes=int(said[0]))],
        outcome="started",
    )
    official, _ = start(says.case | {"report": False}, says, tmp_path, "official")
    assert "out of memory" in official["served"], official
    for result, text in tried(says, tmp_path):
        assert result["served"] == "lives", result
        assert not re.search(says.pattern, text)
        assert result["blocks"] > official["blocks"] * 0.9

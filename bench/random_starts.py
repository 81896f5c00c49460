"""Start engines that are drawn at random, unpatched beside patched: judge each pair.

Drawn are the device, the model and its runner, batches, CUDA graphs, how much memory is
asked for and in which words, features, and company: a neighbour that holds memory, for
a moment or for good, hidden from NVML or not, a caller's tensors, a thread that
allocates. Some engines have several ranks (TP, DP with experts, DCP), whose company is
a neighbour. Each serves its largest batches while another process holds all that was
not requested, and no batch may name a block that is not mapped (block_ids.py). Of
several ranks, the release has as much memory as it needs to serve.

Ours is worse if it does not start or serve where the release does, takes more than its
request untold or where the release keeps within, or has a KV cache that is over 128 MiB
smaller, unless the release is above its request by more. Prints a line a start; ends
with 1 if ours is worse in one. The line names the seed of its start: `--seed 7.3
--count 1` repeats it alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.scenarios.loads import NGRAM
from bench.virtual import HOOKS, SITES, environment_of, recorded, results
from scripts.commands import Problem, command, write_whole
from scripts.release import Base

MIB, GIB = 1 << 20, 1 << 30
ALLOWED = 128 * MIB
MARLIN = {"moe_backend": "marlin", "linear_backend": "marlin"}
# With the needs of each; a long name is drawn as often as a short one.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {},
    "shared experts": {},
    "sliding": {},
    "GPT-OSS": {},
    "MLA": {},
    "MLA, 64 experts": {},
    "hybrid": {"gdn_prefill_backend": "triton", "max_model_len": 4096},
    "Mamba1": {},
    "Mamba2": {},
    "LFM2": {},
    "vision": {"max_num_batched_tokens": 4096},
    "GPTQ experts": MARLIN,
    "AWQ experts": MARLIN,
    "FP8 experts": {},
    "MXFP4": {},
    "pooling": {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False},
}
MLA_BACKENDS = ("TRITON_MLA", "FLASH_ATTN_MLA")
# Engines of several ranks: what asks for them, and models that do.
RANKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "TP 2": ({}, ("dense", "moe", "MLA")),
    "DP 2 with experts": ({"data_parallel": 2}, ("moe", "MLA, 64 experts")),
    "TP 2, DCP 2": ({}, ("MLA", "MLA, 64 experts")),
}
# Of the device, as where NVML does not tell processes apart.
HIDDEN = {'nvml_errors."nvmlDeviceGet*RunningProcesses*"': "NoPermission"}


@dataclass(frozen=True)
class Start:
    seed: str
    name: str
    scenario: str  # "start_each" or "ranks"
    case: dict[str, Any]  # of scenarios/start.py or scenarios/ranks.py
    ours: dict[str, Any]  # arguments of LLM that the release has not


def device(seed: int) -> dict[str, Any]:
    rng = random.Random(f"device {seed}")
    told: dict[str, Any] = {"memory": rng.choice((4, 8, 24)) * GIB}
    told |= rng.choice(({}, {"graph": 700 << 10}, {"graph": 2 << 20}))
    # Without one, NVML would seem not to count the process (see MemoryOutsideTorch).
    told["context"] = rng.choice((64, 400)) * MIB
    return told | (HIDDEN if rng.random() < 0.5 else {})


def draw(seed: int, number: int, card: dict[str, Any]) -> Start:
    memory = card["memory"]
    rng = random.Random(f"start {seed}.{number}")
    ranks = rng.choice(list(RANKS)) if rng.random() < 0.2 else ""
    several, models = RANKS.get(ranks, ({}, tuple(MODELS)))
    model = rng.choice(models)
    share = round(rng.uniform(0.3, 0.95), 3)
    sequences = rng.choice((4, 16, 64, 128, 256))
    llm: dict[str, Any] = {
        "gpu_memory_utilization": share,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(rng.choice((512, 2048, 8192)), sequences),
        "max_model_len": rng.choice((1024, 2048, 8192)),
    }
    llm |= MODELS[model]
    v2 = rng.random() < 0.6
    case: dict[str, Any] = {"model": model, "v2": v2}
    words = [model, "V2" if v2 else "V1", f"{share}", f"{sequences} sequences"]
    if model.startswith("MLA"):
        llm["attention_backend"] = rng.choice(MLA_BACKENDS)
        words.append(llm["attention_backend"])
    if ranks:
        words.append(ranks)
        case |= several | {"largest": True, "patience": 240}
        if "DP" in ranks:
            llm["enable_expert_parallel"] = True
        else:
            llm["tensor_parallel_size"] = 2
        if "DCP" in ranks:
            llm["decode_context_parallel_size"] = 2
    else:
        case |= {"serve": True, "context": card["context"]}
    words.append(f"{llm['max_num_batched_tokens']} tokens")
    mode = rng.choice(("eager", "FULL", "FULL_DECODE_ONLY") * 2 + ("PIECEWISE",))
    if mode != "eager":
        case["graphs"] = True
        config: dict[str, Any] = {"cudagraph_mode": mode}
        if mode != "PIECEWISE":
            config["mode"] = 0
        config["cudagraph_capture_sizes"] = rng.choice(([1, 2, 4, 8], [1, 16, 256]))
        llm["compilation_config"] = config
    words.append(mode)
    ours: dict[str, Any] = {}
    words += features(rng, model, case, llm)
    words += company(rng, case, share, memory)
    if rng.random() < 0.25:
        words.append(asked_otherwise(rng, llm, ours, share, memory))
    scenario = "ranks" if ranks else "start_each"
    name = ", ".join(words)
    return Start(f"{seed}.{number}", name, scenario, case | {"llm": llm}, ours)


def features(
    rng: random.Random, model: str, case: dict[str, Any], llm: dict[str, Any]
) -> Iterator[str]:
    drafts = {"dense": ["ngrams", "EAGLE"], "moe": ["ngrams"], "hybrid": ["ngrams"]}
    more = ["", "", *drafts.get(model, []), *["LoRA"] * (model in ("dense", "moe"))]
    match rng.choice(more):
        case "LoRA":
            llm |= {"enable_lora": True, "max_loras": rng.choice((1, 4))}
            yield "LoRA"
        case "ngrams":
            llm["speculative_config"] = NGRAM
            yield "ngrams"
        case "EAGLE" if "serve" in case:  # of one rank
            case["draft"] = rng.choice((1, 3))
            yield "EAGLE"
    if model in ("dense", "moe", "sliding") and rng.random() < 0.2:
        llm["kv_cache_dtype"] = "fp8"
        yield "KV cache in fp8"
    llm["enable_prefix_caching"] = rng.random() < 0.2 and model != "pooling"
    if llm["enable_prefix_caching"]:
        yield "prefix caching"
    if model in ("dense", "moe", "MLA", "hybrid") and rng.random() < 0.15:
        llm["kv_offloading_size"] = 0.25
        # Hybrids are offloaded with prefix caching alone, by an assertion of vLLM's.
        llm["enable_prefix_caching"] |= model == "hybrid"
        yield "KV cache offloaded"
    if model == "dense" and rng.random() < 0.15:
        llm["cpu_offload_gb"] = 0.05
        yield "weights offloaded"
    if "serve" in case and rng.random() < 0.1:
        llm["enable_sleep_mode"] = True
        yield "sleep mode"


def company(
    rng: random.Random, case: dict[str, Any], share: float, memory: int
) -> Iterator[str]:
    free = int((1 - share) * memory) - GIB // 2
    if free > 0 and rng.random() < 0.3:
        held = rng.randrange(free)
        case["held"] = held if "serve" in case else [held, held]
        yield f"{held >> 20} MiB held by a neighbour"
    if "serve" not in case:
        return
    if rng.random() < 0.3:
        case["moment"] = rng.choice(("profiled", "torn down", "warming up", "warm"))
        case["moment_holds"] = rng.choice((300 * MIB, GIB, -256 * MIB))
        yield f"{case['moment_holds'] >> 20} MiB for a moment, {case['moment']}"
    if rng.random() < 0.2:
        case["tensors"] = rng.choice((100 * MIB, 300 * MIB))
        yield f"{case['tensors'] >> 20} MiB of tensors"
    if rng.random() < 0.15:
        case["thread"] = rng.choice((4 * MIB, 24 * MIB))
        yield f"a thread that allocates {case['thread'] >> 20} MiB"


def asked_otherwise(
    rng: random.Random,
    llm: dict[str, Any],
    ours: dict[str, Any],
    share: float,
    memory: int,
) -> str:
    """Than by the fraction alone."""
    match rng.choice(("limit", "bytes", "extensible")):
        case "limit":
            ours["gpu_memory_limit_bytes"] = int(share * memory)
            return "a limit in bytes"
        case "bytes":
            llm["kv_cache_memory_bytes"] = int(share * memory * rng.uniform(0.2, 0.5))
            return f"{llm['kv_cache_memory_bytes'] >> 20} MiB of KV cache"
    llm.pop("kv_offloading_size", None)
    ours["enable_extensible_kv_cache"] = True
    return "an extensible KV cache"


def of_scenario(starts: list[Start]) -> Iterator[tuple[str, list[Start]]]:
    """Those that one device and process can start, one after another."""

    def key(start: Start) -> bool:
        return start.scenario == "ranks"

    for ranks, some in itertools.groupby(sorted(starts, key=key), key):
        yield "ranks" if ranks else "start_each", list(some)


def cases(starts: list[Start], site: str) -> list[dict[str, Any]]:
    ours = site == "envelope"

    def case(start: Start) -> dict[str, Any]:
        tight = {"tight": True} if ours and start.scenario == "ranks" else {}
        llm = start.case["llm"] | (start.ours if ours else {})
        return start.case | tight | {"llm": llm}

    return [case(start) for start in starts]


def of_each(
    starts: list[Start], told: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The result of each start, of what its scenario told."""
    results = iter(told)
    for start in starts:
        engines = [next(results) for _ in range(start.case.get("data_parallel", 1))]
        yield of_ranks(engines) if start.scenario == "ranks" else engines[0]


def of_ranks(engines: list[dict[str, Any]]) -> dict[str, Any]:
    """As of one rank: the one that is furthest above its request."""
    for engine in engines:
        if engine["outcome"] != "started":
            return engine
    ranks = [rank for engine in engines for rank in engine["after"]]
    most = max(
        ranks, key=lambda rank: rank["peak"] - rank["before"] - rank["requested"]
    )
    served = {engine["served"] for engine in engines} - {"lives"}
    return min(engines, key=lambda engine: int(engine["blocks"])) | {
        "served": min(served, default="lives"),
        "kv": min(rank["kv"] for rank in ranks),
        "requested": most["requested"],
        "process_peak": most["peak"] - most["before"],
    }


def above(start: Start, result: dict[str, Any]) -> int:
    """Bytes by which a start goes above its request."""
    if "requested" not in result or "kv_cache_memory_bytes" in start.case["llm"]:
        return 0
    taken = result["process_peak"] - start.case.get("thread", 0)
    return max(int(taken - result["requested"]), 0)


def worse(start: Start, official: dict[str, Any], ours: dict[str, Any]) -> str:
    """How ours is worse; empty if it is not."""
    if ours["outcome"] != "started":
        if official["outcome"] != "started":
            return ""
        return f"does not start: {ours.get('error', ours['outcome'])[:400]}"
    over, told = above(start, ours), 0
    if "gpu_memory_limit_bytes" not in start.ours:
        told = max(ours.get("told_above", {}).values(), default=0)
    # The driver's memory comes on top of PyTorch's, which is told.
    if over > told + MIB * bool(told):
        return f"{over >> 20} MiB above its request, {told >> 20} MiB told"
    if over and official["outcome"] == "started" and not above(start, official):
        return f"{over >> 20} MiB above its request, and the release is not"
    if official["outcome"] != "started":
        return ""
    serves = ours["served"] == "lives"
    if not serves and official["served"] == "lives":
        return f"does not serve: {ours['served']}"
    # What the process held before is in a limit.
    if "gpu_memory_limit_bytes" in start.ours:
        return ""
    fewer = (1 - ours["blocks"] / official["blocks"]) * official.get("kv", 0)
    allowed = max(ALLOWED + start.case.get("thread", 0), above(start, official))
    if fewer > allowed and official["served"] == "lives":
        return f"{int(fewer) >> 20} MiB less of KV cache"
    return ""


def end_of(result: dict[str, Any]) -> str:
    if result["outcome"] != "started":
        return str(result["outcome"])
    return "serves" if result["served"] == "lives" else "OOM"


def row(
    start: Start, official: dict[str, Any], ours: dict[str, Any]
) -> dict[str, str | int]:
    """Of a recorded start: bytes by which each is above its request and by which the
    KV cache is smaller, if both start."""
    told: dict[str, str | int] = {"name": start.name}
    for name, result in ("stock", official), ("patched", ours):
        told[name] = end_of(result)
        told[f"{name} above"] = above(start, result)
    if {official["outcome"], ours["outcome"]} == {"started"}:
        fewer = 1 - ours["blocks"] / official["blocks"]
        told["less"] = int(fewer * official.get("kv", 0))
    return told | {"verdict": worse(start, official, ours) or "ok"}


def line(start: Start, official: dict[str, Any], ours: dict[str, Any]) -> str:
    told = []
    for result in official, ours:
        if result["outcome"] != "started":
            told.append(end_of(result))
            continue
        blocks, size = result["blocks"], result["block_size"]
        over = above(start, result)
        told.append(
            f"{blocks} x {size}, {end_of(result)}"
            + (f", {over >> 20} MiB above" if over else "")
        )
    verdict = worse(start, official, ours) or "ok"
    return f"{start.seed} | {start.name} | {' | '.join(told)} | {verdict}"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", default="1", help="of the device, and of a start")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--results", type=Path, help="JSON file to add the starts to")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    seed, _, first = args.seed.partition(".")
    card = device(int(seed))
    numbers = range(int(first or 0), int(first or 0) + args.count)
    starts = [draw(int(seed), number, card) for number in numbers]
    print(json.dumps(card), flush=True)
    rows: dict[str, dict[str, str | int]] = {}
    if args.results and args.results.exists():
        rows = json.loads(args.results.read_text())["starts"]
    commit = recorded(args.root)
    failed = []
    for scenario, some in of_scenario(starts):
        both = [start_all(base, card, scenario, some, site) for site in SITES]
        for start, official, ours in zip(some, *both, strict=True):
            print(line(start, official, ours), flush=True)
            failed += [start.seed] if worse(start, official, ours) else []
            rows[start.seed] = row(start, official, ours) | {"recorded": commit}
            if args.results:
                write_whole(args.results, text_of(rows))
    if failed:
        raise Problem(f"ours is worse in {len(failed)} of {len(starts)}: {failed}")


def text_of(rows: dict[str, dict[str, str | int]]) -> str:
    """The file of starts, a line each."""
    lines = [f"{json.dumps(seed)}: {json.dumps(told)}" for seed, told in rows.items()]
    return '{"starts": {\n' + ",\n".join(lines) + "\n}}\n"


def start_all(
    base: Base, card: dict[str, Any], scenario: str, starts: list[Start], site: str
) -> Iterator[dict[str, Any]]:
    _, ours = environment_of(base)
    paths = [*([ours] if site == "envelope" else []), base.root]
    environment = {
        # See block_ids.py.
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, base.root / "bench/plugin"])),
        "WARM_UP_FEW_BATCHES": "1",
    }
    told = json.dumps(cases(starts, site))
    devices: dict[str, object] = {"devices": 2} if scenario == "ranks" else {}
    with TemporaryDirectory(prefix=".random.", dir=base.root / "build") as folder:
        config = Path(folder, "device.toml")
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in card.items()]
        config.write_text("".join(lines) + HOOKS.read_text())
        found = results(base, site, devices, scenario, told, environment, config)
        yield from of_each(starts, found)


if __name__ == "__main__":
    command(main)

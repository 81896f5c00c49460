"""Try what errors of a start advise, in situations that are drawn at random.

A start of `make bench-starts` of one rank gets less: a smaller budget, a neighbour that
holds most of the device, a limit in bytes or a KV cache that is too large. Where it is
refused or its largest batches run out of memory, the text is read, and each number and
flag that it names is started with: a number as it stands, a flag with up to three
values in its direction. An advice is true if a start with it serves.

A text holds if all its numbers are true, or if it has none, one of its flags. A number
of what is free is true if it is accepted, where the text says that it has to suffice
for the model. One that names nothing to try is not judged, and more ranks
(--tensor-parallel-size) are not tried. Prints a line a situation; ends with 1 if a text
does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.random_starts import GIB, MIB, Start, cases, device, draw, start_all
from bench.virtual import recorded
from scripts.commands import Problem, command, write_whole
from scripts.release import Base

Case = dict[str, Any]


def situation(seed: int, number: int, card: dict[str, Any]) -> Start:
    """A start that gets less than it was drawn with."""
    rng = random.Random(f"advice {seed}.{number}")
    drawn = number
    while (start := draw(seed, drawn, card)).scenario == "ranks":
        drawn += 1000
    memory, case, ours = card["memory"], dict(start.case), {}
    llm = dict(case["llm"])
    for name in "kv_cache_memory_bytes", "kv_offloading_size", "cpu_offload_gb":
        llm.pop(name, None)
    for name in "moment", "thread", "held":
        case.pop(name, None)
    budget = int(rng.uniform(0.25, 1.2) * GIB)
    what = rng.choice(("budget", "budget", "neighbour", "limit", "bytes"))
    match what:
        case "budget":
            llm["gpu_memory_utilization"] = round(budget / memory, 3)
        case "neighbour":
            case["held"] = memory - budget
        case "limit":
            ours["gpu_memory_limit_bytes"] = budget
        case "bytes":
            llm["kv_cache_memory_bytes"] = int(memory * rng.uniform(0.7, 1.1))
            case["serve"] = "alone"  # It may have all that is free.
    name = f"{start.name}; less: {what}, {budget >> 20} MiB"
    return Start(f"{seed}.{number}", name, "start_each", case | {"llm": llm}, ours)


def with_llm(case: Case, **llm: Any) -> Case:
    return case | {"llm": case["llm"] | llm}


Values = Callable[[Case, dict[str, Any]], Iterator[Case]]


def scaled(name: str, *factors: float, least: int = 1) -> Values:
    """An argument of LLM, multiplied."""

    def values(case: Case, card: dict[str, Any]) -> Iterator[Case]:
        if (now := case["llm"].get(name)) is None:
            return
        for factor in factors:
            yield with_llm(case, **{name: max(int(now * factor), least)})

    return values


def more_of_device(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    now = case["llm"]["gpu_memory_utilization"]
    free = card["memory"] - case.get("held", 0) - 2 * card["context"] - 64 * MIB
    most = min(0.98, free / card["memory"])
    for share in (now + most) / 2, most:
        if share > now:
            yield with_llm(case, gpu_memory_utilization=round(share, 3))


def more_of_limit(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    now = case["llm"].get("gpu_memory_limit_bytes")
    most = card["memory"] - case.get("held", 0) - 64 * MIB
    if now is not None and now < most:
        share = min(0.98, most / card["memory"])
        for limit in (now + most) // 2, most:
            yield with_llm(
                case, gpu_memory_limit_bytes=limit, gpu_memory_utilization=share
            )


def less_of_device(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    for factor in 0.9, 0.75, 0.5:
        share = round(case["llm"]["gpu_memory_utilization"] * factor, 3)
        yield with_llm(case, gpu_memory_utilization=share)


def fewer_tokens(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    now, least = case["llm"]["max_num_batched_tokens"], case["llm"]["max_num_seqs"]
    for tokens in now // 2, now // 4, now // 16:
        yield with_llm(case, max_num_batched_tokens=max(tokens, least, 64))


def eager(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    llm = {k: v for k, v in case["llm"].items() if k != "compilation_config"}
    yield case | {"graphs": False, "llm": llm}


def fewer_graphs(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    config = dict(case["llm"].get("compilation_config", {}))
    config["cudagraph_capture_sizes"] = [1]
    yield with_llm(case, compilation_config=config)


def of_buffer(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    for size in 128, 256, 512:
        yield with_llm(case, fragmentation_buffer_bytes=size * MIB)


def offloaded(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    yield with_llm(case, cpu_offload_gb=4)


def quantized(case: Case, card: dict[str, Any]) -> Iterator[Case]:
    yield with_llm(case, quantization="fp8")


# What a text says, by a pattern: the values of a flag.
FLAGS: dict[str, Values] = {
    r"increas\w+ (--gpu-memory-utilization|`gpu_memory_utilization`)": more_of_device,
    r"decreas\w+ --gpu-memory-utilization": less_of_device,
    r"increas\w+ --gpu-memory-limit-bytes": more_of_limit,
    r"decreas\w+ --gpu-memory-limit-bytes": scaled(
        "gpu_memory_limit_bytes", 0.9, 0.75, 0.5
    ),
    r"(decreas|lower)[^.;]*max.num.batched.tokens": fewer_tokens,
    r"(decreas|lower)[^.;]*max.num.seqs": scaled("max_num_seqs", 0.5, 0.25, 0),
    r"(decreas|lower)[^.;]*max.model.len": scaled(
        "max_model_len", 0.5, 0.125, 0.03, least=32
    ),
    r"smaller --kv-cache-memory-bytes": scaled("kv_cache_memory_bytes", 0.7, 0.4, 0.1),
    r"decreas\w+ --max-cudagraph-capture-size": fewer_graphs,
    r"use --enforce-eager": eager,
    r"increas\w+ --fragmentation-buffer-bytes": of_buffer,
    r"--cpu-offload-gb": offloaded,
    r"--quantization": quantized,
}
# A number of a text, and the argument of LLM that it is for.
NUMBERS = {
    r"at most (0\.\d+) fits now": "gpu_memory_utilization",
    r"at most (\d+) fits now": "gpu_memory_limit_bytes",
    r"gpu_memory_limit_bytes to at most (\d+)": "gpu_memory_limit_bytes",
    r"kv_cache_memory_bytes to at most (\d+)": "kv_cache_memory_bytes",
    r"max_num_seqs to at most (\d+)": "max_num_seqs",
    r"estimated maximum model length is (\d+)": "max_model_len",
}
# Refused again: less is free than a number asks for.
TOO_MUCH = "on startup is less than"


def numbers(text: str, case: Case) -> Iterator[tuple[str, Case]]:
    for pattern, name in NUMBERS.items():
        if said := re.search(pattern, text):
            value = float(said[1]) if "." in said[1] else int(said[1])
            again = with_llm(case, **{name: value})
            if name == "gpu_memory_utilization":
                again["llm"].pop("gpu_memory_limit_bytes", None)
            yield f"{name}={value}", again


def flags(text: str, case: Case, card: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for pattern, values in FLAGS.items():
        if (said := re.search(pattern, text)) and (some := list(values(case, card))):
            yield said[0], some


def said_by(result: dict[str, Any]) -> str:
    """The error of a start or of a step; empty if it serves."""
    if result["outcome"] != "started":
        return " ".join(str(result.get("error", result["outcome"])).split())
    return "" if result["served"] == "lives" else " ".join(result["served"].split())


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the device")
    parser.add_argument("--first", type=int, default=0, help="situation")
    parser.add_argument("--count", type=int, default=10, help="situations")
    parser.add_argument("--results", type=Path, help="JSON file to add the texts to")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    card = device(args.seed)
    print(json.dumps(card), flush=True)
    rows: dict[str, Any] = {}
    if args.results and args.results.exists():
        rows = json.loads(args.results.read_text())["situations"]
    commit, fails = recorded(args.root), []

    def tried(case: Case) -> str:
        again = Start("", "", "start_each", case, {})
        return said_by(*start_all(base, card, "start_each", [again], "envelope"))

    some = [
        situation(args.seed, number, card)
        for number in range(args.first, args.first + args.count)
    ]
    first = start_all(base, card, "start_each", some, "envelope")
    for one, case, result in zip(some, cases(some, "envelope"), first, strict=True):
        text = said_by(result)
        told: dict[str, Any] = {"name": one.name, "says": text, "recorded": commit}
        if text:
            exact = {name: tried(again) for name, again in numbers(text, case)}
            if "has to suffice for the model" in text:
                exact = {n: why if TOO_MUCH in why else "" for n, why in exact.items()}
            helped: dict[str, str] = {}
            for flag, values in flags(text, case, card):
                for value in values:
                    helped[flag] = tried(value)
                    if not helped[flag]:
                        break
            told["numbers"] = {n: why[:300] or "serves" for n, why in exact.items()}
            told["flags"] = {f: why[:300] or "serves" for f, why in helped.items()}
            if exact:
                told["holds"] = not any(exact.values())
            elif helped:
                told["holds"] = "" in helped.values()
            fails += [] if told.get("holds", True) else [one.seed]
        rows[one.seed] = told
        print(one.seed, json.dumps(told), flush=True)
        if args.results:
            write_whole(args.results, json.dumps({"situations": rows}, indent=0) + "\n")
    if fails:
        raise Problem(f"{len(fails)} texts do not hold: {fails}")


if __name__ == "__main__":
    command(main)

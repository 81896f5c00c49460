"""The suite on a GPU: every case with the unpatched and with the patched vLLM.

    make gpu                                    # this checkout, on this machine
    python3 -m gpu.suite --bundle FILE.tar.xz   # elsewhere: see docs/on-a-gpu.md

Writes results, requirements and the machine to results/GPU-DATE-VLLM.json; ends with 1
if a requirement was not met. Any card with 16 GiB will do. It also runs on the virtual
device, to test itself: results that kernels compute are then not judged, and nothing is
written without --out.

One file, however long: a case's figures and what must hold of them stand together.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scenarios.observe import PHASES
from gpu.builds import VLLMS, Builds, Conversation
from gpu.card import MIB, Card, CardError
from scripts.commands import REPOSITORY, Problem, command, write_whole
from scripts.release import Base

GIB = 2**30
LIMIT = 4 * GIB
ROUNDS, STEPS = 200, 50
# Cycles of a level, in turn: "sleep cycles".
CYCLES = {1: 5, 2: 3}
# Bytes, and whether in huge pages where there are any.
SLEEP = (
    *((size * GIB, True) for size in (2, 2, 6, 6)),
    (6 * GIB, False),
)
# On the virtual device, which is as slow as its host.
ROUNDS_THERE, SLEEP_THERE = 4, ((GIB // 4, True),)
STARTS = 6
# Prompts at once, and turns of so many batches: "hybrids: first tokens".
PROMPTS, TURNS, BATCHES = (64, 256, 1024), 8, 4
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
}
NEEDS_ARITHMETIC = REPOSITORY / "tests/vgpu/upstream/expected.toml"

Result = dict[str, Any]
Check = tuple[str, Any, bool]  # wanted, found, whether it holds


@dataclass(frozen=True)
class Machine:
    """What cases depend on: bytes, and what slices the GPU, if anything."""

    total: int
    free: int
    share: str
    virtual: bool
    large: bool


@dataclass(frozen=True)
class Case:
    """`run` gives a result for each vLLM, `judge` the checks of the two.

    `needs` is free memory in bytes; `where` whether the GPU must be whole (False) or
    a slice (True). `processes` start an engine, stock and patched ones; where times
    are compared no other may import vLLM meanwhile (`timed`). It has `seconds` at most.
    """

    name: str
    run: Callable[[Builds, Machine, Path, float], dict[str, Result]]
    judge: Callable[[Machine, Result, Result], Iterator[Check]]
    needs: int = 10 * GIB
    where: bool | None = None
    processes: tuple[int, int] = (0, 0)
    timed: bool = False
    seconds: float = math.inf


def each(
    scenario: str, arguments: Callable[[Machine, str], list[str] | dict[str, Any]]
) -> Callable[[Builds, Machine, Path, float], dict[str, Result]]:
    """Run a scenario with one vLLM, then with the other."""
    module = f"bench.scenarios.{scenario}"

    def run(
        builds: Builds, machine: Machine, folder: Path, limit: float
    ) -> dict[str, Result]:
        results = {}
        for vllm in VLLMS:
            given = arguments(machine, vllm)
            text = given if isinstance(given, list) else [json.dumps(given)]
            results[vllm] = builds.run(module, text, vllm, folder, limit)
        return results

    return run


# ---- loading in the sleep-mode pool


def loads(machine: Machine, unpatched: Result, patched: Result) -> Iterator[Check]:
    found = unpatched["outcome"]
    yield "unpatched: out of memory", found, found in ("OOM", "OutOfMemoryError")
    yield "patched: loads", patched["outcome"], patched["outcome"] == "loaded"


def churns(machine: Machine, unpatched: Result, patched: Result) -> Iterator[Check]:
    yield from loads(machine, unpatched, patched)
    if unpatched["outcome"] == "OOM":
        lost = unpatched["within"]["used"] - unpatched["within"]["reserved"]
        yield "unpatched: a lost transient is not reserved, but used", lost, lost > GIB
    if patched["outcome"] == "loaded":
        after = patched["after"]
        same = after["recorded"] == after["reserved"] == after["live"]
        yield (
            "patched: recorded and reserved bytes are those of the weights",
            (after),
            same,
        )
        left = {k: v for k, v in patched["freed"].items() if k != "used"}
        yield (
            "patched: nothing is left when the weights are freed",
            left,
            not any(left.values()),
        )


def load_of(name: str, free: int) -> Case:
    return Case(
        f"loading: {name}",
        each("sleep_load", lambda machine, vllm: [name, "--free", str(free)]),
        loads,
        needs=free + 2 * GIB,
    )


# ---- the budget


def consumes(machine: Machine, unpatched: Result, patched: Result) -> Iterator[Check]:
    """A load of 1 GiB, while a co-tenant releases half of that."""
    for vllm, result, wanted in (
        ("unpatched", unpatched, GIB // 2),
        ("patched", patched, GIB),
    ):
        found = result["results"][0].get("consumed") if "results" in result else None
        yield f"{vllm}: {wanted // MIB} MiB consumed", found, found == wanted


def limited(machine: Machine, vllm: str) -> dict[str, Any]:
    llm: dict[str, Any] = {"gpu_memory_utilization": LIMIT / machine.total}
    if vllm == "patched":
        llm = {"gpu_memory_utilization": 1.0, "gpu_memory_limit_bytes": LIMIT}
    return {"free": 8 * GIB, "llm": llm}


def stays_in_limit(
    machine: Machine, unpatched: Result, patched: Result
) -> Iterator[Check]:
    yield "patched: starts", patched["outcome"], patched["outcome"] == "started"
    peak = unpatched.get("process_peak", 0)
    yield "unpatched: goes over 4 GiB", peak, peak > LIMIT
    peak = patched.get("process_peak", 0)
    yield "patched: stays in 4 GiB", peak, 0 < peak <= LIMIT


def stays_in_slice(
    machine: Machine, unpatched: Result, patched: Result
) -> Iterator[Check]:
    yield "patched: starts", patched["outcome"], patched["outcome"] == "started"
    peak = patched.get("process_peak", 0)
    yield "patched: stays in the slice", peak, 0 < peak <= machine.total


def survives_release(
    machine: Machine, unpatched: Result, patched: Result
) -> Iterator[Check]:
    error = unpatched.get("error", "")[:200]
    wanted = "Error in memory profiling"
    yield f"unpatched: '{wanted}'", error, wanted in error
    yield "patched: starts", patched["outcome"], patched["outcome"] == "started"
    if patched["outcome"] == "started":
        memory = patched["memory"]
        parts = sum(memory[k] for k in ("model", "peak_activation", "kv_cache"))
        request = int(0.4 * machine.total)
        wanted = f"patched: model, activation and KV cache fit into {request}"
        yield wanted, parts, parts <= request


def large(machine: Machine, model: str) -> str:
    return f"large {model}" if machine.large else model


def full_batches(name: str, *, extensible: bool = False) -> Case:
    """Both are left the same bytes: the patched engine's request, and its memory
    before."""

    def case(machine: Machine, vllm: str, left: int | bool) -> dict[str, Any]:
        llm: dict[str, Any] = {"gpu_memory_utilization": 0.4}
        if extensible and vllm == "patched":
            llm["enable_extensible_kv_cache"] = True
        return {
            "report": vllm == "patched",
            "model": large(machine, "dense"),
            "graphs": True,
            "serve": left,
            "tensors": MIB,  # with them the context comes before the engine
            "llm": llm,
        }

    def run(
        builds: Builds, machine: Machine, folder: Path, limit: float
    ) -> dict[str, Result]:
        results, left = {}, True
        for vllm in reversed(VLLMS):
            text = [json.dumps(case(machine, vllm, left))]
            result = builds.run("bench.scenarios.start", text, vllm, folder, limit)
            left, results[vllm] = result.get("left", True), result
        return {vllm: results[vllm] for vllm in VLLMS}

    return Case(
        f"full batches{name}",
        run,
        serves_full_batches,
        needs=14 * GIB,
        where=False,
        processes=(1, 1),
    )


def serves_full_batches(
    machine: Machine, unpatched: Result, patched: Result
) -> Iterator[Check]:
    left, theirs = patched.get("left"), unpatched.get("left")
    same = left == theirs is not None
    yield f"unpatched: is left the same {left} bytes", theirs, same
    outcome = str(unpatched.get("served", unpatched["outcome"]))
    failed = outcome.startswith("out of memory")
    yield "unpatched: runs out of memory", outcome, failed
    found = patched.get("served", patched["outcome"])
    yield "patched: serves within what was requested", found, found == "lives"
    request = patched.get("requested", 0)
    # vLLM's request begins after the context and the handles of cuBLAS.
    peak = patched.get("before", 0) + patched.get("process_peak", 0)
    peak -= patched.get("before_request", 0)
    yield f"patched: the start stays in {request}", peak, 0 < peak <= request
    if "memory" in unpatched and "memory" in patched:
        theirs, ours = (r["memory"]["kv_cache"] for r in (unpatched, patched))
        wanted = f"KV cache at most 128 MiB below that of stock, {theirs}"
        yield wanted, ours, ours >= theirs - 128 * MIB


# ---- serving


def serve(
    model: str,
) -> Callable[[Builds, Machine, Path, float], dict[str, Result]]:
    """Both engines at once; they decode in turn, so that both meet the same clocks."""

    def run(
        builds: Builds, machine: Machine, folder: Path, limit: float
    ) -> dict[str, Result]:
        llm = {"gpu_memory_utilization": 0.4, "compilation_config": GRAPHS}
        case = {"graphs": True, "sleep": 1, "llm": llm}
        case["model"] = large(machine, model)
        end = time.monotonic() + 2 * limit
        engines: dict[str, Conversation] = {}
        results: dict[str, Result] = {}

        def ask(vllm: str, order: str) -> Result:
            answer = engines[vllm].ask(order, end - time.monotonic())
            if "outcome" in answer:
                raise NoAnswer(vllm, answer)
            return answer

        with contextlib.ExitStack() as stack:
            try:
                # Memory stands still while one starts and sleeps.
                for vllm in VLLMS:
                    engine = builds.scenario(
                        "bench.scenarios.serve", [json.dumps(case)], vllm, folder
                    )
                    engines[vllm] = stack.enter_context(engine)
                    started = engine.answer(end - time.monotonic())
                    if started["outcome"] != "started":
                        raise NoAnswer(vllm, started)
                    results[vllm] = started
                    started["tokens"] = ask(vllm, "tokens")
                    started["sleep"] = ask(vllm, "sleep")
                    started["tokens_after"] = ask(vllm, "tokens")
                    started["decode"] = []
                    ask(vllm, f"decode {STEPS}")  # warm
                for number in range(ROUNDS_THERE if machine.virtual else ROUNDS):
                    began = time.monotonic()
                    for vllm in in_turn(number):
                        decoded = ask(vllm, f"decode {STEPS}")
                        results[vllm]["decode"].append(decoded["seconds"])
                    if end - time.monotonic() < 3 * (time.monotonic() - began):
                        break
            except NoAnswer as error:
                vllm, answer = error.args
                not_started = {"outcome": "not started"}
                return dict.fromkeys(VLLMS, not_started) | results | {vllm: answer}
            for result in results.values():
                seconds = statistics.median(result["decode"])
                result["ms_per_step"] = 1000 * seconds / STEPS
                result["tokens_per_second"] = STEPS * decoded["batch"] / seconds
        return results

    return run


def in_turn(number: int) -> list[str]:
    """The order of a round: who comes second is no slower for it."""
    return list(VLLMS if number % 2 else reversed(VLLMS))


def both_end(
    machine: Machine, unpatched: Result, patched: Result, act: str, outcome: str
) -> Generator[Check, None, bool]:
    """Whether the times of both can be judged: with kernels, and an outcome of each."""
    outcomes = [result["outcome"] for result in (unpatched, patched)]
    for vllm, found in zip(VLLMS, outcomes, strict=True):
        yield f"{vllm}: {act}", found, found == outcome
    return not machine.virtual and outcomes == [outcome] * len(VLLMS)


@dataclass(frozen=True)
class Ratios:
    """Ours by theirs, in pairs."""

    pairs: int
    median: float
    quartiles: tuple[float, float]
    totals: float

    @classmethod
    def of(cls, ours: list[float], theirs: list[float]) -> Ratios:
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if ratios[1:] else ratios * 3
        return cls(
            len(ratios),
            round(statistics.median(ratios), 4),
            (round(low, 4), round(high, 4)),
            round(sum(ours) / sum(theirs), 4),
        )

    def __str__(self) -> str:
        low, high = self.quartiles
        return (
            f"{self.median}, quartiles {low} to {high}, by totals {self.totals}, "
            f"{self.pairs} pairs"
        )


class NoAnswer(Exception):
    """Of which vLLM, and its output instead."""


def serves(machine: Machine, unpatched: Result, patched: Result) -> Iterator[Check]:
    results = {"unpatched": unpatched, "patched": patched}
    for vllm, result in results.items():
        yield f"{vllm}: serves", result["outcome"], "tokens_per_second" in result
        if "sleep" in result:
            sleep = result["sleep"]
            # The driver keeps a few MiB of its own when it first does this: they are
            # still there when all is awake again. While asleep it has page tables of
            # the host memory that holds the weights, 8 bytes for 4 KiB at most.
            freed = sleep["awake again"] - sleep["asleep"]
            tables = (sleep["weights"] - sleep["asleep"]) // 512
            wanted = f"{vllm}: sleep frees the {sleep['pooled']} bytes of the pools"
            yield wanted, freed, freed >= sleep["pooled"] - tables
    if "sleep" in unpatched and "sleep" in patched:
        theirs, ours = (r["sleep"]["asleep"] for r in (unpatched, patched))
        wanted = f"patched: asleep, no more is used than by stock, {theirs}"
        yield wanted, ours, ours <= theirs
    if machine.virtual or not all("tokens_per_second" in r for r in results.values()):
        return
    for vllm, result in results.items():
        kinds = len({t for output in result["tokens"]["greedy"] for t in output})
        yield f"{vllm}: the weights make more than one token", kinds, kinds > 1
        same = result["tokens"] == result["tokens_after"]
        yield f"{vllm}: equal tokens before sleep and after", same, same
    same = unpatched["tokens"] == patched["tokens"]
    yield "equal tokens, unpatched and patched", same, same
    ratios = Ratios.of(patched["decode"], unpatched["decode"])
    within = abs(ratios.median - 1) <= 0.01
    yield "time per step within 1 %: median of ratios", str(ratios), within


# ---- sleep and wake-up


def sleep_cycles(
    builds: Builds, machine: Machine, folder: Path, limit: float
) -> dict[str, Result]:
    """Cycles in turn, of processes that have not slept before; of as many pools as the
    time allows."""
    end = time.monotonic() + 2 * limit
    results: dict[str, Result] = {v: {"outcome": "slept", "cycles": []} for v in VLLMS}
    pools = SLEEP_THERE if machine.virtual else SLEEP
    longest = 0.0
    for number, (size, huge) in enumerate(pools):
        began = time.monotonic()
        if end - began < 1.5 * longest:
            break
        case = json.dumps({"bytes": size, "huge_pages": huge})
        engines: dict[str, Conversation] = {}
        with contextlib.ExitStack() as stack:
            for vllm in VLLMS:
                process = builds.scenario(
                    "bench.scenarios.sleep_cycle", [case], vllm, folder
                )
                engines[vllm] = stack.enter_context(process)
                loaded = process.answer(end - time.monotonic())
                if loaded["outcome"] != "loaded":
                    results[vllm] |= loaded
                    return results
            for level, cycles in CYCLES.items():
                for cycle in range(cycles):
                    for vllm in in_turn(number + cycle):
                        left = end - time.monotonic()
                        slept = engines[vllm].ask(str(level), left)
                        if "sleep" not in slept:
                            results[vllm] |= slept
                            return results
                        of = {"bytes": size, "huge_pages": huge}
                        of |= {"level": level, "cycle": cycle}
                        results[vllm]["cycles"].append(of | slept)
        longest = max(longest, time.monotonic() - began)
    return results


def sleeps_as_fast(
    machine: Machine, unpatched: Result, patched: Result
) -> Iterator[Check]:
    timed = yield from both_end(machine, unpatched, patched, "sleeps", "slept")
    for vllm, result in zip(VLLMS, (unpatched, patched), strict=True):
        lost = [c["cycle"] for c in result["cycles"] if not c.get("kept", True)]
        yield f"{vllm}: level 1 keeps what it offloads; cycles", lost, not lost
    if not timed:
        return
    for level in CYCLES:
        for part, wanted in (("first", 1.0), ("later", 0.8)):
            for clock in ("processor", "wall"):
                ours, theirs = (
                    [
                        sum(c[half][clock] for half in ("sleep", "wake"))
                        for c in result["cycles"]
                        if c["level"] == level
                        and c["huge_pages"]
                        and (c["cycle"] > 0) == (part == "later")
                    ]
                    for result in (patched, unpatched)
                )
                ratios = Ratios.of(ours, theirs)
                yield (
                    f"level {level}, {part} cycle: {clock} time at most {wanted}",
                    str(ratios),
                    ratios.median <= wanted,
                )
    # It is the machine's, so the least: where the other has not slept yet.
    more, theirs_more = (
        min(
            cycle["sleep"]["host"] - cycle["bytes"]
            for cycle in result["cycles"]
            if cycle["level"] == 1
        )
        for result in (patched, unpatched)
    )
    goal = f"patched: host memory above the weights at most stock's {theirs_more}"
    yield goal, more, more <= max(theirs_more, 64 * MIB)


# ---- hybrids: prompts that are computed in groups


def first_tokens(
    builds: Builds, machine: Machine, folder: Path, limit: float
) -> dict[str, Result]:
    end = time.monotonic() + 2 * limit
    results: dict[str, Result] = {}
    engines: dict[str, Conversation] = {}
    llm = {"gpu_memory_utilization": 0.4}  # a step of stock's goes beyond it
    case = json.dumps({"model": large(machine, "hybrid"), "llm": llm})
    with contextlib.ExitStack() as stack:
        for vllm in VLLMS:
            process = builds.scenario(
                "bench.scenarios.hybrid_ttft", [case], vllm, folder
            )
            engines[vllm] = stack.enter_context(process)
            results[vllm] = process.answer(end - time.monotonic())
            results[vllm]["first tokens"] = {}
        if any(result["outcome"] != "started" for result in results.values()):
            return results
        for number in range(TURNS):
            began = time.monotonic()
            for prompts in PROMPTS:
                for vllm in in_turn(number):
                    left = end - time.monotonic()
                    told = engines[vllm].ask(f"{prompts} {BATCHES}", left)
                    if "milliseconds" not in told:
                        results[vllm] |= told
                        return results
                    times = results[vllm]["first tokens"].setdefault(prompts, [])
                    times += told["milliseconds"]
            if end - time.monotonic() < 1.5 * (time.monotonic() - began):
                break
    return results


def answers_as_fast(
    machine: Machine, unpatched: Result, patched: Result
) -> Iterator[Check]:
    if not (yield from both_end(machine, unpatched, patched, "serves", "started")):
        return
    for prompts in PROMPTS:
        ours, theirs = (r["first tokens"].get(prompts) for r in (patched, unpatched))
        if ours and theirs and len(ours) == len(theirs):
            ratios = Ratios.of(ours, theirs)
            wanted = f"{prompts} prompts: first tokens in at most 1.05 of stock's time"
            yield wanted, str(ratios), ratios.median <= 1.05


# ---- the time of a start


def starts(
    builds: Builds, machine: Machine, folder: Path, limit: float
) -> dict[str, Result]:
    """One after another in turn, each in a process that has imported vLLM; the first of
    each build only warms caches."""
    end = time.monotonic() + 2 * limit
    results: dict[str, Result] = {v: {"outcome": "started"} for v in VLLMS}
    for result in results.values():
        result["starts"], result["details"] = [], []
    llm: dict[str, Any] = {"gpu_memory_utilization": 0.4, "compilation_config": GRAPHS}
    case: dict[str, Any] = {"graphs": True, "llm": llm, "details": True}
    case["model"] = large(machine, "dense")
    extensible = {"llm": llm | {"enable_extensible_kv_cache": True}}
    ways: list[tuple[str, str, Result]] = [
        ("unpatched", "", {}),
        ("patched", "", {}),
        ("patched", "extensible", extensible),
    ]
    for number in range(2 if machine.virtual else STARTS + 1):
        began = time.monotonic()
        for vllm, way, more in ways if number % 2 else reversed(ways):
            arguments = [json.dumps(case | more)]
            module = "bench.scenarios.start"
            started = builds.run(
                module, arguments, vllm, folder, end - time.monotonic()
            )
            if started["outcome"] != "started":
                results[vllm] |= {k: started.get(k) for k in ("outcome", "error")}
                return results
            if number:
                seconds = {"way": way} | started["seconds"]
                results[vllm]["starts"].append(seconds)
                results[vllm]["details"].append(started["details"])
        if end - time.monotonic() < 1.5 * (time.monotonic() - began):
            break
    return results


def starts_as_fast(
    machine: Machine, unpatched: Result, patched: Result
) -> Iterator[Check]:
    if not (yield from both_end(machine, unpatched, patched, "starts", "started")):
        return
    theirs = unpatched["starts"]
    for way, wanted in (("", 1.0), ("extensible", 0.85)):
        ours = [start for start in patched["starts"] if start["way"] == way]
        if not ours or len(ours) != len(theirs):
            continue
        for phase in ("engine", *PHASES):
            ratios = Ratios.of(
                [start[phase] for start in ours], [start[phase] for start in theirs]
            )
            holds = phase != "engine" or ratios.median <= wanted
            goal = f"at most {wanted}" if phase == "engine" else "any"
            kind = f", KV cache {way}" if way else ""
            yield f"{phase}{kind}: time by stock's, {goal}", str(ratios), holds


# ---- vLLM's tests


def own_tests(
    builds: Builds, machine: Machine, folder: Path, limit: float
) -> dict[str, Result]:
    end = time.monotonic() + 2 * limit
    results = {}
    # With the patches all have to run; without them it is enough that one fails.
    for vllm in ("patched", "unpatched"):
        (folder / vllm).mkdir()
        left = end - time.monotonic()
        until_one_fails = vllm == "unpatched"
        results[vllm] = builds.run_own_tests(
            vllm, folder / vllm, left, until_one_fails=until_one_fails
        )
    return results


def tests_pass(machine: Machine, unpatched: Result, patched: Result) -> Iterator[Check]:
    # What cannot be imported is named for its file.
    failed = [n for n in unpatched.get("failed", []) if n.startswith("test_")]
    if failed or not unpatched.get("not run"):
        yield "unpatched: some fail", len(failed), len(failed) > 0
    failed = patched.get("failed", ["no result"])
    if machine.virtual:
        listed = tomllib.loads(NEEDS_ARITHMETIC.read_text())["needs_arithmetic"]
        failed = [name for name in failed if name.partition("[")[0] not in listed]
    yield "patched: none fails", failed, not failed
    number = len(patched.get("passed", []))
    yield "patched: some pass", number, number > 0
    not_run = patched.get("not run", [])
    yield "patched: there was time for all directories", not_run, not not_run


CASES = (
    # The first does not compare times, as processes for all import vLLM meanwhile.
    full_batches(" within the request"),
    full_batches(", with an extensible KV cache", extensible=True),
    Case(
        "time of a start",
        starts,
        starts_as_fast,
        processes=(STARTS + 1, 2 * STARTS + 2),
        timed=True,
        seconds=120,
    ),
    Case(
        "sleep cycles",
        sleep_cycles,
        sleeps_as_fast,
        needs=15 * GIB,
        processes=(len(SLEEP), len(SLEEP)),
        timed=True,
        seconds=110,
    ),
    Case(
        "serving: dense",
        serve("dense"),
        serves,
        needs=14 * GIB,
        processes=(1, 1),
        timed=True,
        seconds=90,
    ),
    Case(
        "serving: moe",
        serve("moe"),
        serves,
        needs=14 * GIB,
        processes=(1, 1),
        timed=True,
        seconds=100,
    ),
    Case(
        "churn",
        each("churn", lambda machine, vllm: {"free": 8 * GIB}),
        churns,
        needs=9 * GIB,
    ),
    load_of("growing", 8 * GIB),
    load_of("experts", 28 * GIB),
    Case(
        "consumption while a co-tenant releases memory",
        each(
            "shares",
            lambda machine, vllm: {
                "cases": [{"utilization": 0.4, "held": 2 * GIB, "moved": -(GIB // 2)}]
            },
        ),
        consumes,
    ),
    Case(
        "start within a limit, beside a co-tenant",
        each("start", limited),
        stays_in_limit,
        where=False,
    ),
    Case(
        "start in the slice",
        each("start", lambda machine, vllm: {"llm": {"gpu_memory_utilization": 0.9}}),
        stays_in_slice,
        where=True,
    ),
    Case(
        "start while a co-tenant releases memory",
        each(
            "start",
            lambda machine, vllm: {
                "held": 4 * GIB,
                "moved": -2 * GIB,
                "llm": {"gpu_memory_utilization": 0.4},
            },
        ),
        survives_release,
        needs=12 * GIB,
    ),
    # Its kernels compile for longer than 100 s.
    Case(
        "hybrids: first tokens",
        first_tokens,
        answers_as_fast,
        processes=(1, 1),
        timed=True,
        seconds=300,
    ),
    Case("the patches' own tests", own_tests, tests_pass),
)


def why_not(case: Case, machine: Machine) -> str:
    """Why this machine cannot run a case; "" if it can."""
    if case.where is not None and case.where != bool(machine.share):
        return machine.share or "the GPU is whole"
    if machine.free < case.needs:
        return f"{case.needs} bytes are needed, {machine.free} are free"
    return ""


def run_case(
    case: Case, builds: Builds, machine: Machine, limit: float
) -> dict[str, Any]:
    """The results of a case and whether they hold: an entry of the results file."""
    if why := why_not(case, machine):
        return {"not run": why}
    if case.timed:
        builds.await_imports(limit)
    began = time.monotonic()
    results: dict[str, Any] = {}
    checks: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            results |= case.run(builds, machine, Path(folder), limit)
        for wanted, found, holds in case.judge(machine, *(results[v] for v in VLLMS)):
            checks.append({"wanted": wanted, "found": found, "holds": bool(holds)})
    except Exception:  # the others are to run
        why = traceback.format_exc()[-1000:]
        checks.append({"wanted": "the case ends", "found": why, "holds": False})
        results = dict.fromkeys(VLLMS, {"outcome": "not judged"}) | results
    seconds = round(time.monotonic() - began, 1)
    return results | {"checks": checks, "seconds": seconds}


def survey(large: bool | None = None) -> tuple[Machine, dict[str, Any]]:
    """This machine, for the cases and for the reader.

    Raises:
        CardError: it has no GPU.
    """
    card = Card()
    described = card.describe()
    card.driver.enter_context()
    free, total = card.driver.memory()
    card.driver.leave_context()
    virtual = "VGPU_RUN" in os.environ
    machine = Machine(
        total,
        free,
        described["share"],
        virtual,
        not virtual if large is None else large,
    )
    host = {"cpus": os.cpu_count(), "kernel": platform.release()}
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge_pages.exists():
        host["huge_pages"] = huge_pages.read_text().strip()
    return machine, {"gpu": described | {"virtual": virtual}, "host": host}


def command_line() -> str:
    """How this was called, without the paths of the machine."""
    module, *arguments = (
        Path(a).name if Path(a).is_absolute() else a for a in sys.argv
    )
    return shlex.join(["python", "-m", f"gpu.{Path(module).stem}", *arguments])


def file_name(gpu: str, date: str, version: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return f"{plain}-{date}-{version}.json"


def new_file(folder: Path, gpu: str, date: str, version: str) -> Path:
    """The path of a result, numbered from the day's second on."""
    path, number = folder / file_name(gpu, date, version), 2
    while path.exists():
        path = folder / file_name(gpu, f"{date}-{number}", version)
        number += 1
    return path


def write(path: Path, content: dict[str, Any]) -> None:
    """The results, without the path of this checkout in what scenarios wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    write_whole(path, text.replace(f"{REPOSITORY}/", ""))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", type=Path, help="what 'make bundle' wrote")
    parser.add_argument("--out", type=Path, help="folder (default: results/)")
    parser.add_argument("--only", help="a pattern that names of cases must match")
    parser.add_argument("--limit", type=float, default=480, help="seconds in all")
    parser.add_argument(
        "--case-limit", type=float, default=150, help="seconds a case and vLLM"
    )
    parser.add_argument("--tests", help="a pattern of the own tests' paths")
    parser.add_argument(
        "--import-first", action="store_true",
        help="import vLLM in all processes at once: less time, more memory of the host",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="small models only")


def main(args: argparse.Namespace) -> None:
    began = time.monotonic()
    try:
        machine, described = survey(False if args.small else None)
    except CardError as error:
        raise Problem(f"{error}. Run this on a machine with an NVIDIA GPU.") from None
    if machine.virtual and not args.out:
        raise Problem("this is the virtual device: --out FOLDER is needed.")
    with tempfile.TemporaryDirectory() as folder:
        builds = prepare(args, Path(folder))
        tests = [test for test in builds.own_tests if re.search(args.tests or "", test)]
        seen = passed_before(args.root / "results")
        tests = sorted(tests, key=lambda test: test.partition("::")[2] in seen)
        builds = dataclasses.replace(builds, own_tests=tuple(tests))
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        content: dict[str, Any] = {
            "date": date,
            **described,
            "versions": builds.installed()
            | {f"{v} vllm": builds.versions[v] for v in VLLMS},
            "command": command_line(),
            "cases": {},
        }
        target = new_file(
            args.out or args.root / "results",
            described["gpu"]["name"],
            date,
            builds.versions["unpatched"],
        )
        cases = [c for c in CASES if not args.only or re.search(args.only, c.name)]
        needed = ahead(cases, machine) if args.import_first else {}
        with builds.importing(needed, Path(folder)) as builds:
            for case in cases:
                left = args.limit - (time.monotonic() - began)
                most = math.inf if machine.virtual else case.seconds
                if left < min(args.case_limit / 3, most / 2):
                    entry: dict[str, Any] = {"not run": f"{left:.0f} s are left"}
                else:
                    limit = min(args.case_limit, min(left, most) / len(VLLMS))
                    entry = run_case(case, builds, machine, limit)
                content["cases"][case.name] = entry
                content["seconds"] = round(time.monotonic() - began, 1)
                # The results so far, in case the machine is lost.
                write(target, content)
                report(case.name, entry)
    print(f"{content['seconds']} s: {target}")
    sys.exit(any(not holds(entry) for entry in content["cases"].values()))


def passed_before(folder: Path) -> set[str]:
    """Functions of the patches' own tests that earlier results have: they come last."""
    names: set[str] = set()
    for path in folder.glob("*.json"):
        for entry in json.loads(path.read_text()).get("cases", {}).values():
            passed = entry.get("patched", {}).get("passed", [])
            names |= {name.partition("[")[0] for name in passed}
    return names


def ahead(cases: list[Case], machine: Machine) -> dict[str, int]:
    """How many processes of each vLLM the cases need; few where a start is slow."""
    needed = [case.processes for case in cases if not why_not(case, machine)]
    most = 1 if machine.virtual else math.inf
    return {
        vllm: sum(int(min(numbers[i], most)) for numbers in needed)
        for i, vllm in enumerate(VLLMS)
    }


def prepare(args: argparse.Namespace, folder: Path) -> Builds:
    if args.bundle:
        return Builds.of_bundle(args.bundle, folder)
    return Builds.of_checkout(Base.load(args.root, args.base), folder)


def holds(entry: dict[str, Any]) -> bool:
    return all(check["holds"] for check in entry.get("checks", []))


def report(name: str, entry: dict[str, Any]) -> None:
    if "not run" in entry:
        print(f"{name}: not run: {entry['not run']}", flush=True)
        return
    print(f"{name}: {'holds' if holds(entry) else 'DOES NOT HOLD'}")
    for check in entry["checks"]:
        mark = "  " if check["holds"] else "! "
        print(f"  {mark}{check['wanted']}: {check['found']}")
    for vllm in VLLMS:
        if entry[vllm].get("outcome") == "no result":
            print(f"    {vllm}: {entry[vllm]['error']}")
    sys.stdout.flush()


if __name__ == "__main__":
    command(main)

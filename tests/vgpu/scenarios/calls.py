"""Random programs of calls to an executor whose workers are processes.

The argument is a JSON object; DEFAULTS lists its keys. Prints a RESULT line: the
faults, and how often each outcome was seen. The workers are light: they sleep, reply
with so many bytes, fail, die, and meet in a barrier where a step would meet in a
collective. An executor serves program after program until one ends it. A late reply to
a call of one program arrives while the next one runs.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.worker import worker_base

from bench.scenarios.result import print_result

# There is no model, whose inputs it asks for.
worker_base.worker_receiver_cache_from_config = lambda *_: None

DEFAULTS: dict[str, Any] = {
    "ranks": 2,
    "programs": 100,
    "seed": 0,
    "named": [],  # of NAMED; they run instead
    "seconds": 0,  # after which no further program begins, if given
    # Only steps that stock can do: nothing ends an executor, and after an error the
    # next program gets another one.
    "release": False,
}
MIB = 2**20
IN_FLIGHT = 8  # calls that are not awaited, at most
PATIENCE = 90  # seconds after which a program hangs
ENDS = 30  # within which an executor with a dead worker has to end

Call = dict[str, Any]  # method, output, timeout, ahead, actions of "ranks"


def call(ranks: int, method: str = "act", **more: Any) -> Call:
    does = more.pop("does", {})
    quiet: dict[str, Any] = {"delay": 0.0, "size": 0, "goes": ""}
    return {
        "method": method,
        "output": None,  # the rank whose reply is wanted, or None: all
        "timeout": None,
        "ahead": False,  # the next call is made before this one is awaited
        "ranks": [quiet | does.get(rank, {}) for rank in range(ranks)],
    } | more


FAILS, DIES = {"goes": "wrong"}, {"goes": "down"}
FAILS_LATER = {"goes": "wrong later"}  # once all have met
LATE = {"delay": 3.0}
NAMED: dict[str, list[Call]] = {
    "a failure of all ranks": [call(2, does={0: FAILS, 1: FAILS}), call(2)],
    "a failure before others reply": [call(2, does={0: FAILS}), call(2), call(2)],
    "a failure beside a slow rank": [call(2, does={0: FAILS, 1: LATE}), call(2)],
    "a reply after the timeout": [call(2, does={0: LATE}, timeout=1), call(2), call(2)],
    "a failure in a step of a rank that is not asked": [
        call(2, "sample_tokens", output=0, does={1: FAILS_LATER}),
        call(2, output=0),
        call(2),
    ],
    # With stock, rank 0 meets rank 1 in the step after its own.
    "a failure in a step that others overtake": [
        call(2, "sample_tokens", output=0, ahead=True, does={1: FAILS}),
        *(call(2, "sample_tokens", output=0, ahead=True) for _ in range(10)),
    ],
    "a step that one fails": [call(2, "sample_tokens", does={1: FAILS}), call(2)],
    "a large reply": [call(2, does={0: {"delay": 1.0}, 1: {"size": 300 * MIB}})],
}


def draw(chance: random.Random, ranks: int, release: bool) -> list[Call]:
    """A program."""
    program = []
    for _ in range(chance.randint(2, 6)):
        step = chance.random() < 0.2
        one = call(
            ranks,
            "sample_tokens" if step else "act",
            output=chance.choice([None, None, chance.randrange(ranks)]),
            timeout=chance.choice([None] * 6 + [0.2, 1.0]),
            ahead=chance.random() < 0.2,
        )
        for does in one["ranks"]:
            if chance.random() < 0.15:
                does["delay"] = chance.choice([0.01] * 4 + [0.2] * 4 + [1.1, 2.0, 5.0])
            if chance.random() < 0.15:
                sizes = [1] * 4 + [MIB] * 4 + [15 * MIB, 30 * MIB, 30 * MIB]
                does["size"] = chance.choice([*sizes, 300 * MIB])
        if chance.random() < 0.2 and not (step and release):
            wrong = "wrong later" if step and chance.random() < 0.8 else ""
            for rank in chance.sample(range(ranks), chance.randint(1, ranks)):
                one["ranks"][rank]["goes"] = wrong or "wrong"
        elif not release and chance.random() < 0.01:
            chance.choice(one["ranks"])["goes"] = "down"
        program.append(one)
    return program


class Light(worker_base.WorkerBase):  # type: ignore[misc]
    def init_device(self) -> None:
        del self.device  # no worker uses CUDA
        torch.distributed.init_process_group(
            "gloo",
            init_method=self.distributed_init_method,
            rank=self.rank,
            world_size=self.parallel_config.world_size,
        )

    def load_model(self, **_: Any) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def act(self, number: int, ranks: list[dict[str, Any]], meets: bool = False) -> Any:
        does = ranks[self.rank]
        time.sleep(does["delay"])
        if does["goes"] == "down":
            os.kill(os.getpid(), signal.SIGKILL)
        if does["goes"] == "wrong":
            raise ValueError(f"call {number} at rank {self.rank}")
        if meets:
            torch.distributed.barrier()
        if does["goes"] == "wrong later":
            raise ValueError(f"call {number} at rank {self.rank}")
        payload = torch.full((does["size"],), number % 256, dtype=torch.uint8)
        return number, self.rank, payload

    def sample_tokens(self, number: int, ranks: list[dict[str, Any]]) -> Any:
        return self.act(number, ranks, meets=True)


def executor(ranks: int, asynchronous: bool) -> Any:
    from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.utils import system_utils
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    # The configuration initializes CUDA, which no worker uses: they may be forked.
    system_utils.cuda_is_initialized = lambda: False
    parallel = ParallelConfig(
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        worker_cls="tests.vgpu.scenarios.calls.Light",
    )
    scheduler = SchedulerConfig.default_factory(async_scheduling=asynchronous)
    return MultiprocExecutor(
        VllmConfig(parallel_config=parallel, scheduler_config=scheduler)
    )


class HangsError(Exception):
    pass


@contextlib.contextmanager
def patience() -> Iterator[None]:
    def hangs(*_: Any) -> None:
        raise HangsError

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)


def outcome(result: Any) -> list[Any]:
    """The outcome of a call ("replies", "failed", "ended" or "late"), and details."""
    try:
        replied = result()
    except TimeoutError:
        return ["late"]
    except RuntimeError as error:
        ended = r"Executor failed\. .*?(?:\brank (\d+) |failed .*\(rank (\d+)\))"
        if found := re.search(ended, str(error), re.S):
            return ["ended", int(found[1] or found[2])]
        if found := re.search(r"call (\d+) at rank (\d+)", str(error)):
            return ["failed", int(found[1]), int(found[2])]
        return ["error", str(error)]

    def told(reply: Any) -> list[int]:
        number, rank, payload = reply
        assert not len(payload) or {int(payload[0]), int(payload[-1])} == {number % 256}
        return [number, rank, len(payload)]

    each = isinstance(replied, list)
    return ["replies", [told(r) for r in replied] if each else told(replied)]


def run(calls: Any, program: list[Call], first: int) -> list[list[Any]]:
    """The outcome of each call; calls are numbered from `first`."""
    outcomes: list[list[Any]] = []
    ahead: list[Any] = []

    def await_all(but: int = 0) -> None:
        while len(ahead) > but:
            outcomes.append(outcome(ahead.pop(0)))

    for number, one in enumerate(program, first):

        def made(number: int = number, one: Call = one) -> Any:
            return calls.collective_rpc(
                one["method"],
                args=(number, one["ranks"]),
                timeout=one["timeout"],
                unique_reply_rank=one["output"],
                non_block=one["ahead"],
            )

        if not one["ahead"]:
            # This call is made first, and awaits those before it.
            mine = outcome(made)
            await_all()
            outcomes.append(mine)
            continue
        try:
            ahead.append(made().result)
        except RuntimeError as error:  # it has ended

            def fail(error: RuntimeError = error) -> None:
                raise error

            ahead.append(fail)
        await_all(but=IN_FLIGHT)
    await_all()
    return outcomes


def expected(one: Call, number: int, ranks: int) -> tuple[list[list[Any]], list[int]]:
    """The allowed outcomes of a call of an executor that has not ended, and the ranks
    for whose failure, or death, it may end then."""
    goes = [does["goes"] for does in one["ranks"]]
    asked = list(range(ranks)) if one["output"] is None else [one["output"]]
    may: list[list[Any]] = [["late"]] if one["timeout"] is not None else []
    failing = [rank for rank in range(ranks) if goes[rank].startswith("wrong")]
    ends = [rank for rank in range(ranks) if goes[rank] == "down"]
    step = one["method"] != "act"
    stuck = step and {"wrong", "down"} & set(goes)  # Nobody passes the barrier.
    if step:
        ends += failing
    else:
        may += [["failed", number, rank] for rank in failing if rank in asked]
    if not stuck and not set(asked) & set(failing + ends):
        replies = [[number, rank, one["ranks"][rank]["size"]] for rank in asked]
        may.append(["replies", replies if one["output"] is None else replies[0]])
    return may, ends


def judge(
    program: list[Call], outcomes: list[list[Any]], first: int, ranks: int
) -> tuple[list[str], bool]:
    """The faults, and whether the executor has to end."""
    wrong = []
    # It may have ended for these; a death also ends calls in flight before it.
    ends = [
        rank
        for one in program
        for rank, does in enumerate(one["ranks"])
        if does["goes"] == "down"
    ]
    must = ended = False
    for number, (one, came) in enumerate(zip(program, outcomes, strict=True), first):
        may, more = expected(one, number, ranks)
        ends += more
        ended = ended or came[0] == "ended"
        # A reply may have been read before the end.
        if not (came[1] in ends if came[0] == "ended" else came in may):
            wrong.append(f"call {number}: {came}, not {may} nor ended by {ends}")
        must = must or bool(more)
    return wrong, ended or must


def check_ended(calls: Any) -> list[str]:
    """Each later call says that it ended, and nothing is left of its workers."""
    processes = [worker.proc for worker in calls.workers]
    deadline = time.monotonic() + ENDS
    while time.monotonic() < deadline:
        if calls.is_failed and not any(p.is_alive() for p in processes):
            break
        time.sleep(0.05)
    wrong = [f"{p.name} is left" for p in processes if p.is_alive()]
    for ask in calls.check_health, lambda: calls.collective_rpc("act"):
        if (came := outcome(ask))[0] != "ended":
            wrong.append(f"has ended, and says {came}")
    return wrong


def main() -> None:
    asked = DEFAULTS | json.loads(sys.argv[1])
    assert asked.keys() == DEFAULTS.keys(), asked
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    ranks, release = asked["ranks"], asked["release"]
    seen: collections.Counter[str] = collections.Counter()
    found: dict[str, Any] = {"wrong": [], "hangs": [], "outcomes": {}}
    names = asked["named"] or [f"{asked['seed']}-{i}" for i in range(asked["programs"])]
    began = time.monotonic()
    calls, number = None, 0
    for name in names:
        if asked["seconds"] and time.monotonic() - began > asked["seconds"]:
            break
        seen["programs"] += 1
        program = NAMED.get(name) or draw(random.Random(name), ranks, release)
        program = [*program, call(ranks)]  # It still serves, or says why not.
        if calls is None:
            seen["executors"] += 1
            calls = executor(ranks, asynchronous=bool(seen["executors"] % 2))
        first, number = number, number + len(program)
        try:
            with patience():
                outcomes = run(calls, program, first)
                failed = [came[0] != "replies" for came in outcomes]
                if release and any(failed):  # later replies are shifted by it
                    outcomes = outcomes[: failed.index(True) + 1]
                judged = program[: len(outcomes)]
                wrong, ends = judge(judged, outcomes, first, ranks)
                goes = [does["goes"] for one in program for does in one["ranks"]]
                if ends or "down" in goes:
                    wrong += check_ended(calls)
                    ends = True
        except HangsError:
            found["hangs"].append(name)
            for worker in calls.workers:
                worker.proc.kill()
            wrong, ends, outcomes = [], True, []
        found["outcomes"][name] = outcomes
        found["wrong"] += [f"{name}: {what}" for what in wrong]
        seen.update(came[0] for came in outcomes)
        if ends or wrong or (release and any(c[0] != "replies" for c in outcomes)):
            calls.shutdown()
            calls = None
        took = round(time.monotonic() - began)
        print(name, len(program), outcomes[-1:], wrong, took, flush=True)
    if calls is not None:
        calls.shutdown()
    print_result(found | {"seen": seen})


if __name__ == "__main__":
    main()

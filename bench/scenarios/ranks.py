"""Start one engine after another whose workers are processes, a device each.

The argument is a JSON list of cases; DEFAULTS lists the keys of one. Prints a RESULT
line for each: how it ended, the error if it failed, and each rank's account of itself.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from bench.scenarios import start
from bench.scenarios.on_the_host import (
    compute_on_host,
    inspect_models_here,
    warm_up_few_batches,
)
from bench.scenarios.result import print_result
from bench.scenarios.start_each import import_vllm

DEFAULTS: dict[str, Any] = {
    "model": "dense",
    "v2": True,
    "graphs": False,
    "compile": False,
    "sleep": 0,  # level
    "sleep_fails": False,  # and so does waking up: see there
    "generate": 0,  # tokens
    "largest": False,  # serve the largest batches (see start.serve)
    "tight": False,  # no device has more than its request
    "report": False,  # each worker's memory report is wanted
    "data_parallel": 1,  # number of engines that share the experts
    "held": [],  # what another process holds of each device before the start
    # What goes wrong, as a phase (see rank.PHASES) begins at a rank:
    # "memory" (another process takes all that is free), "raise" or "kill".
    "fails": {},  # {"rank", "phase", "how"}
    # Seconds after which a start that has not ended "hangs"; the first one of all
    # compiles kernels, for minutes where two cores do other work, too.
    "patience": 300,
    "executor": "mp",  # or "ray", or a class by its name
    "method": "fork",  # how workers are started
    "engine_process": False,  # the engine core is a process, as when serving
    "serve": False,  # the engine is one that serves; it does not generate
    "dies": None,  # the rank that is killed while that engine is idle
    "environment": {},
    "llm": {},  # further arguments of LLM
}


# Seconds that processes which are about to end get to do so.
LEAVING = {"ray": 5.0}
# Ray's own processes, some of which look for their parent now and then.
CLUSTER = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "/ray/dashboard/agent.py")
ACTOR = "ray::RayWorkerProc"
RAY = Path(__file__).resolve().parents[2] / "build/ray"
PLUGIN = str(Path(__file__).resolve().parents[1] / "rank_plugin")


def main() -> None:
    cases = json.loads(sys.argv[1])
    if any(case.get("executor") == "ray" for case in cases):
        sys.path.insert(0, str(RAY))  # vLLM looks for it as it is imported
    sys.path.append(PLUGIN)
    os.environ["PYTHONPATH"] += os.pathsep + PLUGIN
    import_vllm()  # once for all engines
    for case in cases:
        assert case.keys() <= DEFAULTS.keys(), case
        for result in engines(DEFAULTS | case):
            print_result(result)


def engines(case: dict[str, Any]) -> list[dict[str, Any]]:
    """What each engine of a case says; they are processes of their own."""
    count = case["data_parallel"]
    port = free_port() if count > 1 else 0
    # No TemporaryDirectory: each child would remove it as it ends.
    folder = Path(tempfile.mkdtemp())
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            os.setsid()
            engine_process(case, number, port, folder)
        children.append(child)
    results = []
    for number, child in enumerate(children):
        told = folder.joinpath(f"result-{number}")
        status, ended = wait(child, case["patience"], told)
        if told.exists():
            result = json.loads(told.read_text())
        else:
            result = {"outcome": "hangs" if status is None else "died"}
        result["left"] = left(child, LEAVING.get(case["executor"], 0.2))
        result["left_shared"] = left_shared(child)
        if (failed := folder.joinpath("failed")).exists():
            result["failed_after"] = ended - float(failed.read_text())
        results.append(result)
    shutil.rmtree(folder)
    release_all()
    return results


def wait(child: int, seconds: float, told: Path) -> tuple[int | None, float]:
    """Its status, or None: it was killed after these seconds; and when it had ended.

    With Ray, when it had told its result and its workers had ended: afterwards the
    process only ends Ray's cluster, which is not the engine's.
    """
    deadline = time.monotonic() + seconds
    over = None
    while (now := time.monotonic()) < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, over or now
        if over is None and told.exists():
            commands = " ".join(alive(child).values())
            if "ray::DashboardAgent" in commands and ACTOR not in commands:
                over = now
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, time.monotonic()


def engine_process(case: dict[str, Any], number: int, port: int, folder: Path) -> None:
    result: dict[str, Any] = {"outcome": "started"}
    status = 1
    # So that its leftovers can be told from those of others.
    prefix = shared_memory_of(os.getpid())
    os.environ["RANKS_SHARED_MEMORY"] = prefix
    setattr(shared_memory, "_SHM_NAME_PREFIX", prefix)  # noqa: B010
    try:
        if case["data_parallel"] > 1:
            os.environ |= {
                "VLLM_DP_RANK": str(number),
                "VLLM_DP_RANK_LOCAL": str(number),
                "VLLM_DP_SIZE": str(case["data_parallel"]),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
            }
        os.environ |= case["environment"]
        try:
            run(case, result, folder)
        except Exception as error:  # an outcome, not an accident
            traceback.print_exc()
            result["outcome"] = type(error).__name__
            result["error"] = str(error)[:4000]
        status = 0
    finally:
        (folder / f"result-{number}").write_text(json.dumps(result))
        atexit._run_exitfuncs()  # as an interpreter that ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(case: dict[str, Any], result: dict[str, Any], folder: Path) -> None:
    start.configure(case["v2"])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(case["engine_process"]))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = case["method"]
    # Workers name themselves in each line that they log.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "1"
    if case["report"]:
        os.environ["VLLM_STARTUP_MEMORY_REPORT"] = str(folder / "report.json")
    if case["executor"] == "ray":
        use_ray(folder)
    from vllm import LLM

    from bench.scenarios import models
    from vgpu import control

    inspect_models_here()
    warm_up_few_batches()
    compute_on_host(models.MODELS[case["model"]], case["llm"])
    for device, size in enumerate(case["held"]):
        control.other_process(size, device)
    if case["fails"]:
        fails = case["fails"] | {"when": str(folder / "failed")}
        os.environ["RANKS_FAILS"] = json.dumps(fails)
    arguments: dict[str, Any] = {
        "enforce_eager": not case["graphs"],
        "distributed_executor_backend": case["executor"],
        "enable_sleep_mode": case["sleep"] > 0,
    }
    if case["graphs"]:
        arguments["compilation_config"] = start.graphs(case["compile"])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as written:
        arguments = start.ENGINE | arguments | case["llm"]
        arguments["model"] = models.write(case["model"], Path(written))
        if case["serve"]:
            serve(arguments, case["dies"], result, folder)
            return
        llm = LLM(**arguments)
    result["seconds"] = time.perf_counter() - began
    config = llm.llm_engine.vllm_config
    result |= {
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "v2": bool(getattr(config, "use_v2_model_runner", False)),
        "ranks": llm.collective_rpc("tell"),
    }
    if level := case["sleep"]:
        llm.sleep(level=level)
        result["asleep"] = llm.collective_rpc("tell")
        llm.wake_up()
        result["awake again"] = llm.collective_rpc("tell")
    if case["sleep_fails"]:
        result["steps"] = sleep_fails(llm)
    if tokens := case["generate"]:
        result["tokens"] = start.generate(llm, tokens)
    if case["tight"]:
        for rank in result["ranks"]:
            left = max(0, rank["before"] + rank["requested"] - rank["used"])
            free = control.available(rank["device"])
            control.other_process(max(0, free - left), rank["device"])
    if case["largest"]:
        result["served"] = start.serve(llm)
        result["after"] = llm.collective_rpc("tell")
    result["reports"] = {
        file.name: json.loads(file.read_text()) for file in folder.glob("report.json*")
    }
    llm.llm_engine.engine_core.shutdown()


def sleep_fails(llm: Any) -> dict[str, dict[str, Any]]:
    """The second device lacks memory as all wakes up; then its worker cannot keep its
    weights. Memory of each device after each step, and the step's result."""
    from vgpu import control

    steps: dict[str, dict[str, Any]] = {}

    def step(name: str, call: Any, *arguments: Any) -> None:
        told = steps[name] = {"error": "", "returned": None}
        try:
            told["returned"] = call(*arguments)
        except Exception as error:
            told["error"] = str(error)[:1000]
        told["used"] = [control.used(d) - control.other(d) for d in (0, 1)]

    step("awake", llm.llm_engine.is_sleeping)
    step("sleep", llm.sleep)
    pooled = llm.collective_rpc("tell")[1]["pooled"]
    control.other_process(control.available(1) - pooled + (16 << 20), 1)
    step("wake without room", llm.wake_up)
    control.other_process(-control.other(1), 1)
    step("wake", llm.wake_up)
    for copy in "cudaMemcpy", "cuMemcpyDtoH*":  # the release's, ours
        control.inject(copy, device=1, nth=2)
    step("sleep fails", llm.sleep)
    control.clear_injections()
    step("is asleep", llm.llm_engine.is_sleeping)
    step("wake after", llm.wake_up)
    return steps


def use_ray(folder: Path) -> None:
    """The one of `make ray`; workers import it, too, and write into this folder."""
    os.environ["PYTHONPATH"] = os.pathsep.join((str(RAY), os.environ["PYTHONPATH"]))
    os.environ["RAY_TMPDIR"] = str(folder)


def serve(
    arguments: dict[str, Any], dies: int | None, result: dict[str, Any], folder: Path
) -> None:
    """What health checks and a request are told of a rank that dies."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def ask(engine: Any) -> None:
        told = await engine.collective_rpc("tell")
        os.kill(told[dies]["process"], signal.SIGKILL)
        (folder / "failed").write_text(str(time.monotonic()))
        try:
            while True:  # until it is noticed, or patience ends
                await engine.check_health()
                await asyncio.sleep(0.05)
        except Exception as error:
            result["health"] = str(error)
        try:
            asked = {"prompt_token_ids": [3] * 16}
            async for _ in engine.generate(asked, SamplingParams(), request_id="1"):
                pass
        except Exception as error:
            result["request"] = str(error)

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        if dies is not None:
            await ask(engine)
        engine.shutdown()

    asyncio.run(main())


def alive(session: int) -> dict[int, str]:
    """Command lines of the processes of a session."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, in_session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(in_session) == session and state != "Z":
                command = entry.with_name("cmdline").read_bytes().decode().rstrip("\0")
                found[int(entry.parent.name)] = command
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def left(session: int, seconds: float) -> list[str]:
    """Kill the rest of a session that is over; returns the command lines. Processes
    that are about to end get these seconds to do so."""
    deadline = time.monotonic() + seconds
    while (remaining := alive(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in remaining:
        os.kill(process, signal.SIGKILL)
    return [c for c in remaining.values() if not any(own in c for own in CLUSTER)]


def shared_memory_of(process: int) -> str:
    return f"/r{process:x}_"  # a name has 14 characters at most


def left_shared(process: int) -> list[str]:
    """Remove shared memory of an engine that is over; returns the names."""
    prefix = shared_memory_of(process).strip("/")
    files = sorted(Path("/dev/shm").glob(f"{prefix}*"))
    for file in files:
        file.unlink(missing_ok=True)
    return [file.name.removeprefix(prefix) for file in files]


def release_all() -> None:
    """Release other processes' memory on each device."""
    from vgpu import control

    for device in range(control.devices()):
        control.other_process(-control.other(device), device)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()

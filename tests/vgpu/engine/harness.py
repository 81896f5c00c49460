"""Run a scenario in its own process, on a chosen device and vLLM."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.scenarios.result import read_result
from bench.scenarios.start_each import IMPORTED
from scripts import caches as caches_of_runs
from vgpu import config, launch
from vgpu.server import Server

ROOT = Path(__file__).resolve().parents[3]
HOOKS = (ROOT / "bench/scenarios/hooks.toml").read_text()
COUNTS = (ROOT / "bench/scenarios/counts.toml").read_text()
# The official release is installed; ours is put before it on the path.
BASE = version("vllm")
SITES = {"official": "", "envelope": str(ROOT / f"build/envelope-{BASE}")}
KERNELS = ROOT / "build/kernels"
_servers: dict[str, Server] = {}
# Without FlashInfer, which asks the device when it is imported.
# Nor compressed_tensors, which a load imports with the device as the default: a table
# of its own then lies there.
TRITON = "scripts.shared_triton_cache"
IMPORTS = ("-flashinfer", *IMPORTED, "tilelang", TRITON, "cutlass")


def run(
    scenario: str,
    case: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    vllm: str,
    device: Mapping[str, object],
    hooks: str = "",
    folder: Path,
    visible: str | None = None,
    caches: Path | None = None,
    forked: bool = True,
    timeout: int = 420,
) -> dict[str, Any]:
    """The last JSON line that a scenario prints, with its "stdout" and "stderr" and,
    if it prints several, all of them as "every".

    A scenario is a module of tests/vgpu/scenarios or bench/scenarios. Its case is JSON
    if that is no string. It starts cold: no result of an earlier run is there, unless
    `caches` is the folder where that run kept them.
    `forked` from a process that has imported vLLM without FlashInfer, or else one that
    imports for itself.

    `visible` is CUDA_VISIBLE_DEVICES.

    Raises:
        AssertionError: it printed none; shows its output.
        TimeoutError: it was killed after `timeout` seconds.
    """
    settings = folder / "device.toml"
    settings.write_text(
        "".join(f"{k} = {json.dumps(v)}\n" for k, v in device.items()) + hooks
    )
    own = caches or Path(tempfile.mkdtemp(prefix="caches-", dir=folder))
    environment = environment_of(vllm, own)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    argument = case if isinstance(case, str) else json.dumps(case)
    command = ["-m", module_of(scenario), argument]
    out, error = folder / "stdout", folder / "stderr"
    if forked:
        server(vllm).run(
            config.load(settings), command, folder=folder, environment=environment,
            out=out, error=error, timeout=timeout,
        )  # fmt: skip
    else:
        with (
            launch.device(config.load(settings), environment) as env,
            out.open("w") as to,
            error.open("w") as errors_to,
        ):
            subprocess.run(
                [sys.executable, *command], cwd=folder, env=env, timeout=timeout,
                stdin=subprocess.DEVNULL, stdout=to, stderr=errors_to,
            )  # fmt: skip
    stdout, stderr = (file.read_text(errors="replace") for file in (out, error))
    results = [
        r for line in stdout.splitlines() if (r := read_result(line)) is not None
    ]
    assert results, stdout[-3000:] + stderr[-3000:]
    return results[-1] | {"every": results, "stdout": stdout, "stderr": stderr}


def module_of(scenario: str) -> str:
    own = ROOT / f"tests/vgpu/scenarios/{scenario}.py"
    package = "tests.vgpu.scenarios" if own.exists() else "bench.scenarios"
    return f"{package}.{scenario}"


def environment_of(vllm: str, caches: Path) -> dict[str, str]:
    site = SITES[vllm]
    assert not site or (Path(site) / "vllm").is_dir(), "run 'make envelope' first"
    plugins = [str(ROOT / f"bench/{name}") for name in ("plugin", "report_plugin")]
    paths = [site, str(ROOT), *plugins]  # see block_ids.py, plan_report.py
    base = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    # Benchmarks measure a start with all of them (on_the_host.py).
    base["WARM_UP_FEW_BATCHES"] = "1"
    return caches_of_runs.environment(base, caches, KERNELS)


def server(vllm: str) -> Server:
    """Lives as long as the tests of this process, or until it is closed."""
    site = SITES[vllm]
    if site not in _servers:
        folder = tempfile.TemporaryDirectory(prefix="vgpu-server-")
        environment = environment_of(vllm, Path(folder.name))
        started = Server(sys.executable, IMPORTS, environment, config.load())
        atexit.register(folder.cleanup)
        atexit.register(started.close)
        _servers[site] = started
    return _servers[site]


def close_server(vllm: str) -> None:
    """Each takes a GiB of the host."""
    if started := _servers.pop(SITES[vllm], None):
        atexit.unregister(started.close)
        started.close()

"""Run a scenario in a process of its own, on a device and a vLLM of one's choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS = Path(__file__).parent / "scenarios"
HOOKS = Path(__file__).with_name("hooks.toml").read_text()
# The official release is the installed one; ours lies before it on the path.
BASE = version("vllm")
SITES = {"official": "", "envelope": str(ROOT / f"build/envelope-{BASE}")}


def run(
    scenario: str | Path,
    case: Mapping[str, Any] | Sequence[Mapping[str, Any]] | list[str],
    *,
    vllm: str,
    device: Mapping[str, object],
    hooks: str = "",
    folder: Path,
    visible: str | None = None,
    timeout: int = 420,
) -> dict[str, Any]:
    """The last JSON line that a scenario prints, with its "stdout" and "stderr" and,
    if it prints several, all of them as "every".

    A scenario is the name of a file in scenarios/, which takes its case as JSON, or
    the path of a script with arguments of its own.

    `visible` is CUDA_VISIBLE_DEVICES.

    Raises:
        AssertionError: it printed none; shows what it did print.
    """
    site = SITES[vllm]
    assert not site or (Path(site) / "vllm").is_dir(), "run 'make envelope' first"
    settings = folder / "device.toml"
    settings.write_text(
        "".join(f"{k} = {json.dumps(v)}\n" for k, v in device.items()) + hooks
    )
    paths = [site, str(ROOT), str(SCENARIOS)]
    environment = {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    script = SCENARIOS / f"{scenario}.py" if isinstance(scenario, str) else scenario
    arguments = [json.dumps(case)] if isinstance(scenario, str) else case
    done = subprocess.run(
        [sys.executable, "-m", "vgpu", "--config", str(settings), "--",
         sys.executable, str(script), *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )  # fmt: skip
    lines = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    result: dict[str, Any] = results[-1]
    return result | {
        "every": results,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }

"""Scripts run with the official or the patched vLLM on a virtual device."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import caches
from series import REPOSITORY, Base, Problem, scratch

SITES = ("official", "envelope")
SCENARIOS = REPOSITORY / "tests/vgpu/engine/scenarios"


def environment_of(base: Base) -> tuple[Path, Path]:
    """The interpreter that has the official vLLM, and ours, to lie before it.

    Raises:
        Problem: they have not been made.
    """
    python = base.root / f".venv-vllm-{base.version}/bin/python"
    ours = base.root / f"build/envelope-{base.version}"
    if not python.exists() or not ours.is_dir():
        raise Problem(f"'make vgpu envelope BASE={base.version}' first.")
    return python, ours


def results(
    base: Base,
    site: str,
    device: Mapping[str, object],
    script: Path,
    argument: str,
    environment: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> list[dict[str, Any]]:
    """What a script prints after "RESULT ", a JSON object a line.

    `site` is one of SITES. `config` is a TOML file with more of the device. It starts
    cold: no result of an earlier run is there.

    Raises:
        Problem: it printed none; shows what it wrote.
    """
    python, ours = environment_of(base)
    # Scenarios have the kernels' shelf beside them.
    paths = [*([ours] if site == "envelope" else []), base.root, SCENARIOS]
    settings = [f"--set={key}={value}" for key, value in device.items()]
    if config is not None:
        settings.append(f"--config={config}")
    build = base.root / "build"
    with scratch(build, "caches") as folder:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        done = subprocess.run(
            [python, "-m", "vgpu", *settings, "--", python, script, argument],
            cwd=build,
            env=caches.environment(env, folder, build / "kernels")
            | dict(environment or {}),
            capture_output=True,
            text=True,
        )
    lines = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    if not lines:
        raise Problem(f"{script.name}, {site}: no result.\n{done.stderr[-2000:]}")
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]

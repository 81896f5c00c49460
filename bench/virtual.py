"""Scenarios run with stock or patched vLLM on a virtual device."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from bench.scenarios.result import read_result
from scripts import caches
from scripts.commands import REPOSITORY, Problem
from scripts.release import Base

SITES = ("official", "envelope")
# As tables name them.
NAMES = dict(zip(SITES, ("stock", "patched"), strict=True))
# Values that kernels would have computed, where vLLM reads them back.
HOOKS = REPOSITORY / "bench/scenarios/hooks.toml"


def recorded(root: Path) -> str:
    """The line below a table: which commit it is of."""
    order = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(order, cwd=root, capture_output=True, text=True, check=True)
    return f"Recorded at commit `{done.stdout.strip()}` on {date.today()}."


def environment_of(base: Base) -> tuple[Path, Path]:
    """The interpreter that has stock vLLM, and the folder of the patched one to put
    before it.

    Raises:
        Problem: they have not been made.
    """
    python = base.root / f".venv-vllm-{base.version}/bin/python"
    ours = base.unpacked
    if not python.exists() or not ours.is_dir():
        raise Problem(f"'{made_by(base)}' first.")
    return python, ours


def made_by(base: Base) -> str:
    """The command that makes both."""
    order = f"make vgpu envelope BASE={base.version}"
    if base.set:
        return f"{order} SET={base.set}"
    return f'{order} PATCHES="{" ".join(base.topics)}"' if base.topics else order


def results(
    base: Base,
    site: str,
    device: Mapping[str, object],
    scenario: str,
    argument: str,
    environment: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """What a scenario prints after "RESULT ", a JSON object a line, as it comes.

    `site` is one of SITES. `config` is a TOML file with more of the device. The
    scenario starts cold: no result of an earlier run is there.

    Raises:
        Problem: there were none; shows the output of the scenario.
    """
    python, ours = environment_of(base)
    paths = [*([ours] if site == "envelope" else []), base.root]
    settings = [f"--set={key}={value}" for key, value in device.items()]
    if config is not None:
        settings.append(f"--config={config}")
    build = base.root / "build"
    inherited = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    with (
        # Others may run at the same time, so leftovers of killed runs stay.
        TemporaryDirectory(
            prefix=".caches.", dir=build, ignore_cleanup_errors=True
        ) as folder,
        TemporaryFile("w+", errors="replace") as log,
    ):
        own = caches.environment(inherited, Path(folder), build / "kernels")
        with subprocess.Popen(
            [
                python,
                "-m",
                "vgpu",
                *settings,
                "--",
                python,
                "-m",
                f"bench.scenarios.{scenario}",
                argument,
            ],
            cwd=folder,
            env=own | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process:
            assert process.stdout
            none = True
            for line in process.stdout:
                if (result := read_result(line)) is not None:
                    none = False
                    yield result
        if none:
            log.seek(0)
            said = log.read()[-2000:]
            raise Problem(f"{scenario}, {site}: no result.\n{said}")

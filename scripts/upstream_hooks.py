"""Run upstream's own pre-commit hooks that are Python scripts of its tree.

Each runs with the packages that it requires, which uv fetches once. The other hooks
(ruff, typos, ...) have their own repositories: `make pr` runs them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from scripts.commands import scratch

CONFIG = ".pre-commit-config.yaml"
# A type check of all that the files import: once for the series, not for each patch.
SLOW = {"mypy"}


def run(tree: Path, files: list[str], folder: Path, slow: bool = False) -> list[str]:
    """The hooks' complaints about `files`: the slow ones, or the others.

    Their packages lie in `folder`.
    """
    path = tree / CONFIG
    if not path.exists():
        return []
    said = []
    config = yaml.safe_load(path.read_text())
    files = not_excluded(config, files)
    for repo in config["repos"]:
        for hook in repo["hooks"] if repo["repo"] == "local" else []:
            wanted = matching(hook, files)
            script = shlex.split(hook.get("entry", ""))
            right = script[:1] == ["python"] and slow == (hook["id"] in SLOW)
            if not wanted or not right:
                continue
            python = with_packages(
                tuple(hook.get("additional_dependencies", [])), folder
            )
            if not python:
                print(f"  {hook['id']}: not run, its packages could not be fetched")
                continue
            tools = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                [python, *script[1:], *wanted], cwd=tree, capture_output=True,
                text=True, env=os.environ | {"PATH": tools},
            )  # fmt: skip
            if done.returncode:
                lines = (done.stdout + done.stderr).strip().splitlines()
                said += [f"{hook['id']}: {plain(line)}" for line in lines]
    return said


@cache
def with_packages(packages: tuple[str, ...], folder: Path) -> Path | None:
    """The Python of an environment that has them; None if they cannot be fetched,
    which is tried once."""
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:16]
    python = folder / name / "bin/python"
    if not python.exists():
        with scratch(folder, name) as part:
            new = part / "env"
            uv = [sys.executable, "-m", "uv"]
            venv = [*uv, "venv", "-q", "--relocatable", "-p", sys.executable, str(new)]
            install = [*uv, "pip", "install", "-q", "-p", str(new), *packages]
            for command in [venv, install][: 1 + bool(packages)]:
                if subprocess.run(command, capture_output=True).returncode:
                    return None
            new.rename(folder / name)
    return python


def matching(hook: dict[str, Any], files: list[str]) -> list[str]:
    """The files that a hook for Python files runs on."""
    kinds = [*hook.get("types", []), *hook.get("types_or", [])]
    if "python" not in kinds or not hook.get("pass_filenames", True):
        return []
    pattern = hook.get("files", "")
    wanted = [f for f in files if f.endswith(".py") and re.search(pattern, f)]
    return not_excluded(hook, wanted)


def not_excluded(asked: dict[str, Any], files: list[str]) -> list[str]:
    """Those that a hook, or the whole configuration, does not exclude."""
    return [f for f in files if not re.search(asked.get("exclude", "^$"), f)]


def plain(line: str) -> str:
    """Without colours."""
    return re.sub(r"\033\[[0-9;]*m", "", line)

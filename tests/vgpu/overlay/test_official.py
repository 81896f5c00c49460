"""The overlay on the official release of this environment, in a copy of links."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import caches

ROOT = Path(__file__).resolve().parents[3]
BASE = importlib.metadata.version("vllm")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    official = importlib.metadata.distribution("vllm").locate_file("")
    # Not the bytecode, which other tests write meanwhile.
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("vllm", f"vllm-{BASE}.dist-info"):
        target = tmp_path / "site" / name
        shutil.copytree(
            f"{official}/{name}", target, copy_function=os.symlink, ignore=ignore
        )
    return tmp_path / "site"


def python(site: Path, *arguments: str) -> str:
    environment = caches.environment(os.environ, site.parent / "caches")
    environment |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.check_output(command, env=environment, text=True, cwd=site)


def overlay(site: Path, command: str) -> str:
    (archive,) = (ROOT / "dist").glob(f"vllm-{BASE}+*-overlay-{os.uname().machine}.pyz")
    return python(site, str(archive), command)


def record(site: Path) -> dict[str, str]:
    """Hash by file name, as RECORD has it, of the files in ``site``."""
    (path,) = site.glob("vllm-*.dist-info/RECORD")
    rows = csv.reader(path.read_text().splitlines())
    return {n: h for n, h, _ in rows if h and not n.startswith("..")}


def sha256(path: Path) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def test_it_becomes_the_patched_wheel_and_the_official_one_again(site: Path) -> None:
    official = record(site)
    overlay(site, "install")
    ours = record(site)
    assert {name: sha256(site / name) for name in ours} == ours
    patched = record(ROOT / f"build/envelope-{BASE}")
    assert len(patched) > 2000 and patched.items() <= ours.items()
    script = ("import importlib.metadata as m, vllm; "
              "print(vllm.__file__, vllm.__version__, m.version('vllm'))")  # fmt: skip
    (info,) = site.glob("vllm-*.dist-info")
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    assert python(site, "-c", script).split() == [
        f"{site}/vllm/__init__.py", version, version,
    ]  # fmt: skip
    overlay(site, "revert")
    assert record(site) == official
    assert {name: sha256(site / name) for name in official} == official
    assert sorted(p.name for p in site.iterdir()) == ["vllm", f"vllm-{BASE}.dist-info"]

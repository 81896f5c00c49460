"""vLLM's own GPU tests, unmodified, on the device: outcomes as in expected.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import caches
import pytest

ROOT = Path(__file__).resolve().parents[3]
BASE = version("vllm")
SITES = {"official": "", "envelope": str(ROOT / f"build/envelope-{BASE}")}
SOURCE = tomllib.loads((ROOT / f"patches/v{BASE}/base.toml").read_text())
TREE = ROOT / SOURCE.get("tree", "vllm")
COMMITS = {"official": "refs/envelope/base", "envelope": "HEAD"}
EXPECTED = tomllib.loads(Path(__file__).with_name("expected.toml").read_text())


def unpack_tests(vllm: str, folder: Path) -> None:
    """Unpack that vLLM's tests, away from its sources."""
    archive = folder / "tests.tar"
    subprocess.run(
        ["git", "-C", str(TREE), "archive", "-o", str(archive),
         COMMITS[vllm], "tests", "pyproject.toml"],
        check=True,
    )  # fmt: skip
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()


@pytest.mark.parametrize("vllm", ["official", "envelope"])
@pytest.mark.parametrize("file", EXPECTED["files"][BASE], ids=lambda f: Path(f).stem)
def test_outcomes(file: str, vllm: str, tmp_path: Path) -> None:
    unpack_tests(vllm, tmp_path)
    report = tmp_path / "report.xml"
    paths = [SITES[vllm], str(ROOT), str(tmp_path / "tests/vllm_test_utils")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    skipped = [f"--deselect={file}::{name}" for name in EXPECTED["needs_network"]]
    done = subprocess.run(
        [sys.executable, "-m", "vgpu", "--memory", "16GiB", "--",
         sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         f"--junitxml={report}", *skipped, file],
        cwd=tmp_path,
        env=caches.environment(environment, tmp_path / "caches"),
        capture_output=True,
        text=True,
        timeout=540,
    )  # fmt: skip
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    failed, passed = set(), set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.add(name)
        elif "skipped" not in kinds:
            passed.add(name)
    assert passed
    expected = EXPECTED["needs_arithmetic"].keys() & (failed | passed)
    assert failed == expected, done.stdout[-6000:]
    shutil.rmtree(tmp_path / "tests")

"""vLLM's own GPU tests, unmodified, on the device: outcomes as in expected.toml."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts.junit import outcomes
from scripts.release import Base
from tests.vgpu.engine import harness
from vgpu import config

ROOT = Path(__file__).resolve().parents[3]
TREE = Base.load(ROOT, version("vllm")).tree
COMMITS = {"official": "refs/envelope/base", "envelope": "HEAD"}
EXPECTED = tomllib.loads(Path(__file__).with_name("expected.toml").read_text())


def unpack_tests(vllm: str, folder: Path) -> None:
    """Unpack the tests of this vLLM, away from its sources."""
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
@pytest.mark.parametrize("file", EXPECTED["files"], ids=lambda f: Path(f).stem)
def test_tests_of_vllm_have_expected_outcomes(
    file: str, vllm: str, tmp_path: Path
) -> None:
    unpack_tests(vllm, tmp_path)
    report = tmp_path / "report.xml"
    skipped = [f"--deselect={file}::{name}" for name in EXPECTED["needs_network"]]
    out, error = tmp_path / "out", tmp_path / "error"
    environment = harness.environment_of(vllm, tmp_path / "caches")
    # vLLM sets it where it is imported: looking for a GPU does not initialize CUDA.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    harness.server(vllm).run(
        config.load(memory="16GiB"),
        ["-m", "pytest", "-q", "-p", "no:cacheprovider",
         "-p", "scripts.forked_tests", "-o", "pythonpath=tests/vllm_test_utils",
         f"--junitxml={report}", *skipped, file],
        folder=tmp_path,
        environment=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        out=out,
        error=error,
        timeout=540,
    )  # fmt: skip
    said = "".join(file.read_text(errors="replace")[-6000:] for file in (out, error))
    assert report.is_file(), said
    failed, passed = set(), set()
    for case, outcome in outcomes(report):
        name = case.partition("[")[0]
        if outcome in ("failed", "error"):
            failed.add(name)
        elif outcome == "passed":
            passed.add(name)
    assert passed
    expected = EXPECTED["needs_arithmetic"].keys() & (failed | passed)
    assert failed == expected, said
    shutil.rmtree(tmp_path / "tests")

"""The marker: a test's outcome on the device is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

INNER = """
import os, pytest

@pytest.fixture
def made():
    yield os.environ.get("VGPU_RUN")
    print("fixture done")

@pytest.mark.vgpu(memory="1GiB")
def test_passes(made):
    assert made

@pytest.mark.vgpu(memory="1GiB")
def test_fails():
    print("what it printed")
    answer = 41
    assert answer == 42

@pytest.mark.vgpu(memory="1GiB")
def test_skips():
    pytest.skip("not today")

@pytest.mark.vgpu(memory="1GiB")
@pytest.mark.xfail(strict=True)
def test_expected_to_fail():
    assert False

@pytest.mark.vgpu(memory="1GiB")
def test_crashes():
    os.abort()

@pytest.mark.vgpu(memory="1GiB", timeout=2)
def test_hangs():
    import time; time.sleep(60)

@pytest.mark.vgpu(memroy="1GiB")
def test_misspelt():
    pass

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.vgpu(memory="1GiB", devices=2, env={"MARK": "yes"})
def test_each(n):
    assert os.environ["MARK"] == "yes" and n < 2
"""


def test_outcomes_are_the_tests_own(tmp_path: Path) -> None:
    path = tmp_path / "test_inner.py"
    path.write_text(INNER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "vgpu.pytest_plugin", str(path)]
        + ["-rA", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    out = done.stdout
    assert "3 passed" not in out
    assert "2 passed, 1 skipped, 1 xfailed" in out.replace("5 failed, ", "")
    assert "5 failed" in out
    assert "assert 41 == 42" in out and "what it printed" in out
    assert "not today" in out
    assert "the process ended (-6)" in out
    assert "no end after 2 s" in out
    assert "unknown key 'memroy'" in out and "did you mean memory" in out
    assert "test_each[2]" in out


def test_fixtures_of_the_modules_around_are_torn_down(tmp_path: Path) -> None:
    """A plain test, a marked one, and a plain one in another folder."""
    plain = "def test_plain(tmp_path):\n    assert tmp_path.is_dir()\n"
    marked = "import pytest\n\n@pytest.mark.vgpu\ndef test_marked():\n    pass\n"
    for folder, text in (("a", plain + marked), ("b", plain)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "vgpu.pytest_plugin", str(tmp_path)]
        + ["--rootdir", str(tmp_path), "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "3 passed" in done.stdout, done.stdout


@pytest.mark.vgpu(memory="3GiB")
def test_device_is_the_one_described() -> None:
    from vgpu import control

    assert control.memory() == 3 * 2**30

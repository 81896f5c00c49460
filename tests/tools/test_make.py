"""make says what is missing before it fetches or builds anything."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools.project import ROOT

MAKEFILE = ROOT / "Makefile"


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a folder that has nothing to work with."""
    shutil.copy(MAKEFILE, folder)
    command = ["make", "-s", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


NEEDED = {
    "slice": "HAMI=<your slicing library>",
    "torch-tests": "TESTS=<pytorch/test>",
    "rebase": "TO=<vLLM release>",
    "drift": "TO=<vLLM release>",
    "pr": "TOPIC=<patch> or FIRST=<number>",
}


@pytest.mark.parametrize("target", NEEDED)
def test_argument_that_is_missing(target: str, tmp_path: Path) -> None:
    done = make(tmp_path, target)
    assert done.returncode == 2
    assert f"make {target}: {NEEDED[target]} (" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile"]


@pytest.mark.parametrize("target", ["gpu", "calibrate", "bench-stock", "test"])
@pytest.mark.parametrize("chosen", ["SET=core", "TOPICS=a"])
def test_whole_series_is_measured(target: str, chosen: str, tmp_path: Path) -> None:
    done = make(tmp_path, target, chosen)
    assert done.returncode == 2
    assert f"make {target}: it takes the whole series. SET= and TOPICS= " in done.stderr


def test_help_has_each_command_in_a_group(tmp_path: Path) -> None:
    shown = make(tmp_path, "help").stdout
    groups = re.findall(r"^(\w+).*:$", shown, re.M)
    assert groups == ["Use", "Change", "Measure"]
    text = MAKEFILE.read_text().replace("\\\n", "")
    (phony,) = re.findall(r"^\.PHONY: (.*)", text, re.M)
    assert re.findall(r"^  ([\w-]+) ", shown, re.M) == phony.split()


def test_image_without_a_version() -> None:
    """The shell that builds it names the argument."""
    text = (ROOT / "docker/Dockerfile").read_text()
    run = text.partition("target=/overlay \\\n")[2]
    done = subprocess.run(["sh", "-c", run], env={}, capture_output=True, text=True)
    assert done.returncode and not done.stdout
    assert "VERSION: is missing: --build-arg VERSION=..." in done.stderr

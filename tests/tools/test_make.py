"""make says what is missing before it fetches or builds anything."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.topics import sets
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
    "pr": "PATCH=<patch> or FIRST=<number>",
}


@pytest.mark.parametrize("target", NEEDED)
def test_argument_that_is_missing(target: str, tmp_path: Path) -> None:
    done = make(tmp_path, target)
    assert done.returncode == 2
    assert f"make {target}: {NEEDED[target]} (" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile"]


WRONG = {
    "wheel SET=typo": "SET=typo: each is one of all shared sleep core.",
    "envelope ARCH=foo": "ARCH=foo: each is one of x86_64 aarch64.",
    "wheel PATCH=a": "PATCH= is for make pr. PATCHES= chooses.",
    "slice HAMI=none": "HAMI=none: there is no such file.",
}


@pytest.mark.parametrize("asked", WRONG)
def test_argument_that_is_wrong(asked: str, tmp_path: Path) -> None:
    done = make(tmp_path, *asked.split())
    assert done.returncode == 2
    assert WRONG[asked] in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile"]


def test_sets_are_those_of_the_series() -> None:
    (names,) = re.findall(r"^SETS := (.*)", MAKEFILE.read_text(), re.M)
    assert {*names.split()} == {"all", *sets(ROOT)}


@pytest.mark.parametrize("target", ["gpu", "bench-stock", "test", "source", "vgpu"])
@pytest.mark.parametrize("chosen", ["SET=core", "PATCHES=a"])
def test_whole_series_is_measured(target: str, chosen: str, tmp_path: Path) -> None:
    done = make(tmp_path, target, chosen)
    assert done.returncode == 2
    assert (
        f"make {target}: it takes the whole series. SET= and PATCHES= " in done.stderr
    )


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

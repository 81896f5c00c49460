"""The series for another release: what applies, what conflicts, what is not needed."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.release import cache_folder
from tests.tools.project import OLDER, ROOT, SOURCES, Project, module

PLAN = SOURCES["vllm/plan.py"]
PINNED = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"


@pytest.fixture
def series(project: Project) -> Project:
    """Patches that apply to 1.2.2, merge, are there already, and conflict."""
    project.ok("source")
    project.commit(
        "[Core] Applies", vllm__budget_py="def requested(total):\n    pass\n"
    )
    plan = PLAN
    for subject, change in {"Merges": "e", "Taken": "i", "Conflicts": "p"}.items():
        plan = plan.replace(f"{change} = 1", f"{change} = 2")
        project.commit(f"[Core] {subject}", vllm__plan_py=plan)
    project.commit("[Core] Comes after", vllm__gone_py="UNUSED = 2\n")
    project.ok("export")
    return project


def resolve(tree: Path, name: str, content: str) -> None:
    (tree / name).write_text(content)
    identity = ("-c", "user.name=A", "-c", "user.email=a@b")
    for command in (("add", name), ("am", "--continue")):
        subprocess.run(["git", "-C", tree, *identity, *command], check=True)


def test_a_conflict_is_resolved_and_the_rest_follows(series: Project) -> None:
    before = series.files()
    error = series.fails("rebase", "--to", "1.2.2")
    assert "conflicts.patch conflicts in vllm/plan.py" in error
    assert "\n +p = 0\n" in error and "\n+ p = 2\n" in error
    assert "git am --continue" in error
    assert {n for n in series.files() if n.startswith("patches")} == {
        n for n in before if n.startswith("patches")
    }
    assert "conflicts in vllm/plan.py" in series.fails("rebase", "--to", "1.2.2")

    folder = series.root / "build/rebase-1.2.2"
    resolve(folder / "vllm", "vllm/plan.py", "resolved = 1\n")
    shown = series.ok("rebase", "--to", "1.2.2")
    assert "conflicts.patch: resolved by hand" in shown
    assert "comes-after.patch: applies" in shown
    assert "not run: which tests still fail unpatched" in shown
    assert not folder.exists()

    patches = series.root / "patches/v1.2.2"
    names = ["applies", "merges", "conflicts", "comes-after"]
    assert (patches / "series").read_text().split() == [f"{n}.patch" for n in names]
    base = tomllib.loads((patches / "base.toml").read_text())
    assert (base["version"], base["torch"]) == ("1.2.2", "1.9")
    assert base["wheel"]["aarch64"]["sha256"] == "0" * 64
    assert (
        base["extension"]
        == tomllib.loads((series.patches / "base.toml").read_text())["extension"]
    )
    old = series.tree.rename(series.root / "old")
    series.ok("source", "--base", "1.2.2")
    assert (series.tree / "vllm/plan.py").read_text() == "resolved = 1\n"
    assert series.git("rev-list", "--count", "HEAD") == "5\n"
    assert old.exists()


def test_killed_in_the_unpatched_tests_the_series_is_whole(project: Project) -> None:
    project.ok("source")
    (project.tree / "tests").mkdir()
    test = "def test_it():\n    pass\n"
    files = {"tests__test_one_py": test, "pyproject.toml": ""}
    project.commit("[Core] One", **files)
    project.commit("[Core] Two", vllm__gone_py="UNUSED = 2\n")
    project.ok("export")
    python = project.root / ".venv-vllm-1.2.2/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nkill -9 $PPID\n")
    python.chmod(0o755)
    (project.tree / "pyproject.toml").write_text("")
    done = project.run("rebase", "--to", "1.2.2")
    assert done.returncode == -signal.SIGKILL, done.stderr
    patches = project.root / "patches/v1.2.2"
    assert (patches / "series").read_text().split() == ["one.patch", "two.patch"]
    for name in ("one.patch", "two.patch"):
        assert (patches / name).exists()
    assert not (project.root / "build/rebase-1.2.2").exists()


def test_what_upstream_has_is_left_out(series: Project) -> None:
    shown = series.ok("rebase", "--to", "1.2.2", "--check").splitlines()
    assert [line for line in shown if not line.startswith(" ")] == [
        "applies.patch: applies",
        "merges.patch: merged into changed surroundings",
        "taken.patch: upstream has it: left out",
        "conflicts.patch: conflicts",
        "comes-after.patch: applies",
    ]


def test_a_part_that_upstream_has_is_named(project: Project) -> None:
    project.ok("source")
    project.commit(
        "[Core] Both",
        vllm__plan_py=OLDER["vllm/plan.py"],
        vllm__gone_py="UNUSED = 2\n",
    )
    project.ok("export")
    shown = project.ok("rebase", "--to", "1.2.2", "--check")
    assert "both.patch: merged" in shown
    assert "  vllm/plan.py: its changes are there already" in shown


def test_a_check_writes_nothing(series: Project) -> None:
    series.environment["ENVELOPE_CACHE"] = str(series.root / "build/cache")
    series.ok("source")
    before = series.files()
    series.ok("rebase", "--to", "1.2.2", "--check")
    assert {n: c for n, c in series.files().items() if "build/cache" not in n} == {
        n: c for n, c in before.items() if "build/cache" not in n
    }


def test_a_patch_can_be_skipped(series: Project) -> None:
    series.fails("rebase", "--to", "1.2.2")
    tree = series.root / "build/rebase-1.2.2/vllm"
    subprocess.run(["git", "-C", tree, "am", "--skip"], check=True)
    assert "conflicts.patch: skipped by hand" in series.ok("rebase", "--to", "1.2.2")


def test_an_unknown_release(series: Project) -> None:
    assert "has no vLLM 9.9.9" in series.fails("rebase", "--to", "9.9.9")
    assert not (series.root / "build/rebase-9.9.9").exists()
    series.environment["PIP_INDEX_URL"] = "http://127.0.0.1:9/"
    error = series.fails("rebase", "--to", "9.9.9")
    assert "could not look up vLLM 9.9.9" in error and "put the file" not in error


def test_a_release_that_is_there(series: Project) -> None:
    error = series.fails("rebase", "--to", "1.2.3")
    assert "v1.2.3 is there already" in error


def test_the_series_on_the_release_before() -> None:
    """Our own patches on vLLM 0.32.0, whose source is pinned here."""
    done = module("scripts.rebase", "--to", "0.32.0", "--check")
    assert done.returncode == 0, done.stderr
    sdist = cache_folder() / PINNED[:16] / "vllm-0.32.0.tar.gz"
    assert hashlib.sha256(sdist.read_bytes()).hexdigest() == PINNED
    lines = done.stdout.splitlines()
    patches = (ROOT / "patches/v0.33.0/series").read_text().split()
    told = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert told == patches
    assert lines[:2] == [
        "treat-every-cumem-allocation-on-its-own.patch: conflicts",
        "  tests/basic_correctness/memory/cumem/test_cumem.py",
    ]

"""The series for another release: patches that apply, conflict, or are not needed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.series import FORMAT_PATCH, git, transplant
from tests.tools.project import PLAN, Project, new_project


def resolve(tree: Path, name: str, content: str) -> None:
    (tree / name).write_text(content)
    identity = ("-c", "user.name=A", "-c", "user.email=a@b")
    for command in (("add", name), ("am", "--continue")):
        subprocess.run(["git", "-C", tree, *identity, *command], check=True)


def test_conflict_is_resolved_and_the_rest_follows(series: Project) -> None:
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


def test_conflict_is_resolved_once(
    series: Project, index: tuple[str, Path], tmp_path: Path
) -> None:
    """git resolves it the next time, in another clone and in a file that changed. A
    file that the release does not have is left out again."""
    newer = {"tools__newer_py": "def of_newer():\n    return 1\n"}
    series.commit("[Core] Newer", **newer)
    series.ok("export")
    series.fails("rebase", "--to", "1.2.2")
    tree = series.root / "build/rebase-1.2.2/vllm"
    conflict = re.compile("^<{7}.*^>{7}.*?\n", re.M | re.S)
    plan = (tree / "vllm/plan.py").read_text()
    resolve(tree, "vllm/plan.py", conflict.sub("p = 3\n", plan))
    assert "newer.patch conflicts in tools/newer.py" in series.fails(
        "rebase", "--to", "1.2.2"
    )
    subprocess.run(["git", "-C", tree, "rm", "-q", "tools/newer.py"], check=True)
    subprocess.run(["git", "-C", tree, "am", "--skip"], check=True)
    series.ok("rebase", "--to", "1.2.2")
    shutil.move(series.root / "patches/v1.2.2", tmp_path / "first")
    shown = series.ok("rebase", "--to", "1.2.2").splitlines()
    assert "conflicts.patch: conflicts resolved as before" in shown
    assert "newer.patch: skipped: left out" in shown
    first = [path.read_bytes() for path in sorted((tmp_path / "first").iterdir())]
    again = sorted((series.root / "patches/v1.2.2").iterdir())
    assert [path.read_bytes() for path in again] == first

    memory = series.root / "patches/resolutions"
    (before,) = memory.glob("*/preimage")
    assert "p = 2\n" in before.read_text() and "a = 1\n" not in before.read_text()

    other = new_project(index, tmp_path / "other")
    shutil.copytree(memory, other.root / "patches/resolutions")
    other.ok("source")
    plan = PLAN.replace("a = 1", "a = 2").replace("p = 1", "p = 2")
    other.commit("[Core] Two places", vllm__plan_py=plan, **newer)
    other.commit("[Core] Comes after", vllm__gone_py="UNUSED = 2\n")
    other.ok("export")
    shown = other.ok("rebase", "--to", "1.2.2").splitlines()
    assert shown[:4] == [
        "two-places.patch: conflicts resolved as before",
        "  vllm/plan.py",
        "  tools/newer.py",
        "comes-after.patch: applies",
    ]
    patch = (other.root / "patches/v1.2.2/two-places.patch").read_text()
    assert "\n-a = 1\n+a = 2\n" in patch and "\n-p = 0\n+p = 3\n" in patch


def test_name_that_the_release_does_not_have(series: Project) -> None:
    """git merges its use without a conflict."""
    text = "from tools.newer import of_newer\n\n\ndef mine():\n    of_newer()\n"
    series.commit("[Core] Applies but fails", vllm__uses_py=text)
    series.commit("[Core] Uses mine", vllm__more_py="import vllm.uses\nmine()\n")
    series.ok("export")
    series.fails("rebase", "--to", "1.2.2")
    tree = series.root / "build/rebase-1.2.2/vllm"
    resolve(tree, "vllm/plan.py", "resolved = 1\n")
    shown = series.ok("rebase", "--to", "1.2.2").splitlines()
    assert [line for line in shown if "not there" in line] == [
        "applies-but-fails uses newer, which is not there: vllm/uses.py:1",
        "applies-but-fails uses of_newer, which is not there: vllm/uses.py:1",
    ]


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


def test_check_writes_nothing(series: Project) -> None:
    series.environment["ENVELOPE_CACHE"] = str(series.root / "build/cache")
    series.ok("source")
    before = series.files()
    series.ok("rebase", "--to", "1.2.2", "--check")
    assert {n: c for n, c in series.files().items() if "build/cache" not in n} == {
        n: c for n, c in before.items() if "build/cache" not in n
    }


def test_patch_can_be_skipped(series: Project) -> None:
    series.fails("rebase", "--to", "1.2.2")
    tree = series.root / "build/rebase-1.2.2/vllm"
    subprocess.run(["git", "-C", tree, "am", "--skip"], check=True)
    assert "conflicts.patch: skipped" in series.ok("rebase", "--to", "1.2.2")


def test_unknown_release_is_refused(series: Project) -> None:
    assert "has no vLLM 9.9.9" in series.fails("rebase", "--to", "9.9.9")
    assert not (series.root / "build/rebase-9.9.9").exists()
    series.environment["PIP_INDEX_URL"] = "http://127.0.0.1:9/"
    error = series.fails("rebase", "--to", "9.9.9")
    assert "could not look up vLLM 9.9.9" in error and "put the file" not in error


def test_release_that_is_there(series: Project) -> None:
    error = series.fails("rebase", "--to", "1.2.3")
    assert "v1.2.3 is there already" in error


@pytest.mark.parametrize(
    ("second", "kind", "merged"),
    [
        ("a B c d e f", "merged", "a B c d new e f"),
        ("a b c d new e f", "taken", "a b c d new e f"),
        ("a b c D e f", "applies", "a b c D e f"),  # and is named
    ],
)
def test_hunk_goes_into_its_own_function(
    second: str,
    kind: str,
    merged: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Though its context is found in another one alone, which the release changed."""

    def content(first: str, second: str) -> str:
        return "".join(
            f"def {name}():\n" + "".join(f"    {x}\n" for x in lines.split()) + "\n\n"
            for name, lines in (("first", first), ("second", second))
        )

    source, other = tmp_path / "source", tmp_path / "other"
    lines = "a b c d e f"
    for tree, text in (
        (source, content("g", lines)),
        (other, content(lines, second)),
    ):
        tree.mkdir()
        git(tree, "init", "-q")
        (tree / "plan.py").write_text(text)
        git(tree, "add", ".")
        git(tree, "commit", "-q", "-m", "release")
    (source / "plan.py").write_text(content("g", "a b c d new e f"))
    git(source, "commit", "-q", "-a", "-m", "[Core] New")
    patch = tmp_path / "new.patch"
    patch.write_text(git(source, *FORMAT_PATCH, "-1"))
    assert transplant(source, other, patch).kind == kind
    named = "plan.py: applied where its context is" in capsys.readouterr().out
    assert named == (kind == "applies")
    first = "a b c d new e f" if named else lines
    assert (other / "plan.py").read_text() == content(first, merged)
    title = git(other, "show", "-s", "--format=%s")
    assert title == ("release\n" if kind == "taken" else "[Core] New\n")
    assert not git(other, "status", "--porcelain")

"""A release that has the series of another: its patches merged, and what else they need
there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.release import Base
from tests.tools.conftest import make_series
from tests.tools.project import (
    OLDER,
    Project,
    new_project,
    sha256,
    write_sdist,
    write_wheel,
)
from tests.tools.test_rebase import resolve

ON = ("--base", "1.2.2")
WHEEL = "vllm-1.2.2-cp38-abi3-manylinux_2_28_{}.whl"
RESOLVED = "resolved = 1\n"
ONE = "def requested(total):\n    return 1\n"
LEFT_OUT = '[left_out]\ntaken = "it has that"\n'


def beside(project: Project, left_out: str = LEFT_OUT) -> Path:
    """Pins 1.2.2 with the series of 1.2.3; returns its folder."""
    folder = project.root / "patches/v1.2.2"
    folder.mkdir()
    new = project.root.parent / "published"
    new.mkdir()
    write_sdist(new / "vllm-1.2.2.tar.gz", OLDER)
    for arch in "x86_64", "aarch64":
        write_wheel(new / WHEEL.format(arch), sources=OLDER)
    text = (project.patches / "base.toml").read_text()
    pins = Base.load(project.root, "1.2.3")
    for pin in pins.sdist, *pins.wheels.values():
        path = new / pin.file.replace("1.2.3", "1.2.2")
        cache = project.root.parent / "cache" / sha256(path)[:16]
        cache.mkdir(parents=True, exist_ok=True)
        text = text.replace(pin.file, path.name).replace(pin.sha256, sha256(path))
        path.rename(cache / path.name)
    text = text.replace('version = "1.2.3"', 'version = "1.2.2"\nseries = "1.2.3"')
    (folder / "base.toml").write_text(text + left_out)
    return folder


@pytest.fixture(scope="module")
def once(index: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_series(new_project(index, tmp_path_factory.mktemp("second")))
    beside(project)
    project.fails("source", *ON)
    tree = project.root / "build/source-1.2.2/vllm"
    resolve(tree, "vllm/plan.py", RESOLVED)
    project.ok("source", *ON)
    return project


@pytest.fixture
def second(once: Project, tmp_path: Path) -> Project:
    """Its source is there: the conflict is resolved."""
    root = shutil.copytree(once.root, tmp_path / "project", symlinks=True)
    return Project(root, once.environment)


def source(project: Project) -> Path:
    return project.root / "vllm-1.2.2"


def change(project: Project, topic: str, name: str, text: str) -> bool:
    """Changes a file in the commit of a topic; returns whether later ones still fit."""
    tree = source(project)
    log = project.git_of(tree, "log", "--format=%H %s").splitlines()
    (commit,) = (line[:40] for line in log if line.lower().endswith(f" {topic}"))
    project.git_of(tree, "checkout", "-q", "--detach", commit)
    (tree / name).write_text(text)
    project.git_of(tree, "commit", "-q", "--amend", "--no-edit", "--", name)
    amended = project.git_of(tree, "rev-parse", "HEAD").strip()
    onto = ("rebase", "-q", "--onto", amended, commit, "envelope")
    try:
        project.git_of(tree, *onto)
    except subprocess.CalledProcessError:
        return False
    return True


def mended(project: Project) -> Path:
    """Adds to a topic what 1.2.2 alone needs; returns the diff."""
    assert change(project, "applies", "vllm/budget.py", ONE)
    project.ok("export", *ON)
    return project.root / "patches/v1.2.2/applies.diff"


def test_patches_are_merged_and_a_conflict_is_resolved_once(series: Project) -> None:
    folder = beside(series, "")
    before = {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()}
    error = series.fails("source", *ON)
    assert "conflicts.patch conflicts in vllm/plan.py" in error
    assert "then make source BASE=1.2.2 again" in error
    assert "conflicts in vllm/plan.py" in series.fails("source", *ON)
    resolve(series.root / "build/source-1.2.2/vllm", "vllm/plan.py", RESOLVED)
    assert not source(series).exists()
    error = series.fails("source", *ON)
    assert "nothing is left on vLLM 1.2.2 of taken: list it in" in error
    with (folder / "base.toml").open("a") as file:
        file.write(LEFT_OUT)
    shown = series.ok("source", *ON)
    assert "conflicts.patch: conflicts resolved as before" in shown
    assert "not met" not in shown
    assert not (series.root / "build/source-1.2.2").exists()

    subjects = series.git_of(source(series), "log", "--format=%s").splitlines()
    assert subjects == [
        "[Core] Comes after", "[Core] Conflicts", "[Core] Merges", "[Core] Applies",
        "vLLM 1.2.2, source distribution",
    ]  # fmt: skip
    assert (source(series) / "vllm/plan.py").read_text() == RESOLVED
    assert "is up to date: 1.2.2+envelope.4.g" in series.ok("source", *ON)
    # Only how it was resolved is new: there is no second copy of a patch.
    after = {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()}
    new = {path.parent.parent.name for path in after.keys() - before.keys()}
    assert new == {"resolutions"}
    tree = series.git_of(source(series), "rev-parse", "HEAD^{tree}")
    shutil.rmtree(source(series))
    assert "not met" not in series.ok("source", *ON)
    assert series.git_of(source(series), "rev-parse", "HEAD^{tree}") == tree
    stale = folder.parent / f"resolutions/{'0' * 40}"
    (met,) = folder.parent.glob("resolutions/*")
    shutil.copytree(met, stale)
    assert f"needs them: {stale.name}\n" in series.ok("source", *ON)


def test_wheels_are_those_of_the_merged_series(second: Project) -> None:
    mended(second)
    for chosen in ((), ("--topics", "applies")):
        second.ok("build_wheel", *ON, *chosen)
        count = 1 if chosen else 4
        (wheel,) = (second.root / "dist").glob(f"vllm-1.2.2+envelope.{count}.*.whl")
        shown = second.ok("verify", *ON, *chosen, str(wheel))
        assert shown == f"{wheel.name}: vLLM 1.2.2 and the series, nothing else\n"


def test_what_no_merge_gives_belongs_to_its_topic(second: Project) -> None:
    before = Base.load(second.root, "1.2.2").local_version
    diff = mended(second)
    lines = re.findall("^[-+] .*", diff.read_text(), re.M)
    assert lines == ["-    pass", "+    return 1"]
    version = Base.load(second.root, "1.2.2").local_version
    assert version != before
    made = second.git_of(source(second), "log", "--format=%T %s")
    assert f"is up to date: {version}" in second.ok("source", *ON)
    shutil.rmtree(source(second))
    second.ok("source", *ON)
    assert second.git_of(source(second), "log", "--format=%T %s") == made
    assert second.ok("export", *ON) == "v1.2.2: 1 patches need more\n"
    # It goes with its reason.
    assert change(second, "applies", "vllm/budget.py", ONE.replace("return 1", "pass"))
    second.ok("export", *ON)
    assert not diff.exists()


def test_conflict_with_what_a_topic_needs_is_resolved_as_in_the_commit(
    second: Project,
) -> None:
    assert not change(second, "applies", "vllm/gone.py", "UNUSED = 7\n")
    (source(second) / "vllm/gone.py").write_text("UNUSED = 8\n")
    second.git_of(source(second), "add", "vllm/gone.py")
    second.git_of(source(second), "-c", "core.editor=true", "rebase", "--continue")
    made = second.git_of(source(second), "log", "--format=%T %s")
    second.ok("export", *ON)
    shutil.rmtree(source(second))
    shown = second.ok("source", *ON)
    assert "comes-after.patch: conflicts resolved as before" in shown
    assert second.git_of(source(second), "log", "--format=%T %s") == made


def test_work_that_is_not_exported_is_kept(second: Project) -> None:
    (source(second) / "vllm/gone.py").write_text("UNUSED = 3\n")
    assert "has uncommitted changes" in second.fails("source", *ON)
    assert "has uncommitted changes" in second.fails("export", *ON)
    second.git_of(source(second), "commit", "-qam", "Mine")
    assert "'make export BASE=1.2.2' writes them" in second.fails("source", *ON)
    assert "has: mine.patch. A patch is new" in second.fails("export", *ON)
    assert (source(second) / "vllm/gone.py").read_text() == "UNUSED = 3\n"


def test_diff_that_does_not_apply_is_named(second: Project) -> None:
    diff = mended(second)
    diff.write_text(diff.read_text().replace("-    pass", "-    other"))
    error = second.fails("source", *ON)
    assert f"{diff} does not apply to applies on vLLM 1.2.2" in error
    diff.rename(diff.with_name("other.diff"))
    assert "speaks of topics that" in second.fails("source", *ON)


def test_series_that_changed_behind_a_conflict(series: Project) -> None:
    beside(series)
    series.fails("source", *ON)
    series.commit("[Core] More", vllm__gone_py="UNUSED = 4\n")
    series.ok("export")
    assert "has a conflict of the one before" in series.fails("source", *ON)
    resolve(series.root / "build/source-1.2.2/vllm", "vllm/plan.py", RESOLVED)
    shown = series.ok("source", *ON)
    assert "conflicts.patch: conflicts resolved as before" in shown
    assert "more.patch: applies" in shown


def test_name_that_the_release_does_not_have_is_told(second: Project) -> None:
    text = "from tools.newer import of_newer\n\nof_newer()\n"
    second.commit("[Core] Uses newer", vllm__uses_py=text)
    second.ok("export")
    shown = second.ok("source", *ON)
    assert "uses-newer uses of_newer, which is not there: vllm/uses.py:1" in shown


def test_it_has_no_patches_to_move(second: Project) -> None:
    assert "has the series of 1.2.3" in second.fails("rebase", *ON, "--to", "1.2.1")


def test_check_takes_each_topic_as_it_was_merged(second: Project) -> None:
    mended(second)
    for alone in ((), ("--alone",)):
        shown = second.ok("check", *ON, "--no-tests", *alone, "applies.patch")
        assert shown == "applies.patch: ok\n"


def test_names_that_differ_have_the_reasons_of_the_series(second: Project) -> None:
    name = "vllm/gone.py: UNUSED: was 1, is 2"
    assert name in second.fails("api", *ON)
    reason = '["vllm/gone.py"]\nUNUSED = "two are"\n'
    (second.patches / "changes.toml").write_text(reason)
    error = second.fails("api", *ON)
    assert name not in error and "vllm/plan.py: a: is gone" in error

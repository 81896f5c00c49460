"""A fix goes to both releases; what differs between them is listed, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.project import SOURCES, Project

SHARED = SOURCES["vllm/plan.py"].replace("e = 1", "e = 2")


@pytest.fixture
def both(project: Project) -> Project:
    """Two releases: both have one topic, and only the newest has another."""
    project.ok("source")
    project.commit("[Core] Shared", vllm__plan_py=SHARED)
    project.ok("export")
    project.ok("rebase", "--to", "1.2.2")
    older = project.root / "patches/v1.2.2/base.toml"
    absent = '[absent]\n"newer.patch" = "it is new"\n'
    own_tree = 'tree = "vllm-1.2.2"\n'
    older.write_text(own_tree + older.read_text() + absent)
    project.commit("[Core] Newer", vllm__gone_py="UNUSED = 2\n")
    project.ok("export")
    project.ok("source", "--base", "1.2.2")
    return project


def older(project: Project) -> Path:
    return project.root / "vllm-1.2.2"


def fix(project: Project, subject: str, **files: str) -> None:
    project.commit(f"fixup! [Core] {subject}", **files)


def subjects(project: Project) -> list[str]:
    log = ("log", "--format=%s", "refs/envelope/base..HEAD")
    return project.git_of(older(project), *log).splitlines()


def test_fix_is_carried_once(both: Project) -> None:
    fix(both, "Shared", vllm__plan_py=SHARED.replace("f = 1", "f = 3"))
    fix(both, "Newer", vllm__gone_py="UNUSED = 3\n")
    said = both.ok("backport", "--to", "1.2.2")
    assert "shared.patch: carried" in said
    assert "newer.patch: not in 1.2.2, it is new" in said
    assert subjects(both) == ["fixup! [Core] Shared", "[Core] Shared"]
    plan = (older(both) / "vllm/plan.py").read_text()
    assert "f = 3" in plan and "c = 0" in plan  # and older lines stay
    assert "shared.patch: there already" in both.ok("backport", "--to", "1.2.2")
    assert len(subjects(both)) == 2


def test_conflict_waits_and_is_resolved(both: Project) -> None:
    fix(both, "Shared", vllm__plan_py=SHARED.replace("p = 1", "p = 3"))
    error = both.fails("backport", "--to", "1.2.2")
    assert "conflicts in vllm/plan.py" in error and "git am --continue" in error
    assert "a conflict" in both.fails("backport", "--to", "1.2.2")
    (older(both) / "vllm/plan.py").write_text("resolved = 1\n")
    both.git_of(older(both), "add", "-A")
    both.git_of(older(both), "am", "--continue")
    assert "shared.patch: there already" in both.ok("backport", "--to", "1.2.2")
    assert subjects(both) == ["fixup! [Core] Shared", "[Core] Shared"]


def test_there_is_nothing_to_carry(both: Project) -> None:
    assert "has no fixup of a topic" in both.fails("backport", "--to", "1.2.2")
    fix(both, "Unknown", vllm__gone_py="UNUSED = 4\n")
    assert "a fixup of no topic" in both.fails("backport", "--to", "1.2.2")


def test_difference_needs_a_reason(both: Project) -> None:
    told = both.ok("compare", "--base", "1.2.2")
    assert "shared: the same\nnewer: absent, it is new" in told
    patch = both.root / "patches/v1.2.2/shared.patch"
    patch.write_text(patch.read_text().replace("+e = 2", "+e = 9"))
    done = both.run("compare", "--base", "1.2.2")
    assert "shared: no reason is told\n    vllm/plan.py: 1 / 1\n" in done.stdout
    assert done.returncode == 1 and "is needed for shared.patch" in done.stderr
    base = patch.with_name("base.toml")
    base.write_text(base.read_text() + '[differs]\n"shared.patch" = "it is older"\n')
    assert "shared: it is older\n" in both.ok("compare", "--base", "1.2.2")
    patch.write_text(patch.read_text().replace("+e = 9", "+e = 2"))
    error = both.fails("compare", "--base", "1.2.2")
    assert "not for shared.patch" in error

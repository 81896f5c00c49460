"""Conflicts of the whole series with another release, past the first one."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from scripts.merging import Repository
from scripts.release import cache_folder
from tests.tools.project import OLDER, ROOT, Project, module

PINNED = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"


def drift(project: Project) -> list[str]:
    return project.ok("drift", "--to", "1.2.2").splitlines()


def test_each_topic_is_told_past_a_conflict(series: Project) -> None:
    assert drift(series) == [
        "1.2.3 merged whole with 1.2.2: 1 conflicting hunk in 1 file, 1 in code",
        "  vllm/plan.py: 1",
        "patch by patch:",
        "  applies: applies, alone too",
        "  merges: applies, alone too",
        "  taken: upstream has it",
        "  conflicts: conflicts, 1 hunk: vllm/plan.py 1",
        "  comes-after: applies, alone too",
        "of 5 patches: 1 conflict, 3 apply, 3 apply alone, 1 upstream has",
    ]
    again = series.ok("rebase", "--to", "1.2.2", "--check").splitlines()
    assert again == drift(series)


def test_topics_after_a_conflict_are_not_charged_with_it(series: Project) -> None:
    plan = (series.tree / "vllm/plan.py").read_text()
    after = plan.replace("p = 2", "p = 3").replace("r = 1", "r = 2")
    series.commit("[Core] Same line", vllm__plan_py=after)
    series.ok("export")
    shown = drift(series)
    assert "  conflicts: conflicts, 1 hunk: vllm/plan.py 1" in shown
    assert "  same-line: applies" in shown


def test_part_that_upstream_has_is_named(project: Project) -> None:
    project.ok("source")
    project.commit("[Core] Both", vllm__plan_py=OLDER["vllm/plan.py"],
                   vllm__gone_py="UNUSED = 2\n")  # fmt: skip
    project.ok("export")
    shown = drift(project)
    assert shown[2:4] == [
        "  both: applies, alone too",
        "    vllm/plan.py: upstream has it",
    ]


def test_file_that_one_side_deleted(project: Project, tmp_path: Path) -> None:
    """It is one conflict, resolved as in the topic."""
    project.ok("source")
    git = Project.git_of
    for name, content in {"ours": None, "theirs": "UNUSED = 2\n"}.items():
        project.git("checkout", "-q", "-B", name, "envelope")
        project.commit(name, vllm__gone_py=content)
    repository = Repository.borrowing(tmp_path / "merges", project.tree)
    for ours, theirs in (("ours", "theirs"), ("theirs", "ours")):
        names = ("envelope", ours, theirs)
        commits = [git(project.tree, "rev-parse", name).strip() for name in names]
        merged = repository.merge(*commits)
        assert repository.hunks(merged) == {"vllm/gone.py": 1}
        settled = repository.settled(merged, commits[2])
        assert settled == repository.tree(commits[2])


def test_series_on_the_release_before() -> None:
    """Our own patches on vLLM 0.32.0, whose source is pinned here."""
    done = module("scripts.drift", "--to", "0.32.0")
    assert done.returncode == 0, done.stderr
    sdist = cache_folder() / PINNED[:16] / "vllm-0.32.0.tar.gz"
    assert hashlib.sha256(sdist.read_bytes()).hexdigest() == PINNED
    first, *lines = done.stdout.splitlines()
    assert "0.33.0 merged whole with 0.32.0: " in first
    patches = (ROOT / "patches/v0.33.0/series").read_text().split()
    told = [m[1] for line in lines if (m := re.match(r"  ([a-z0-9-]+): \w", line))]
    assert told == [name.removesuffix(".patch") for name in patches]

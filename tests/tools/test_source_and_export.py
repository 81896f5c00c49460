"""``vllm/`` and the patch files: each is made from the other, and nothing is lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tools.project import SOURCES, Project


def test_source_is_the_release_and_one_commit_a_patch(patched: Project) -> None:
    subjects = patched.git("log", "--format=%s").splitlines()
    assert subjects == [
        "[Build] Initialise twice",
        "[Core] Halve the request",
        "vLLM 1.2.3, source distribution",
    ]
    patched.git("checkout", "-q", "HEAD~2")
    for name, text in SOURCES.items():
        assert (patched.tree / name).read_text() == text


def test_export_after_source_changes_nothing(patched: Project) -> None:
    before = patched.files()
    patched.git("checkout", "-q", "envelope")
    for path in (patched.tree, patched.root / "build"):
        path.rename(path.with_name(path.name + ".old"))
    patched.ok("source")
    assert patched.ok("export") == "v1.2.3: 2 patches\n"
    after = patched.files()
    assert {n: c for n, c in after.items() if n.startswith("patches")} == {
        n: c for n, c in before.items() if n.startswith("patches")
    }


def test_patch_has_one_author_and_says_what_upstream_knows(patched: Project) -> None:
    """DEP-3's fields are the file's alone: no commit has them."""
    patched.commit("[Core] Mine", vllm__gone_py="UNUSED = 2\n")
    (patched.root / "patches/topics.toml").write_text(
        '[threads]\n"#1" = { issue = "open", looked = "2026-11" }\n'
        '[upstream]\nupdated = "2026-11-27"\n'
        '[topic.halve-the-request]\nissues = ["#1"]\n'
        '[topic.mine]\nissues = []\nforwarded = "https://a/b"\napplied = "1.2.4"\n'
    )
    patched.ok("export")
    author = "From: Seed f9b18637 maintainers <maintainers@users."
    heads = [
        (patched.patches / name).read_text().partition("\n\n")[0].splitlines()
        for name in (patched.patches / "series").read_text().split()
    ]
    assert all(head[1].startswith(author) for head in heads)
    issue = "https://github.com/vllm-project/vllm/issues/1"
    assert heads[0][4:] == [
        f"Bug: {issue}", "Forwarded: no", "Last-Update: 2026-11-27",
    ]  # fmt: skip
    assert len(heads[1]) == 4  # topics.toml does not know it
    assert heads[2][4:] == [
        "Forwarded: https://a/b", "Last-Update: 2026-11-27", "Applied-Upstream: 1.2.4",
    ]  # fmt: skip
    patched.tree.rename(patched.tree.with_name("old"))
    patched.ok("source")
    assert patched.ok("export") == "v1.2.3: 3 patches\n"
    assert patched.git("log", "-1", "--format=%B").strip() == "[Core] Mine"


def test_patches_are_named_for_what_they_do(patched: Project) -> None:
    names = (patched.patches / "series").read_text().split()
    assert names == ["halve-the-request.patch", "initialise-twice.patch"]


def test_amended_commit_keeps_the_name_of_its_patch(patched: Project) -> None:
    patched.git("commit", "-q", "--amend", "-m", "[Build] Initialise three times")
    assert "changed initialise-twice.patch" in patched.ok("export")


def test_dropped_commit_drops_its_patch(patched: Project) -> None:
    patched.git("reset", "-q", "--hard", "HEAD~")
    assert "removed initialise-twice.patch" in patched.ok("export")
    assert [p.name for p in patched.patches.glob("*.patch")] == [
        "halve-the-request.patch"
    ]


def test_users_git_configuration_does_not_change_the_export(
    patched: Project, tmp_path: Path
) -> None:
    config = tmp_path / "gitconfig"
    config.write_text(
        "[diff]\nnoprefix = true\nalgorithm = histogram\n[format]\nsignOff = true\n"
    )
    patched.environment["GIT_CONFIG_GLOBAL"] = str(config)
    assert patched.ok("export") == "v1.2.3: 2 patches\n"


@pytest.mark.parametrize("command", ["source", "export"])
def test_uncommitted_work_is_not_overwritten(patched: Project, command: str) -> None:
    (patched.tree / "vllm/budget.py").write_text("mine\n")
    assert "has uncommitted changes" in patched.fails(command)
    assert (patched.tree / "vllm/budget.py").read_text() == "mine\n"


def test_commits_that_are_not_exported_are_not_overwritten(patched: Project) -> None:
    patched.commit("[Core] Mine", vllm__budget_py="mine = 1\n")
    error = patched.fails("source")
    assert "has commits that are not in v1.2.3" in error and "make export" in error
    assert patched.git("log", "-1", "--format=%s") == "[Core] Mine\n"


def test_changed_patch_file_replaces_an_untouched_tree(patched: Project) -> None:
    patch = patched.patches / "halve-the-request.patch"
    patch.write_text(patch.read_text().replace("total // 2", "total // 4"))
    patched.ok("source")
    assert "total // 4" in (patched.tree / "vllm/budget.py").read_text()


def test_patch_that_does_not_apply_is_named_with_its_file(patched: Project) -> None:
    patch = patched.patches / "halve-the-request.patch"
    patch.write_text(patch.read_text().replace("return total\n", "return other\n"))
    before = patched.files()
    error = patched.fails("source")
    assert "halve-the-request.patch does not apply" in error
    assert "vllm/budget.py" in error and "Mend the patch" in error
    assert patched.files() == before


def test_fixup_must_be_squashed(patched: Project) -> None:
    patched.commit("fixup! [Core] Halve the request", vllm__budget_py="x = 1\n")
    assert "is not squashed yet" in patched.fails("export")


def test_two_commits_cannot_share_a_name(patched: Project) -> None:
    patched.commit("[Other] Halve the request", vllm__budget_py="x = 1\n")
    assert "two commits would be exported as" in patched.fails("export")


def test_foreign_folder_is_left_alone(project: Project) -> None:
    project.tree.mkdir()
    (project.tree / "precious").write_text("mine")
    assert "was not made by 'make source'" in project.fails("source")
    assert (project.tree / "precious").read_text() == "mine"


def test_series_that_names_a_missing_patch(project: Project) -> None:
    (project.patches / "series").write_text("absent.patch\n")
    assert "differ: absent.patch" in project.fails("source")


def test_unknown_base_names_the_known_ones(project: Project) -> None:
    error = project.fails("source", "--base", "9.9.9")
    assert "9.9.9 is not a supported base" in error and "1.2.3" in error


def test_clone_of_upstream_can_be_the_start(patched: Project, tmp_path: Path) -> None:
    clone = tmp_path / "upstream"
    patched.tree.rename(clone)
    error = patched.fails("source", "--git", str(clone))
    assert "is not a git clone with the tag v1.2.3" in error
    subprocess.run(["git", "-C", clone, "tag", "v1.2.3", "HEAD~2"], check=True)
    patched.ok("source", "--git", str(clone))
    assert "total // 2" in (patched.tree / "vllm/budget.py").read_text()
    assert patched.ok("export") == "v1.2.3: 2 patches\n"

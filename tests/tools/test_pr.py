"""A pull request is a branch in the user's clone and a text, or nothing.

One file, however long: its tests share a clone and a series of three topics."""

from __future__ import annotations

import email
import os
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest

from scripts.pr import without_trailers
from scripts.release import Base
from scripts.series import IDENTITY
from scripts.topics import load
from tests.tools.project import OLDER, ROOT, SOURCES, Project

TOPIC = "halve-the-request"
HOOKS = """\
repos:
- repo: local
  hooks:
  - {id: no-quarter, name: no quarter, language: pygrep, entry: total // 4}
  - {id: only-rust, name: rust, language: system, entry: "false", types: [rust]}
  - {id: only-docs, name: docs, language: system, entry: "false", files: ^docs/}
  - {id: late, name: late, language: system, entry: "false", stages: [commit-msg]}
- repo: file:///nowhere/ruff-pre-commit
  rev: v0.14.0
  hooks: [{id: ruff-check}]
"""
PROPOSAL = f"""\
[threads]
"#1" = {{ pull = "open", looked = "2026-11-23" }}

[topic.{TOPIC}]
claims = ["Half is asked for.", "It fits."]
not_duplicate = "#1 asks for less, not for half."
results = ["half.json"]
needs = {{ count-bytes = "uses `total`" }}
"""
BODY = """\
A device of 8 GiB
runs out of memory.

Root cause: all is asked for.

- one reason, which
  takes two lines
- another

Trade-offs: none is known.
Not run: on ROCm.

Issues: #1.

Co-authored-by: Some Other <other@one>"""

EXPECTED = """\
## Overview

Halve the request. Issues: #1.

## Claims

- Half is asked for.
- It fits.

## Validation

8 GiB before, 4 GiB after

```json
{"used": 4}
```

To repeat them: `pytest tests/test_budget.py`.

pre-commit on the changed files: passed: no-quarter; NOT RUN, could not be fetched: \
ruff-check (ruff and clang-format of this project were run on the changed lines).

## Details

A device of 8 GiB runs out of memory.

Root cause: all is asked for.

- one reason, which takes two lines
- another

Trade-offs: none is known. Not run: on ROCm.

**Not a duplicate.** #1 (open) asks for less, not for half.

**AI assistance** was used for this change.

- [x] AI assistance was used during the creation of this PR.
- [ ] Another point.
"""


class Clone:
    """A clone of upstream: branches main and older, tags of both releases."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "-q", "-b", "main")
        for version, sources in (("1.2.2", OLDER), ("1.2.3", SOURCES)):
            files = sources | {".pre-commit-config.yaml": HOOKS}
            for name, text in files.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_text(text)
            self.git("add", "-A", "-f")
            self.git("commit", "-q", "-m", version)
            self.git("tag", f"v{version}")

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=Upstream", "-c", "user.email=up@stream")
        return subprocess.check_output(
            ["git", "-C", self.path, *identity, *arguments], text=True
        )

    def state(self) -> tuple[str, ...]:
        refs = self.git("for-each-ref")
        return refs, self.git("status", "--porcelain"), self.git("worktree", "list")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


@pytest.fixture
def topic(project: Project, tmp_path: Path) -> Project:
    project.ok("source")
    halved = "def requested(total):\n    return total // 2\n"
    (project.tree / "tests").mkdir()
    project.commit(
        f"[Core] Halve the request\n\n{BODY}",
        tests__test_budget_py="def test_it():\n    pass\n",
        vllm__budget_py=halved,
        vllm__plan_py=SOURCES["vllm/plan.py"].replace("e = 1", "e = 2"),
    )
    project.ok("export")
    (project.root / "patches/topics.toml").write_text(PROPOSAL)
    (project.root / "results").mkdir()
    (project.root / "results/half.json").write_text('{"used": 4}\n')
    (tmp_path / "measured").write_text("8 GiB before, 4 GiB after\n")
    config = tmp_path / "gitconfig"
    config.write_text("[user]\nname = Some One\nemail = some@one\n")
    project.environment["GIT_CONFIG_GLOBAL"] = str(config)
    project.environment["PRE_COMMIT_HOME"] = str(tmp_path / "pre-commit")
    return project


def arguments(clone: Path, *more: str, topic: str = TOPIC) -> tuple[str, ...]:
    measured = str(clone.parent / "measured")
    fixed = ("--topic", topic, "--git", str(clone), "--validation", measured)
    return "pr", *fixed, *more


def test_branch_and_its_description(topic: Project, clone: Clone) -> None:
    (clone.path / "vllm/gone.py").write_text("work in progress\n")
    before = clone.state()
    shown = topic.ok(*arguments(clone.path))
    assert "has uncommitted changes: they are left alone" in shown
    assert (
        "hooks passed: no-quarter; NOT RUN, could not be fetched: ruff-check" in shown
    )
    assert "not signed off: that is yours to do" in shown
    branch = f"envelope/{TOPIC}"
    assert clone.git("log", "--format=%s|%an", f"main..{branch}") == (
        f"[Core] Halve the request|{IDENTITY[0]}\n"
    )
    assert "total // 2" in clone.git("show", f"{branch}:vllm/budget.py")
    assert "Signed-off-by" not in clone.git("log", "-1", branch)
    clone.git("fsck", "--strict")
    clone.git("branch", "-D", branch)
    assert clone.state() == before
    text = (topic.root / f"build/pr-{TOPIC}.md").read_text()
    assert text == EXPECTED


@pytest.fixture
def stacked(topic: Project) -> Project:
    """The topic needs another one."""
    series = topic.root / "patches/topics.toml"
    topic.commit("[Core] Name it\n\nA name.", vllm__gone_py="NAME = 1\n")
    topic.commit(
        "[Core] Ask for less\n\nBy its name.",
        vllm__gone_py="NAME = 2\n",
        vllm__less_py="from vllm.gone import NAME\n",
    )
    topic.ok("export")
    series.write_text(
        PROPOSAL + '[topic.ask-for-less]\nclaims = ["Less."]\nnot_duplicate = "No."\n'
        'needs = { name-it = "uses `NAME`" }\n'
    )
    return topic


def test_needs_of_a_topic_are_below_it(stacked: Project, clone: Clone) -> None:
    """And nothing else, each commit signed off."""
    stacked.ok(*arguments(clone.path, "--signoff", "--no-hooks", topic="ask-for-less"))
    branch = "envelope/ask-for-less"
    assert clone.git(
        "log", "--format=%s|%ae|%(trailers:key=Signed-off-by)", f"main..{branch}"
    ) == (
        "[Core] Ask for less|some@one|Signed-off-by: Some One <some@one>\n\n"
        "[Core] Name it|some@one|Signed-off-by: Some One <some@one>\n\n"
    )
    assert "total // 2" not in clone.git("show", f"{branch}:vllm/budget.py")
    text = (stacked.root / "build/pr-ask-for-less.md").read_text()
    assert "**A stack.** The last commit" in text
    assert "\n- [Core] Name it: this uses `NAME`\n" in text


def test_need_that_conflicts_and_one_that_the_base_has(
    stacked: Project, clone: Clone
) -> None:
    (clone.path / "vllm/gone.py").write_text("UNUSED = 3\n")
    clone.git("commit", "-q", "-a", "-m", "Other")
    command = arguments(clone.path, "--no-hooks", topic="ask-for-less")
    for _ in range(2):
        error = stacked.fails(*command)
        assert "name-it.patch conflicts in vllm/gone.py" in error
    tree = stacked.root / "build/pr-ask-for-less"
    (tree / "vllm/gone.py").write_text("NAME = 1\n")
    for step in (["add", "-u"], ["am", "--continue"]):
        subprocess.run(["git", "-C", tree, *step], check=True, env=stacked.environment)
    stacked.ok(*command)
    onto = ("--onto", "envelope/ask-for-less~", "--branch", "next", "--no-hooks")
    stacked.ok(*arguments(clone.path, *onto, topic="ask-for-less"))
    told = clone.git("log", "--format=%s", "envelope/ask-for-less~..next")
    assert told == "[Core] Ask for less\n"
    assert "A stack" not in (stacked.root / "build/pr-ask-for-less.md").read_text()


def test_sign_off_is_the_users_own(topic: Project, clone: Clone) -> None:
    topic.ok(*arguments(clone.path, "--signoff", "--branch", "mine"))
    assert clone.git("log", "-1", "--format=%an <%ae>%n%(trailers)", "mine") == (
        "Some One <some@one>\n"
        "Co-authored-by: Some Other <other@one>\n"
        f"Co-authored-by: {IDENTITY[0]} <{IDENTITY[1]}>\n"
        "Signed-off-by: Some One <some@one>\n\n"
    )


def test_the_author_of_the_patches_signs_off(topic: Project, clone: Clone) -> None:
    """And is named once."""
    name, address = IDENTITY
    config = Path(topic.environment["GIT_CONFIG_GLOBAL"])
    config.write_text(f"[user]\nname = {name}\nemail = {address}\n")
    topic.ok(*arguments(clone.path, "--signoff", "--branch", "mine"))
    told = clone.git("log", "-1", "--format=%(trailers)", "mine")
    assert told == (
        f"Co-authored-by: Some Other <other@one>\nSigned-off-by: {name} <{address}>\n\n"
    )


def test_without_a_clone_on_the_release(topic: Project, tmp_path: Path) -> None:
    """A branch of the release alone, made anew by each run."""
    measured = ("--validation", str(tmp_path / "measured"))
    for _ in range(2):
        shown = topic.ok("pr", "--topic", TOPIC, "--no-hooks", *measured)
    assert "title: [Core] Halve the request\n" in shown
    assert "look up again before you submit: #1 (open, 2026-11-23)" in shown
    clone = topic.root / "build/upstream"
    told = topic.git_of(clone, "log", "--format=%s", f"v1.2.3..envelope/{TOPIC}")
    assert told == "[Core] Halve the request\n"
    assert (topic.root / f"build/pr-{TOPIC}.md").exists()


def test_the_first_of_the_order(stacked: Project, clone: Clone) -> None:
    path = stacked.root / "patches/topics.toml"
    order = f'[upstream]\norder = ["ask-for-less", "{TOPIC}"]\n'
    path.write_text(order + path.read_text())
    given = ("pr", "--git", str(clone.path), "--no-hooks", "--first")
    assert "are of one PATCH=" in stacked.fails(*given, "1", "--branch", "mine")
    error = stacked.fails(*given, "2")
    assert f"'make check' of ask-for-less.patch, {TOPIC}.patch" in error


def test_no_identity_to_sign_off_with(topic: Project, clone: Clone) -> None:
    topic.environment["GIT_CONFIG_GLOBAL"] = os.devnull
    topic.environment["GIT_CONFIG_NOSYSTEM"] = "1"
    before = clone.state()
    assert "git has no user.name" in topic.fails(*arguments(clone.path, "--signoff"))
    assert clone.state() == before


def test_changed_surroundings_are_merged(topic: Project, clone: Clone) -> None:
    topic.ok(*arguments(clone.path, "--onto", "v1.2.2"))
    plan = clone.git("show", f"envelope/{TOPIC}:vllm/plan.py")
    assert "c = 0\n" in plan and "e = 2\n" in plan


def test_conflict_is_shown_resolved_and_gone_on_with(
    topic: Project, clone: Clone
) -> None:
    clone.git("checkout", "-q", "-b", "next")
    (clone.path / "vllm/budget.py").write_text("def requested(total):\n    return 1\n")
    clone.git("commit", "-q", "-a", "-m", "Ask for one")
    command = arguments(clone.path, "--onto", "next", "--branch", "mine")
    for _ in range(2):
        error = topic.fails(*command)
        assert f"{TOPIC}.patch conflicts in vllm/budget.py" in error
        assert "\n +    return 1\n" in error and "\n+     return total // 2\n" in error
        said = f"make pr PATCH={TOPIC} VLLM_GIT={clone.path} BASE=1.2.3 ONTO=next "
        assert f"{said}BRANCH=mine VALIDATION={clone.path.parent}/measured" in error
    assert "mine" not in clone.git("branch")
    tree = topic.root / f"build/pr-{TOPIC}"
    assert "is not one commit on this base" not in error
    (tree / "vllm/budget.py").write_text("def requested(total):\n    return 0\n")
    subprocess.run(["git", "-C", tree, "add", "-u"], check=True)
    subprocess.run(
        ["git", "-C", tree, "am", "--continue"], check=True, env=topic.environment
    )
    assert "left from another run" in topic.fails(*arguments(clone.path))
    topic.ok(*command)
    assert "return 0" in clone.git("show", "mine:vllm/budget.py")
    assert not tree.exists()


def test_clone_without_a_name_and_with_a_space(
    topic: Project, clone: Clone, tmp_path: Path
) -> None:
    """A conflict says how to continue, and the command continues."""
    clone.path = clone.path.rename(tmp_path / "a clone")
    topic.environment |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    (clone.path / "vllm/budget.py").write_text("def requested(total):\n    return 1\n")
    clone.git("commit", "-q", "-a", "-m", "Ask for one")
    error = topic.fails(*arguments(clone.path, "--no-hooks"))
    again = re.search(r"^then (make pr .*) again", error, re.M)
    assert again is not None
    words = dict(w.split("=", 1) for w in shlex.split(again[1])[2:])
    assert (words["VLLM_GIT"], words["NO_HOOKS"]) == (str(clone.path), "1")
    tree = topic.root / f"build/pr-{TOPIC}"
    (tree / "vllm/budget.py").write_text("def requested(total):\n    return 0\n")
    go_on = re.search(r"git add them, (git .* am --continue)", error)
    assert go_on is not None
    for command in ("git add -u", go_on[1]):
        subprocess.run(
            shlex.split(command), cwd=tree, check=True, env=topic.environment
        )
    topic.ok(*arguments(clone.path, "--no-hooks"))
    assert "return 0" in clone.git("show", f"envelope/{TOPIC}:vllm/budget.py")


def test_topics_that_the_base_has_already(topic: Project, clone: Clone) -> None:
    topic.ok(*arguments(clone.path, "--branch", "first"))
    before = clone.state()
    error = topic.fails(*arguments(clone.path, "--onto", "first"))
    assert "the base has these changes already" in error
    assert clone.state() == before


def test_failing_hook_is_shown(topic: Project, clone: Clone) -> None:
    hooks = HOOKS.replace("total // 4", "total // 2")
    (clone.path / ".pre-commit-config.yaml").write_text(hooks)
    clone.git("commit", "-q", "-a", "-m", "Stricter")
    error = topic.fails(*arguments(clone.path))
    assert "upstream's hooks fail" in error and "vllm/budget.py:2" in error
    assert "envelope/" not in clone.git("branch")


def test_failing_hooks_of_all_branches_are_shown(
    stacked: Project, clone: Clone
) -> None:
    hooks = HOOKS.replace("total // 4", "NAME|total // 2")
    (clone.path / ".pre-commit-config.yaml").write_text(hooks)
    clone.git("commit", "-q", "-a", "-m", "Stricter")
    path = stacked.root / "patches/topics.toml"
    order = f'[upstream]\norder = ["ask-for-less", "{TOPIC}"]\n'
    path.write_text(order + path.read_text())
    error = stacked.fails("pr", "--git", str(clone.path), "--first", "2")
    assert "vllm/less.py:1" in error and "vllm/budget.py:2" in error


def test_projects_linters_stand_in(topic: Project, clone: Clone) -> None:
    topic.commit("[Core] Import", vllm__budget_py="import os\n")
    topic.ok("export")
    proposals = topic.root / "patches/topics.toml"
    proposals.write_text(PROPOSAL.replace(TOPIC, "import"))
    halved = "def requested(total):\n    return total // 2\n"
    (clone.path / "vllm/budget.py").write_text(halved)
    clone.git("commit", "-q", "-a", "-m", "Halved")
    error = topic.fails(*arguments(clone.path, topic="import.patch"))
    assert "vllm/budget.py:1: F401" in error


def test_without_the_measured_output_the_check_is_run(
    topic: Project, clone: Clone
) -> None:
    """As make runs it, in the project's folder and without a path to it."""
    del topic.environment["PYTHONPATH"]
    before = clone.git("for-each-ref")
    error = topic.fails("pr", "--topic", TOPIC, "--git", str(clone.path), cwd=ROOT)
    assert f"'make check' of {TOPIC}.patch" in error and "is missing" in error
    assert clone.git("for-each-ref") == before


WRONG = {
    "topic": (("--topic", "x"), "no patch 'x'. patches/README.md lists all."),
    "base": (("--onto", "v9"), "has no branch, tag or commit 'v9': fetch it"),
    "clone": (("--git", "/"), "/ is not a git clone (VLLM_GIT=...)"),
    "branch": (("--branch", "main"), "has a branch main already"),
    "validation": (("--validation", "/no"), "/no is not a file (VALIDATION=...)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong(topic: Project, clone: Clone, what: str) -> None:
    more, message = WRONG[what]
    before = clone.state()
    assert message in topic.fails(*arguments(clone.path, *more))
    assert clone.state() == before


def test_topic_without_a_proposal(topic: Project, clone: Clone) -> None:
    half = f"[topic.{TOPIC}]\nclaims = []\n"
    (topic.root / "patches/topics.toml").write_text(half)
    error = topic.fails(*arguments(clone.path))
    assert f"has no not_duplicate for {TOPIC}" in error


def test_missing_result(topic: Project, clone: Clone) -> None:
    (topic.root / "results/half.json").unlink()
    before = clone.state()
    assert "half.json, which is not there" in topic.fails(*arguments(clone.path))
    assert clone.state() == before


def test_changed_template_is_refused(topic: Project, clone: Clone) -> None:
    (clone.path / ".github/PULL_REQUEST_TEMPLATE.md").write_text("## Purpose\n")
    clone.git("commit", "-q", "-a", "-m", "Another template")
    before = clone.state()
    assert "no section 'Overview'" in topic.fails(*arguments(clone.path))
    assert clone.state() == before


def test_every_patch_of_ours_has_its_text_whole() -> None:
    """Claims, a reason why it is no duplicate, and each paragraph of its message."""
    told = load(ROOT)
    for patch in Base.load(ROOT, "0.33.0").patches():
        assert {"claims", "not_duplicate"} <= told[patch.stem].told.keys()
        mail = email.message_from_bytes(patch.read_bytes().partition(b"\n---\n")[0])
        body = str(mail.get_payload())
        assert without_trailers(body) == body.strip(), patch


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the source distributions of vLLM 0.32.0 and 0.33.0."""
    folder = tmp_path_factory.mktemp("upstream")
    from scripts.release import Artifact, Base, fetch
    from tests.tools.test_drift import PINNED

    older = Artifact("vllm-0.32.0.tar.gz", PINNED)
    for artifact in (older, Base.load(ROOT, "0.33.0").sdist):
        version = artifact.file.removeprefix("vllm-").removesuffix(".tar.gz")
        with tarfile.open(fetch(artifact, version)) as tar:
            tar.extractall(folder, filter="data")
        tree = folder / f"vllm-{version}"
        git = ["git", f"--git-dir={folder}/clone/.git", f"--work-tree={tree}",
               "-c", "user.name=U", "-c", "user.email=u@u",
               "-c", "gc.auto=0"]  # fmt: skip
        if not (folder / "clone").exists():
            subprocess.run(["git", "init", "-q", "-b", "main", folder / "clone"])
        for command in (["add", "-A", "-f"], ["commit", "-q", "-m", version],
                        ["tag", f"v{version}"]):  # fmt: skip
            subprocess.run([*git, *command], check=True)
    return folder / "clone"


@pytest.fixture
def ours(project: Project) -> Project:
    """This project's series, building elsewhere."""
    root = project.root.with_name("ours")
    root.mkdir()
    for name in ("patches", "vllm"):
        (root / name).symlink_to(ROOT / name)
    return Project(root, os.environ | {"GIT_CONFIG_GLOBAL": os.devnull})


FIRST = "treat-every-cumem-allocation-on-its-own"
REMOVES = "undo-a-sleep-or-wake-up-that-fails"


def release(
    ours: Project, upstream: Path, onto: str, branch: str, topic: str = FIRST
) -> list[str]:
    (upstream.parent / "measured").write_text("measured\n")
    more = ("--onto", onto, "--branch", branch, "--no-hooks", "--base", "0.33.0")
    return ours.command(*arguments(upstream, *more, topic=topic))


def test_our_first_topic_on_the_release(ours: Project, upstream: Path) -> None:
    command = release(ours, upstream, "v0.33.0", "now")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (ours.root / f"build/pr-{FIRST}.md").read_text()
    assert "#44866 (open) cleans up" in text and "<!-- Summarize" not in text
    assert text.index("## Claims") < text.index("\nmeasured\n") < text.index("---")
    assert "- [x] AI assistance was used" in text


def test_our_topic_on_the_release_before(ours: Project, upstream: Path) -> None:
    """A comment that the topic removes has other words there."""
    command = release(ours, upstream, "v0.32.0", "before", REMOVES)
    done = subprocess.run(command, capture_output=True, text=True)
    allocator = "vllm/device_allocator/cumem.py"
    assert done.returncode == 1 and f"conflicts in {allocator}:\n" in done.stderr
    assert done.stderr.count("<<<<<<< ") == 1
    tree = ours.root / f"build/pr-{REMOVES}"
    marked = (tree / allocator).read_text()
    conflict = re.search(r"<<<<<<< .*?\n.*=======\n(.*)>>>>>>> .*?\n", marked, re.S)
    assert conflict is not None
    (tree / allocator).write_text(marked.replace(conflict[0], conflict[1]))
    git = ["git", "-C", str(tree), "-c", "user.name=U", "-c", "user.email=u@u"]
    subprocess.run([*git, "add", "-u"], check=True)
    subprocess.run([*git, "am", "--continue"], check=True, capture_output=True)
    subprocess.run(command, check=True, capture_output=True)
    show = shlex.split(f"git -C '{upstream}' diff --stat v0.32.0 before -- csrc")
    assert "cumem_allocator.cpp" in subprocess.check_output(show, text=True)
    assert not tree.exists()

"""Make a branch for a pull request in a clone of upstream, and its description.

The branch is a stack: the topic's needs by topics.toml, a commit each, then the
topic. Each is merged three-way onto the chosen base in a worktree of its own, so the
clone's checkout is not touched. A conflict is left in build/ to be resolved; run the
command again to continue.

Without a clone of upstream the branches are made in build/upstream, which has the
release as its only commit: to review and test them; each run replaces its branch.

One file, however long: a stack of branches, its tests and its text are one command.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from scripts import topics
from scripts.check import lint
from scripts.commands import Problem, command, locked
from scripts.release import Base
from scripts.series import (
    BASE_REF,
    IDENTITY,
    Outcome,
    commits,
    conflict_report,
    git,
    run_git,
    touched_lines,
    transplant,
    unresolved,
)
from scripts.topics_page import stated

TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
SECTIONS = ("Overview", "Claims", "Validation", "Details")
# Upstream's own versions of these are pinned in requirements/tools.txt.
STAND_INS = {"ruff-check", "ruff-format", "clang-format"}


def options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--topic", help="patch, with or without .patch")
    which.add_argument("--first", type=int, help="so many of the order of proposing")
    parser.add_argument("--git", type=Path, help="clone of upstream")
    parser.add_argument("--onto", help="branch, tag or commit (default: main)")
    parser.add_argument("--branch", help="default: envelope/PATCH")
    parser.add_argument("--signoff", action="store_true", help="you certify the DCO")
    parser.add_argument("--validation", type=Path, help="Markdown to put there")
    parser.add_argument("--no-hooks", action="store_true")


@dataclass(frozen=True)
class Branch:
    """What is made for a topic, in a worktree until its text is written."""

    name: str
    patch: Path
    patches: dict[str, Path]
    """Its own and those below it, by subject."""
    proposal: dict[str, Any]
    onto: str
    tree: Path


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    given = args.git is not None
    args.onto = args.onto or ("main" if given else f"v{base.version}")
    if not given:
        with locked(base.root):
            args.git = release_alone(base)
    asked = [args.topic]
    if args.first is not None:
        if args.branch or args.validation:
            raise Problem("BRANCH= and VALIDATION= are of one PATCH=, not of FIRST=.")
        asked = list(topics.upstream(base.root).order[: args.first])
    branches = [branch_of(base, args, topic, replace=not given) for topic in asked]
    identity = submitter(args.git) if args.signoff else None
    measured_runs = measured(args.validation) if args.validation else None
    runs = [results(base, branch.proposal) for branch in branches]
    templates = [template_of(args.git, branch.onto) for branch in branches]
    hooks, failed = [], []
    for branch in branches:
        with locked(base.root):
            place(base, args, branch)
        try:
            told = "not run (NO_HOOKS=1)" if args.no_hooks else run_hooks(branch.tree)
            hooks.append(told)
        except Problem as problem:
            failed.append(str(problem))
    if failed:
        raise Problem("\n\n".join(failed))
    if measured_runs is None:
        tested = check(base, [branch.patch for branch in branches])
    else:
        tested = [measured_runs]
    for branch, template, hook, test, more in zip(
        branches, templates, hooks, tested, runs, strict=True
    ):
        write(base, args, branch, template, hook, test + more, identity)
    if not identity:
        print("not signed off: that is yours to do, with SIGNOFF=1, after your review")


def release_alone(base: Base) -> Path:
    """A repository whose tag v0.1.2 is the source of that release, with no history."""
    clone = base.root / "build/upstream"
    tag = f"refs/tags/v{base.version}"
    clone.mkdir(parents=True, exist_ok=True)
    git(clone, "init", "-q")
    git(clone, "fetch", "-q", "--force", str(base.tree), f"{BASE_REF}:{tag}")
    return clone


def branch_of(
    base: Base, args: argparse.Namespace, topic: str, replace: bool
) -> Branch:
    """What is to be made; with `replace` instead of a branch of the name."""
    patch = chosen(base, topic)
    name = args.branch or f"envelope/{patch.stem}"
    patches, proposal = stacked(base, patch), proposed(base, patch)
    if replace:
        run_git(args.git, "branch", "-D", name)
    onto = checked(args.git, args.onto, name)
    tree = base.root / f"build/pr-{patch.stem}"
    return Branch(name, patch, patches, proposal, onto, tree)


def place(base: Base, args: argparse.Namespace, branch: Branch) -> None:
    merge(
        base, args.git, branch.onto, branch.patches, branch.tree,
        again(args, branch.patch),
    )  # fmt: skip


def write(
    base: Base,
    args: argparse.Namespace,
    branch: Branch,
    template: str,
    hooks: str,
    validation: str,
    identity: tuple[str, str] | None,
) -> None:
    """Make the branch and its description."""
    tree, known = branch.tree, topics.threads(base.root)
    looked = ", ".join(looked_up(branch.proposal, known)) or "no thread is known"
    told = stated(branch.proposal["not_duplicate"], known)
    proposal = branch.proposal | {"not_duplicate": told}
    below = builds_on(base, tree, branch.onto, branch.patches)
    text = description(tree, template, proposal, validation, hooks, below)
    title = git(tree, "show", "-s", "--format=%s").strip()
    path = base.root / f"build/pr-{branch.patch.stem}.md"
    with locked(base.root):
        if identity:
            sign(tree, branch.onto, identity)
        path.write_text(text)
        git(args.git, "branch", branch.name, git(tree, "rev-parse", "HEAD").strip())
        git(args.git, "worktree", "remove", "--force", str(tree.resolve()))
    print(f"title: {title}\nhooks {hooks}")
    print(f"{args.git}: branch {branch.name} on {args.onto}\n{path}: its description")
    print(f"look up again before you submit: {looked}")


def looked_up(proposal: dict[str, Any], known: dict[str, topics.Thread]) -> list[str]:
    """The threads that a proposal names, each with its state and the day of it."""
    told = f"{proposal.get('issues', '')} {proposal['not_duplicate']}"
    names = dict.fromkeys(re.findall(topics.THREAD, told))
    return [
        f"{name} ({known[name].state or 'unknown'}, {known[name].looked})"
        for name in names
        if name in known
    ]


def again(args: argparse.Namespace, patch: Path) -> str:
    """The command that continues, with the options of this one."""
    given = {
        "PATCH": patch.stem,
        "VLLM_GIT": args.git,
        "BASE": args.base,
        "ONTO": args.onto if args.onto != "main" else None,
        "BRANCH": args.branch,
        "SIGNOFF": args.signoff,
        "VALIDATION": args.validation,
        "NO_HOOKS": args.no_hooks,
    }
    words = (
        f"{key}={shlex.quote('1' if value is True else str(value))}"
        for key, value in given.items()
        if value
    )
    return f"make pr {' '.join(words)}"


def measured(path: Path) -> str:
    if not path.is_file():
        raise Problem(f"{path} is not a file (VALIDATION=...).")
    return path.read_text()


def chosen(base: Base, topic: str) -> Path:
    names = {path.stem: path for path in base.patches()}
    if topic.removesuffix(".patch") not in names:
        raise Problem(f"no patch {topic!r}. {topics.nearest(topic, [*names])}")
    return names[topic.removesuffix(".patch")]


def stacked(base: Base, patch: Path) -> dict[str, Path]:
    """The needs of a patch, in the order of the series, and the patch; by the subjects
    of their commits."""
    patches = {path.stem: path for path in base.patches()}
    names = topics.with_needs(base.root, list(patches), [patch.stem])
    made = commits(base.tree)
    told = git(base.tree, "log", "--format=%H %s", f"{BASE_REF}..HEAD").splitlines()
    subjects = dict(line.split(" ", 1) for line in told)
    return {subjects[made[name]]: patches[name] for name in names}


def proposed(base: Base, patch: Path) -> dict[str, Any]:
    """What topics.toml says of a patch.

    Raises:
        Problem: it says nothing of it, or not all that upstream asks for.
    """
    known = topics.load(base.root)
    proposal = known[patch.stem].told if patch.stem in known else {}
    if missing := {"claims", "not_duplicate"} - proposal.keys():
        raise Problem(
            f"{topics.FILE} has no {' and '.join(sorted(missing))} for {patch.stem}: "
            "upstream asks for both."
        )
    return proposal


def checked(clone: Path, onto: str, branch: str) -> str:
    """The commit to start from.

    Raises:
        Problem: not a clone, no such base, or the branch is there already.
    """
    usable = run_git(clone, "rev-parse", "--git-dir")
    if usable.returncode:
        why = usable.stderr.strip()
        raise Problem(f"{clone} is not a git clone (VLLM_GIT=...): {why}")
    found = run_git(clone, "rev-parse", "-q", "--verify", f"{onto}^{{commit}}")
    if found.returncode:
        raise Problem(f"{clone} has no branch, tag or commit {onto!r}: fetch it.")
    taken = run_git(clone, "rev-parse", "-q", "--verify", f"refs/heads/{branch}")
    if not taken.returncode:
        raise Problem(
            f"{clone} has a branch {branch} already: delete it (git branch -D) or "
            "choose another name (BRANCH=...)."
        )
    if git(clone, "status", "--porcelain"):
        print(f"{clone} has uncommitted changes: they are left alone")
    return found.stdout.strip()


def submitter(clone: Path) -> tuple[str, str]:
    """Name and e-mail address of the user's own git identity.

    Raises:
        Problem: there is none.
    """
    found = []
    for key in ("user.name", "user.email"):
        value = subprocess.run(
            ["git", "-C", str(clone), "config", key], capture_output=True, text=True
        ).stdout.strip()
        if not value:
            raise Problem(f"git has no {key} for a sign-off: git config {key} ...")
        found.append(value)
    return found[0], found[1]


def merge(
    base: Base,
    clone: Path,
    onto: str,
    patches: dict[str, Path],
    tree: Path,
    again: str,
) -> None:
    """A worktree whose HEAD is the last patch, on the others, on ``onto``.

    Raises:
        Problem: a conflict, which stays in the worktree; or nothing is left to do.
    """
    if tree.exists():
        done = subjects_between(tree, onto)
        if done is None or not set(done) <= patches.keys():
            raise Problem(
                f"{tree} is left from another run and is not this topic on this base: "
                "remove that folder to start anew."
            )
    else:
        done = []
        git(clone, "worktree", "prune")
        git(clone, "worktree", "add", "-q", "--detach", str(tree.resolve()), onto)
    left = [patch for subject, patch in patches.items() if subject not in done]
    if left and unresolved(tree):
        files = git(tree, "diff", "--name-only", "--diff-filter=U").split()
        outcome = Outcome("conflict", tuple(files))
        now = git(tree, "am", "--show-current-patch=raw")
        patch = next(p for p in left if now.strip() == p.read_text().strip())
        raise Problem(conflict_report(tree, patch, outcome, again))
    last = list(patches.values())[-1]
    for patch in left:
        outcome = Outcome("taken")
        try:
            outcome = transplant(base.tree, tree, patch)
        finally:
            if outcome.kind == "taken" and patch is last:
                git(clone, "worktree", "remove", "--force", str(tree.resolve()))
        if outcome.kind == "conflict":
            raise Problem(conflict_report(tree, patch, outcome, again))
    if left and outcome.kind == "taken":
        raise Problem(f"{last.name}: the base has these changes already.")


def subjects_between(tree: Path, onto: str) -> list[str] | None:
    """Those of the commits on ``onto``; None if HEAD does not stand on it."""
    if run_git(tree, "merge-base", "--is-ancestor", onto, "HEAD").returncode:
        return None
    told = git(tree, "log", "--reverse", "--format=%s", f"{onto}..HEAD")
    return told.splitlines()


def builds_on(base: Base, tree: Path, onto: str, patches: dict[str, Path]) -> list[str]:
    """A line for each commit of the branch below the topic: its subject, and why."""
    known = topics.load(base.root)
    *_, own = patches.values()
    lines = []
    for subject in (subjects_between(tree, onto) or [])[:-1]:
        needed = patches[subject].stem
        reasons = [
            f"{'this' if patch is own else patch.stem} {why}"
            for patch in reversed(patches.values())
            if patch.stem in known and (why := known[patch.stem].needs.get(needed))
        ] or ["its lines are next to others of this branch"]
        lines.append(f"- {subject}: {reasons[0]}")
    return lines


def run_hooks(tree: Path) -> str:
    """Run upstream's pre-commit hooks on the changed files; returns their names.

    One at a time, so that a hook that cannot be fetched does not hide the others.

    Raises:
        Problem: a hook failed.
    """
    path = tree / ".pre-commit-config.yaml"
    if not path.exists():
        return "the base has no .pre-commit-config.yaml"
    config = yaml.safe_load(path.read_text())
    files = git(tree, "diff", "--name-only", "--diff-filter=d", "HEAD~", "HEAD").split()
    passed, failed, absent = [], [], []
    for repo in config["repos"]:
        for hook in repo["hooks"]:
            wanted = any(re.search(hook.get("files", ""), name) for name in files)
            if not wanted or "pre-commit" not in hook.get("stages", ["pre-commit"]):
                continue
            one = config | {"repos": [repo | {"hooks": [hook]}]}
            code, output = run_hook(tree, one, files)
            name = hook.get("alias", hook["id"])
            if code == 0 and "no files to check" not in output:
                passed.append(name)
            elif code == 1:
                failed.append(f"{name}:\n{output}")
            elif code:
                absent.append(name)
    git(tree, "checkout", "-q", "--", ".")
    said = f"passed: {', '.join(passed) or 'none'}"
    if absent:
        said += f"; NOT RUN, could not be fetched: {', '.join(absent)}"
    if STAND_INS & set(absent):
        failed += lint(tree, touched_lines(tree))
        said += " (ruff and clang-format of this project were run on the changed lines)"
    if failed:
        raise Problem(
            "upstream's hooks fail:\n"
            + "\n".join(failed)
            + f"\nMend the patch, or the commit in {tree}, and run the command again."
        )
    return said


def run_hook(tree: Path, config: object, files: list[str]) -> tuple[int, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "pre_commit", "run", "-c", file.name, "--files",
             *files],
            cwd=tree, capture_output=True, text=True,
        )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def check(base: Base, patches: list[Path]) -> list[str]:
    """The output of 'make check' for each patch's tests, on the release with its
    needs, without it and with it.

    Raises:
        Problem: it failed.
    """
    names = [patch.name for patch in patches]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.check", "--root", str(base.root),
         "--base", base.version, "--alone", *names],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise Problem(f"'make check' of {', '.join(names)}: {done.stdout}{done.stderr}")
    told, lines = {}, []
    for line in done.stdout.splitlines():
        lines.append(line.strip())
        name = line.partition(": ")[0]
        if name in names:
            told[name], lines = lines[:-1], []  # without the name of our file
    return [
        f"The tests of this change on vLLM {base.version} and what it builds on, "
        "without it and with it, on a virtual CUDA device (exact about memory, "
        "computes nothing):\n\n```text\n" + "\n".join(told[name]) + "\n```\n"
        for name in names
    ]


def results(base: Base, proposal: dict[str, Any]) -> str:
    """The measured runs that belong to a patch.

    Raises:
        Problem: one is missing.
    """
    text = ""
    for name in proposal.get("results", []):
        path = base.root / "results" / name
        if not path.is_file():
            raise Problem(f"{topics.FILE} names {path}, which is not there.")
        text += f"\n```json\n{path.read_text().strip()}\n```\n"
    return text


def sign(tree: Path, onto: str, identity: tuple[str, str]) -> None:
    """Make the submitter the author of each commit, with sign-off; the patch's author
    is named, if it is somebody else."""
    name, address = identity
    trailers = ["--trailer", f"Signed-off-by: {name} <{address}>"]
    if identity != IDENTITY:
        author = "Co-authored-by: {} <{}>".format(*IDENTITY)
        trailers = ["--trailer", author, *trailers]
    stack = git(tree, "rev-list", "--reverse", f"{onto}..HEAD").split()
    git(tree, "checkout", "-q", "--detach", onto)
    for commit in stack:
        git(tree, "cherry-pick", commit)
        subprocess.run(
            ["git", "-C", str(tree), "-c", f"user.name={name}", "-c",
             f"user.email={address}", "commit", "-q", "--amend", "--no-edit",
             "--no-verify", "--reset-author", *trailers],
            check=True,
        )  # fmt: skip


def template_of(clone: Path, onto: str) -> str:
    """Upstream's template of a description.

    Raises:
        Problem: it has other sections than we know.
    """
    template = run_git(clone, "show", f"{onto}:{TEMPLATE}").stdout
    for title in SECTIONS:
        if not re.search(rf"^## {title}\n", template, re.M):
            raise Problem(
                f"{TEMPLATE} of the base has no section {title!r}: upstream changed "
                "it, and scripts/pr.py must follow."
            )
    return template


def description(
    tree: Path,
    template: str,
    proposal: dict[str, Any],
    measured: str,
    hooks: str,
    below: list[str],
) -> str:
    """Upstream's template, filled in; `below` lists the commits that the branch builds
    on."""
    subject, body = git(tree, "show", "-s", "--format=%s%n%b").split("\n", 1)
    overview = re.sub(r"^(\[[^]]*\])+ *", "", subject) + "."
    details = paragraphs(without_trailers(body))
    if details[-1].startswith("Issues: "):
        overview += " " + details.pop()
    changed = git(tree, "diff", "--name-only", "--diff-filter=d", "HEAD~", "HEAD")
    tests = [name for name in changed.split() if name.startswith("tests/")]
    if below:
        details += [
            "**A stack.** The last commit of this branch is this change. It builds on "
            "the others, each to be reviewed and merged before, in this order:",
            "\n".join(below),
        ]
    texts = (
        overview,
        "\n".join(f"- {claim}" for claim in proposal["claims"]),
        f"{measured.strip()}\n\n"
        + (f"To repeat them: `pytest {' '.join(tests)}`.\n\n" if tests else "")
        + f"pre-commit on the changed files: {hooks}.",
        "\n\n".join(details)
        + f"\n\n**Not a duplicate.** {proposal['not_duplicate']}\n\n"
        "**AI assistance** was used for this change.",
    )
    for title, text in zip(SECTIONS, texts, strict=True):
        template = re.sub(
            rf"(^## {title}\n)(\s*<!--.*?-->)?\s*",
            lambda match, text=text: f"{match[1]}\n{text}\n\n",  # type: ignore[misc]
            template,
            flags=re.M | re.S,
        )
    return template.replace("- [ ] AI assistance was", "- [x] AI assistance was")


def without_trailers(body: str) -> str:
    """Without the trailers; a last paragraph like "Trade-offs: ..." stays."""
    return re.sub(r"(\n[A-Z][A-Za-z-]+-by: .*)+\s*$", "", "\n" + body.strip()).strip()


def paragraphs(text: str) -> list[str]:
    """Paragraphs of a commit message, each in one line: GitHub breaks at each end."""
    return [
        re.sub(r"\n(?!- |\s*\d+\. )\s*", " ", part.strip())
        for part in re.split(r"\n\s*\n", text)
        if part.strip()
    ]


if __name__ == "__main__":
    command(main)

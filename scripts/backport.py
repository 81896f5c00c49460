"""Backport fixes (fixup commits) from the source of one release to that of another.

    git commit --fixup COMMIT      # in vllm/
    make backport TO=0.26.0

Each becomes a fixup of the same topic there, merged three-way. Then, for both: git
rebase -i --autosquash, make export, make check.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.commands import Problem, command, locked, scratch
from scripts.release import Base
from scripts.series import (
    BASE_REF,
    FORMAT_PATCH,
    NAMES_REF,
    conflict_report,
    git,
    made,
    transplant,
    unresolved,
)

FIXUP = "fixup! "


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, help="vLLM release")


def main(args: argparse.Namespace) -> None:
    source, target = (Base.load(args.root, v) for v in (args.base, args.to))
    for base in source, target:
        if not made(base.tree):
            raise Problem(f"'make source BASE={base.version}' first.")
    with locked(args.root):
        if unresolved(target.tree) or git(target.tree, "status", "--porcelain"):
            raise Problem(
                f"{target.tree} has uncommitted changes or a conflict: commit, or git "
                "am --continue, first."
            )
        fixes = fixups(source.tree)
        if not fixes:
            raise Problem(
                f"{source.tree} has no fixup of a topic: git -C {source.tree} commit "
                "--fixup COMMIT first."
            )
        topics = {name: subject for subject, name in names(target.tree).items()}
        with scratch(args.root / "build", "backport") as folder:
            for commit, topic in fixes:
                if topic not in topics:
                    why = target.absent.get(topic, "and not told why")
                    print(f"{topic}: not in {target.version}, {why}")
                else:
                    said = backport(
                        source, target, commit, topic, topics[topic], folder
                    )
                    print(f"{topic}: {said}")


def backport(
    source: Base, target: Base, commit: str, topic: str, subject: str, folder: Path
) -> str:
    """Carry one fix; returns what became of it.

    Raises:
        Problem: it conflicts; the conflict waits in the target's source.
    """
    mark = f"Carried from {commit}."
    if mark in git(target.tree, "log", "--format=%b", f"{BASE_REF}..HEAD"):
        return "there already"
    message = f"{FIXUP}{subject}\n\n{mark}"
    renamed = git(
        source.tree,
        "commit-tree",
        f"{commit}^{{tree}}",
        "-p",
        f"{commit}^",
        "-m",
        message,
    ).strip()
    patch = folder / topic
    text = git(source.tree, *FORMAT_PATCH, "-1", renamed)
    patch.write_bytes(text.encode("utf-8", "surrogateescape"))
    outcome = transplant(source.tree, target.tree, patch)
    if outcome.kind == "conflict":
        again = f"make backport BASE={source.version} TO={target.version}"
        raise Problem(conflict_report(target.tree, patch, outcome, again))
    return {
        "applies": "carried",
        "merged": "carried, merged into changed surroundings",
    }.get(outcome.kind, f"{target.version} has it")


def fixups(tree: Path) -> list[tuple[str, str]]:
    """Commit and topic of each fixup that is not squashed yet, in order."""
    known = names(tree)
    lines = git(tree, "log", "--reverse", "--format=%H %s", f"{BASE_REF}..HEAD")
    found = []
    for commit, _, subject in (line.partition(" ") for line in lines.splitlines()):
        if subject.startswith(FIXUP):
            found.append((commit, known.get(subject.removeprefix(FIXUP), "")))
    if lost := [commit for commit, topic in found if not topic]:
        raise Problem(f"{', '.join(lost)} in {tree}: a fixup of no topic.")
    return found


def names(tree: Path) -> dict[str, str]:
    """The patch file of each subject."""
    told = git(
        tree,
        "log",
        f"--notes={NAMES_REF}",
        "--format=%s%x00%N%x01",
        f"{BASE_REF}..HEAD",
    )
    pairs = (entry.strip().partition("\0") for entry in told.split("\1"))
    return {subject: name.strip() for subject, _, name in pairs if name.strip()}


if __name__ == "__main__":
    command(main)

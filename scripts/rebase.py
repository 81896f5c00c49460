"""Start the series for another vLLM release from the current one.

Patches are merged three-way onto that release. What upstream has taken is named and
left out. A conflict is left in build/ to be resolved; run the command again to
continue. patches/resolutions keeps how it was resolved, so that git does it the next
time. --check is make drift.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from scripts.commands import Problem, command, locked, scratch
from scripts.drift import report
from scripts.headers import patch_files
from scripts.names import names, words
from scripts.patch_tests import JOBS, own_tests, testers
from scripts.release import Base
from scripts.series import (
    BASE_REF,
    NAMES_REF,
    Kind,
    Outcome,
    commits,
    conflict_report,
    git,
    recall,
    remember,
    run_git,
    touched_lines,
    transplant,
    unresolved,
)
from scripts.source import another

SAID = {
    "applies": "applies",
    "merged": "merged into changed surroundings",
    "remembered": "conflicts resolved as before",
    "resolved": "resolved by hand",
    "taken": "upstream has it: left out",
    "skipped": "skipped: left out",
    "conflict": "conflicts",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, help="vLLM release to move to")
    parser.add_argument("--check", action="store_true", help="report, write nothing")


def main(args: argparse.Namespace) -> None:
    old = Base.load(args.root, args.base)
    target = args.root / f"patches/v{args.to}"
    if target.exists() and not args.check:
        raise Problem(f"{target} is there already: move it away to start anew.")
    with locked(args.root):
        if args.check:
            with scratch(args.root / "build", "rebase") as folder:
                new = another(old, args.to, folder / "new")
                print(*report(old, new, folder), sep="\n")
            return
        folder = args.root / f"build/rebase-{args.to}"
        memory = args.root / "patches/resolutions"
        if not folder.exists():
            with scratch(args.root / "build", "rebase") as part:
                recall(another(old, args.to, part / "new").tree, memory)
                (part / "new").rename(folder)
        new = Base.load(folder, args.to)
        remember(new.tree, memory, conflicts(new))
        for patch in old.patches():
            move(old, new, patch)
        patches = patch_files(args.root, new.tree)
        for name, content in patches.items():
            (new.folder / name).write_bytes(content)
        (new.folder / "series").write_text("".join(f"{name}\n" for name in patches))
        new.folder.rename(target)
        print(
            f"{target}: {len(patches)} patches. Review base.toml (the hashes are the "
            f"package index's), then 'make check BASE={args.to}'."
        )
        with scratch(args.root / "build", "rebase") as part:
            new.tree.rename(part / "vllm")
            shutil.rmtree(folder)
            for line in lacking(old, part / "vllm"):
                print(line)
            unpatched_tests(replace(new, root=args.root), part / "vllm")


def outcomes_of(new: Base) -> dict[str, tuple[Kind, list[str], str]]:
    """What became of each patch so far: kind, files, and HEAD before it."""
    notes = new.root / "outcomes.json"
    return json.loads(notes.read_text()) if notes.exists() else {}


def conflicts(new: Base) -> set[str]:
    """The files that had conflicts so far."""
    told = outcomes_of(new).values()
    return {name for kind, files, _ in told if kind == "conflict" for name in files}


def move(old: Base, new: Base, patch: Path) -> None:
    """Commit a patch, unless an earlier run did.

    Raises:
        Problem: a conflict, with what to do about it.
    """
    outcomes = outcomes_of(new)
    head = git(new.tree, "rev-parse", "HEAD").strip()
    if patch.name not in outcomes:
        run_git(new.tree, "am", "--abort")  # of a run that was killed
        outcome = transplant(old.tree, new.tree, patch)
    else:
        kind, files, before = outcomes[patch.name]
        outcome = Outcome(kind, tuple(files))
        if kind == "conflict" and not unresolved(new.tree):
            outcome = Outcome("resolved" if head != before else "skipped")
    outcomes[patch.name] = (outcome.kind, [*outcome.files], head)
    (new.root / "outcomes.json").write_text(json.dumps(outcomes))
    if outcome.kind == "conflict":
        again = f"make rebase BASE={old.version} TO={new.version}"
        raise Problem(conflict_report(new.tree, patch, outcome, again))
    tell(patch, outcome)
    if outcome.kind not in ("taken", "skipped"):
        note = ("add", "-f", "-m", patch.name, "HEAD")
        git(new.tree, "notes", f"--ref={NAMES_REF}", *note)


def tell(patch: Path, outcome: Outcome) -> None:
    print(f"{patch.name}: {SAID[outcome.kind]}")
    conflict = outcome.kind in ("conflict", "remembered")
    for name in outcome.files:
        already = "" if conflict else ": its changes are there already"
        print(f"  {name}{already}")


def lacking(old: Base, tree: Path) -> list[str]:
    """Names of the old release that patches use and the new one does not have: where
    a merge without a conflict is wrong."""
    lost = words(old.tree, BASE_REF) - words(tree, BASE_REF)
    said = []
    for topic, commit in commits(tree).items():
        git(tree, "checkout", "-q", "--detach", commit)
        found = names(tree, touched_lines(tree))
        lost -= found.defined
        said += [
            f"{topic} uses {name}, which is not there: {where}"
            for name, where in found.used.items()
            if name in lost
        ]
    return said


def unpatched_tests(base: Base, tree: Path) -> None:
    """Say which patches' tests fail without the patch on this release, and which do
    not."""
    environment = f".venv-vllm-{base.version}"
    if not (base.root / environment / "bin/python").exists():
        print(
            f"not run: which tests still fail unpatched. It needs {environment} "
            f"(requirements/vllm-{base.version}.txt, 'make {environment}/ready')."
        )
        return
    with testers(base, JOBS) as pool:
        for commit in git(tree, "rev-list", "--reverse", f"{BASE_REF}..HEAD").split():
            git(tree, "checkout", "-q", "-B", "check", commit)
            print(git(tree, "show", "-s", "--format=%s").strip())
            touched = touched_lines(tree)
            with scratch(tree.parent, "tests") as folder:
                for fault in own_tests(base, tree, touched, folder / "own", pool)():
                    print(f"  {fault}")


if __name__ == "__main__":
    command(main)

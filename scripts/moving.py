"""Patches merged onto another release, one after the other.

A conflict is left to be resolved, and the next run goes on behind it. What became of
each patch is kept next to the tree, in ``outcomes.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

from scripts.commands import Problem
from scripts.names import names, words
from scripts.release import Base
from scripts.series import (
    BASE_REF,
    NAMES_REF,
    Kind,
    Outcome,
    commits,
    conflict_report,
    git,
    remember,
    run_git,
    touched_lines,
    transplant,
    unresolved,
)

DONE_REF = "refs/envelope/done"
SAID = {
    "applies": "applies",
    "merged": "merged into changed surroundings",
    "remembered": "conflicts resolved as before",
    "resolved": "resolved by hand",
    "taken": "upstream has it: left out",
    "skipped": "skipped: left out",
    "conflict": "conflicts",
}


def move_series(old: Base, new: Base, again: str) -> dict[str, Outcome]:
    """Commit the patches of ``old`` in ``new.tree``, or go on with it.

    ``again`` is the command that goes on after a conflict.

    Returns:
        What became of each, by topic.

    Raises:
        Problem: a conflict, with what to do about it; or a mend does not apply.
    """
    keep_resolutions(old, new)
    return {
        patch.stem: move(old, new, patch, again)
        for patch in old.patches()
        if patch.stem not in new.left_out
    }


def keep_resolutions(old: Base, new: Base) -> None:
    """Keep how conflicts in ``new.tree`` were resolved."""
    known = outcomes_of(new).values()
    had = {f for kind, files, _ in known if kind == "conflict" for f in files}
    remember(new.tree, old.resolutions, had)


def outcomes_of(new: Base) -> dict[str, tuple[Kind, list[str], str]]:
    """What became of each patch so far: kind, files, and HEAD before it."""
    notes = new.tree.with_name("outcomes.json")
    return json.loads(notes.read_text()) if notes.exists() else {}


def move(old: Base, new: Base, patch: Path, again: str) -> Outcome:
    """Commit a patch, unless an earlier run did.

    Raises:
        Problem: a conflict, with what to do about it; or its mend does not apply.
    """
    outcomes, tree = outcomes_of(new), new.tree
    head = git(tree, "rev-parse", "HEAD").strip()
    if patch.name not in outcomes:
        run_git(tree, "am", "--abort")  # of a run that was killed
        if not run_git(tree, "rev-parse", "-q", "--verify", DONE_REF).returncode:
            git(tree, "reset", "-q", "--hard", DONE_REF)
        head = git(tree, "rev-parse", "HEAD").strip()
        outcome = transplant(old.tree, tree, patch)
    else:
        kind, files, before = outcomes[patch.name]
        outcome = Outcome(kind, tuple(files))
        if kind != "conflict":
            tell(patch, outcome)
            return outcome
        if not unresolved(tree):
            outcome = Outcome("resolved" if head != before else "skipped")
    if outcome.kind not in ("conflict", "taken", "skipped"):
        mend(new, patch.stem)
        note = ("add", "-f", "-m", patch.name, "HEAD")
        git(tree, "notes", f"--ref={NAMES_REF}", *note)
    outcomes[patch.name] = (outcome.kind, [*outcome.files], head)
    if outcome.kind != "conflict":
        git(tree, "update-ref", DONE_REF, "HEAD")
    tree.with_name("outcomes.json").write_text(json.dumps(outcomes))
    if outcome.kind == "conflict":
        raise Problem(conflict_report(tree, patch, outcome, again))
    tell(patch, outcome)
    return outcome


def mend(new: Base, topic: str) -> None:
    """Amend the topic at HEAD with what no merge gives.

    Raises:
        Problem: the diff does not apply.
    """
    diff = new.mend(topic)
    if not diff.exists():
        return
    done = run_git(new.tree, "apply", "--index", str(diff))
    if done.returncode:
        raise Problem(
            f"{diff} does not apply to {topic} on vLLM {new.version}:\n"
            f"{done.stderr.strip()}\nMend that file; or remove it, and once the source "
            "is there, change the topic's commit there and 'make export "
            f"BASE={new.version}'."
        )
    git(new.tree, "commit", "-q", "--amend", "--no-edit", "--no-verify")


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

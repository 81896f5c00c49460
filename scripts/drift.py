"""How far another release is from the series, as a whole and topic by topic.

    make drift TO=0.32.0

It does not stop at a conflict, and writes nothing. The whole series is merged once,
three-way, and its conflicting hunks are counted by file. Then each topic is merged onto
the release with the topics before it, whose conflicts are resolved as in the series:
any conflict is then the topic's own.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from scripts.commands import command, locked, scratch
from scripts.merging import Repository
from scripts.release import Base
from scripts.series import BASE_REF, commits, git
from scripts.source import another


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, help="vLLM release")


def main(args: argparse.Namespace) -> None:
    old = Base.load(args.root, args.base)
    with locked(args.root), scratch(args.root / "build", "drift") as folder:
        new = another(old, args.to, folder / "new")
        print(*report(old, new, folder), sep="\n")


@dataclass(frozen=True)
class Drift:
    """A topic on another release: files that have its changes already, and
    conflicting hunks by file. `alone` is without the topics before it."""

    taken: tuple[str, ...]
    hunks: Counter[str]
    alone: bool
    whole: bool
    """Whether all of its changes are there already."""

    def __str__(self) -> str:
        if self.whole:
            return "upstream has it"
        if self.hunks:
            files = ", ".join(f"{name} {n}" for name, n in self.hunks.items())
            return f"conflicts, {counted(self.hunks.total(), 'hunk')}: {files}"
        return "applies" + (", alone too" if self.alone else "")


def report(old: Base, new: Base, folder: Path) -> list[str]:
    """The report, as lines."""
    repository = Repository.borrowing(folder / "merges", old.tree, new.tree)
    base, release = (
        git(tree, "rev-parse", BASE_REF).strip() for tree in (old.tree, new.tree)
    )
    series = commits(old.tree)
    whole = repository.hunks(
        repository.merge(base, release, git(old.tree, "rev-parse", "HEAD").strip())
    )
    drifts = topics(repository, base, release, series)
    code = sum(n for name, n in whole.items() if not beside_code(name))
    said = [
        f"{old.version} merged whole with {new.version}: "
        f"{counted(whole.total(), 'conflicting hunk')} in {counted(len(whole), 'file')}"
        f", {code} in code"
    ]
    said += [f"  {name}: {n}" for name, n in whole.most_common()]
    said += ["patch by patch:"]
    for name, drift in drifts.items():
        said += [f"  {name}: {drift}"]
        if not drift.whole:
            said += [f"    {file}: upstream has it" for file in drift.taken]
    counts = {
        "conflict": sum(bool(d.hunks) for d in drifts.values()),
        "apply": sum(not d.hunks and not d.whole for d in drifts.values()),
        "apply alone": sum(d.alone for d in drifts.values()),
        "upstream has": sum(d.whole for d in drifts.values()),
    }
    told = ", ".join(f"{n} {what}" for what, n in counts.items())
    return [*said, f"of {len(series)} patches: {told}"]


def topics(
    repository: Repository, base: str, release: str, series: dict[str, str]
) -> dict[str, Drift]:
    found = {}
    tree = repository.tree(release)
    before = base
    for name, commit in series.items():
        merged = repository.merge(before, tree, commit)
        after = repository.settled(merged, commit)
        changed = repository.changed(before, commit)
        alone = repository.merge(before, release, commit)
        found[name] = Drift(
            tuple(sorted(changed - repository.changed(tree, after))),
            repository.hunks(merged),
            not alone.files and alone.tree != repository.tree(release),
            not merged.files and after == tree,
        )
        before, tree = commit, after
    return found


def beside_code(name: str) -> bool:
    return name.startswith(("tests/", "docs/"))


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    command(main)

"""Which topics of an older release differ from the newest one's, where, and why.

    make compare [BASE=0.26.0]

A topic is the same if it adds and removes the same lines of the same files; context and
line numbers do not count. The release's base.toml says why a topic differs or is
absent, under [differs] and [absent]: a reason for each such topic, and for no other.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from scripts.commands import Problem, command
from scripts.release import Base

Changes = dict[str, Counter[str]]
Differences = dict[str, tuple[int, int]]


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    newest = Base.load(args.root, releases(args.root)[0])
    if newest.version == base.version:
        raise Problem(f"{base.version} is the newest release: BASE=an older one.")
    print(f"vLLM {base.version} beside {newest.version}; lines only there / only here")
    found = differing(newest, base)
    for patch in newest.patches():
        if not (base.folder / patch.name).exists():
            why = base.absent.get(patch.name, "no reason is told")
            print(f"{patch.stem}: absent, {why}")
        elif patch.name in found:
            print(f"{patch.stem}: {base.differs.get(patch.name, 'no reason is told')}")
            for name, (there, here) in found[patch.name].items():
                print(f"    {name}: {there} / {here}")
        else:
            print(f"{patch.stem}: the same")
    missing = found.keys() - base.differs.keys()
    stale = base.differs.keys() - found.keys()
    if missing or stale:
        raise Problem(
            f"[differs] in {base.folder / 'base.toml'}: a reason is needed for "
            f"{', '.join(sorted(missing)) or 'no more'}, and not for "
            f"{', '.join(sorted(stale)) or 'others'}."
        )


def releases(root: Path) -> list[str]:
    """The supported releases, the newest first."""
    found = [p.parent.name[1:] for p in root.glob("patches/v*/base.toml")]
    return sorted(found, key=lambda name: [*map(int, name.split("."))], reverse=True)


def differing(newest: Base, base: Base) -> dict[str, Differences]:
    """Where patches of `base` change other lines than the newest's, by patch file."""
    found = {
        patch.name: difference(changes(newest.folder / patch.name), changes(patch))
        for patch in base.patches()
        if (newest.folder / patch.name).exists()
    }
    return {name: files for name, files in found.items() if files}


def changes(patch: Path) -> Changes:
    """The lines that a patch adds ("+...") and removes ("-...") of each file."""
    found: Changes = {}
    left = [0, 0]  # of the hunk: lines before and after it
    for line in patch.read_text(errors="replace").splitlines():
        if match := re.match(r"diff --git a/(\S+) b/", line):
            lines = found.setdefault(match[1], Counter())
        elif match := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            left = [int(count or 1) for count in match.groups()]
        elif any(left):
            if line[:1] in ("+", "-"):
                lines[line] += 1
            left[0] -= line[:1] != "+"
            left[1] -= line[:1] != "-"
    return found


def difference(there: Changes, here: Changes) -> Differences:
    """By file, the number of lines that only one changes; equal files are left out."""
    counts = {}
    for name in sorted(there.keys() | here.keys()):
        one, other = (side.get(name, Counter[str]()) for side in (there, here))
        counts[name] = (one - other).total(), (other - one).total()
    return {name: both for name, both in counts.items() if any(both)}


if __name__ == "__main__":
    command(main)

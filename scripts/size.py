"""How large the series is, read from the patch files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from scripts import topics
from scripts.commands import command
from scripts.release import Base, releases

FILE = re.compile(r"^diff --git a/(?!tests/|docs/)(\S+)", re.M)


def main(args: argparse.Namespace) -> None:
    print(told(args.root))


def told(root: Path) -> str:
    """Lines are those outside of tests and docs."""
    patches = {p.stem: p for p in Base.load(root, releases(root)[0]).patches()}
    added, removed = size([*patches.values()])
    files = {name for p in patches.values() for name in FILE.findall(text_of(p))}
    largest = max(patches.values(), key=lambda patch: changed(patch)[0])
    core = topics.members(root, list(patches), "core")
    return (
        f"{len(patches)} patches add {added:,} lines and remove {removed:,}, outside "
        f"of tests and docs, in {len(files)} files. The largest is {largest.stem} "
        f"(+{changed(largest)[0]:,}). The set `core` has {len(core)} patches "
        f"(+{size([patches[name] for name in core])[0]:,})."
    )


def size(patches: Sequence[Path]) -> tuple[int, int]:
    """Lines that patches add and remove outside of tests and docs."""
    counts = [changed(patch) for patch in patches]
    return sum(added for added, _ in counts), sum(removed for _, removed in counts)


def changed(patch: Path) -> tuple[int, int]:
    """Of one patch."""
    counts = {"+": 0, "-": 0}
    code = inside = False
    for line in text_of(patch).splitlines():
        if line.startswith("diff --git a/"):
            code = bool(FILE.match(line))
            inside = False
        elif line.startswith("@@"):
            inside = True
        elif code and inside and line[:1] in counts:
            counts[line[0]] += 1
    return counts["+"], counts["-"]


def text_of(patch: Path) -> str:
    return patch.read_text(errors="replace")


if __name__ == "__main__":
    command(main)

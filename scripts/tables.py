"""List how old the tables of the pages are, by their lines "recorded at commit": how
many commits have changed the patches of the newest release since."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from scripts.commands import Problem, command
from scripts.release import releases
from scripts.series import git

RECORDED = re.compile(r"[Rr]ecorded\s+at\s+commit\s+`(\w+)(-dirty)?`")


def main(args: argparse.Namespace) -> None:
    folder = f"patches/v{releases(args.root)[0]}"
    for name in git(args.root, "ls-files", "docs/*.md").splitlines():
        for commit, _ in dict.fromkeys(
            RECORDED.findall((args.root / name).read_text())
        ):
            print(f"{name}: {age(args.root, commit, folder)}")


def age(root: Path, commit: str, folder: str) -> str:
    """When the commit was made, and how often the folder has changed since."""
    try:
        when = git(root, "log", "-1", "--format=%h of %as", commit, "--").strip()
    except Problem:
        return f"{commit}, which this clone does not have"
    since = git(root, "rev-list", "--count", f"{commit}..HEAD", "--", folder).strip()
    return f"{when}, {since} commits to {folder} since"


if __name__ == "__main__":
    command(main)

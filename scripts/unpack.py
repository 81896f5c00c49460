"""Unpack our wheel as ``build/envelope-<release>``, for PYTHONPATH.

An environment with the official release and its dependencies can then run the patched
one, and tests can compare the two.
"""

from __future__ import annotations

import argparse
import os
import zipfile

from scripts import topics
from scripts.commands import Problem, command, locked, scratch
from scripts.release import sha256


def options(parser: argparse.ArgumentParser) -> None:
    topics.options(parser)


def main(args: argparse.Namespace) -> None:
    base = topics.chosen(args)
    name = base.wheel(os.uname().machine).file
    wheel = base.root / "dist" / name.replace(base.version, base.local_version, 1)
    if not wheel.is_file():
        raise Problem(f"there is no {wheel}: 'make wheel' first.")
    target = base.unpacked
    digest = sha256(wheel)
    made_from = target / ".wheel"
    with locked(base.root):
        if made_from.is_file() and made_from.read_text() == digest:
            return
        with scratch(target.parent, target.name) as folder:
            new = folder / "new"
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(new)
            (new / ".wheel").write_text(digest)
            if target.exists():
                target.rename(folder / "old")
            new.rename(target)
    print(target)


if __name__ == "__main__":
    command(main)

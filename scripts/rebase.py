"""Start the series for another vLLM release from the current one.

Patches are merged three-way onto that release. What upstream has taken is named and
left out. A conflict is left in build/ to be resolved; run the command again to
continue. patches/resolutions keeps how it was resolved, so that git does it the next
time. --check is make drift.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from scripts.commands import Problem, command, locked, scratch
from scripts.drift import report
from scripts.headers import patch_files
from scripts.moving import lacking, move_series
from scripts.patch_tests import JOBS, own_tests, testers
from scripts.release import Base
from scripts.series import BASE_REF, git, recall, touched_lines
from scripts.source import another


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, help="vLLM release to move to")
    parser.add_argument("--check", action="store_true", help="report, write nothing")


def main(args: argparse.Namespace) -> None:
    old = Base.load(args.root, args.base)
    if old.series:
        raise Problem(
            f"vLLM {old.version} has the series of {old.series}: BASE={old.series}."
        )
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
        if not folder.exists():
            with scratch(args.root / "build", "rebase") as part:
                recall(another(old, args.to, part / "new").tree, old.resolutions)
                (part / "new").rename(folder)
        new = Base.load(folder, args.to)
        move_series(old, new, f"make rebase BASE={old.version} TO={new.version}")
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

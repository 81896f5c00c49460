"""Write the commits of ``vllm/`` to the patch files of the release.

Of a release that has the series of another one, what a commit has and no merge of its
topic gives becomes ``<topic>.diff``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from scripts import topics, topics_page
from scripts.commands import Problem, command, locked, scratch, write_whole
from scripts.headers import patch_files
from scripts.release import Base, releases
from scripts.series import (
    APPLIED_REF,
    BASE_REF,
    NAMES_REF,
    commits,
    git,
    made,
    recall,
    remember,
    run_git,
    transplant,
)


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    with locked(args.root):
        if not made(base.tree):
            raise Problem(f"there is no {base.tree} to export: 'make source' first.")
        if base.series:
            export_mends(base)
            return
        patches = patch_files(args.root, base.tree)
        files = dict(patches) | {"series": "".join(f"{n}\n" for n in patches).encode()}
        old = {p.name: p.read_bytes() for p in base.folder.glob("*.patch")}
        old["series"] = (base.folder / "series").read_bytes()
        with scratch(base.folder, "export") as folder:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            for name, content in files.items():
                if old.get(name) != content:
                    os.replace(folder / name, base.folder / name)
                    print(("changed " if name in old else "new ") + name)
        for name in old.keys() - files.keys():
            (base.folder / name).unlink()
            print(f"removed {name}")
        commits = git(base.tree, "rev-list", "--reverse", f"{BASE_REF}..HEAD").split()
        for commit, name in zip(commits, patches, strict=True):
            note = ("add", "-f", "-m", name, commit)
            git(base.tree, "notes", f"--ref={NAMES_REF}", *note)
        git(base.tree, "update-ref", APPLIED_REF, "HEAD")
        (base.tree / ".git/envelope").write_text(base.digest())
        print(f"{base.folder.name}: {len(patches)} patches")
        newest = releases(args.root)[0] == base.version
        known = [f"{name}.patch" for name in topics.load(args.root)]
        if newest and known == [*patches]:
            topics_page.write(args.root)  # the tables tell how long the patches are


def export_mends(base: Base) -> None:
    """Write what each commit has beyond the merge of its topic onto the one before.

    A conflict is resolved as in the commit, and the resolution kept.

    Raises:
        Problem: the commits are not the topics of the series, each once.
    """
    tree, old = base.tree, Base.load(base.root, base.series)
    found, patches = patch_files(base.root, tree), base.patches()
    if list(found) != [patch.name for patch in patches]:
        differ = sorted(set(found) ^ {p.name for p in patches}) or ["the order"]
        raise Problem(
            f"{tree} and the series of {old.version} that vLLM {base.version} has: "
            f"{', '.join(differ)}. A patch is new or changes in {old.tree}; [left_out] "
            f"of {base.folder / 'base.toml'} names those that {base.version} lacks."
        )
    wanted = commits(tree)
    had: set[str] = set()
    texts = {}
    with scratch(base.root / "build", "export") as folder:
        merged = folder / "vllm"
        git(folder, "clone", "-q", "--shared", "--no-checkout", str(tree), "vllm")
        recall(merged, base.resolutions)
        for patch in patches:
            commit = wanted[patch.stem]
            git(merged, "checkout", "-q", "--detach", f"{commit}^")
            outcome = transplant(old.tree, merged, patch)
            if outcome.kind == "conflict":
                had |= {*outcome.files}
                resolve(merged, outcome.files, commit)
            diff = ("diff", "--full-index", "--no-renames", "HEAD", commit)
            texts[base.mend(patch.stem)] = git(merged, *diff)
        remember(merged, base.resolutions, had)
    for mend, text in texts.items():
        before = mend.read_text() if mend.exists() else ""
        if text != before:
            print(f"{'changed' if before else 'new'} {mend.name}")
        if text:
            write_whole(mend, text)
        else:
            mend.unlink(missing_ok=True)
    git(tree, "update-ref", APPLIED_REF, "HEAD")
    (tree / ".git/envelope").write_text(base.digest())
    print(f"{base.folder.name}: {sum(map(bool, texts.values()))} patches need more")


def resolve(tree: Path, files: tuple[str, ...], commit: str) -> None:
    """End a merge that conflicts, with the files as they are in ``commit``."""
    for name in files:
        if run_git(tree, "cat-file", "-e", f"{commit}:{name}").returncode:
            git(tree, "rm", "-q", "--", name)
        else:
            git(tree, "checkout", "-q", commit, "--", name)
    empty = not run_git(tree, "diff", "--cached", "--quiet").returncode
    git(tree, "am", "--skip" if empty else "--continue")


if __name__ == "__main__":
    command(main)

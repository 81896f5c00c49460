"""Write the commits of ``vllm/`` to the patch files of the release."""

from __future__ import annotations

import argparse
import os

from scripts import topics, topics_page
from scripts.commands import Problem, command, locked, scratch
from scripts.headers import patch_files
from scripts.release import Base, releases
from scripts.series import APPLIED_REF, BASE_REF, NAMES_REF, git, made


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    with locked(args.root):
        if not made(base.tree):
            raise Problem(f"there is no {base.tree} to export: 'make source' first.")
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


if __name__ == "__main__":
    command(main)

"""Three-way merges without a checkout: a topic on another tree.

Merges are made in a separate repository that borrows the objects of others, so that
those do not grow.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.commands import Problem
from scripts.series import git, run_git

HUNK = re.compile(r"^<<<<<<< .*?^=======\n(.*?)^>>>>>>> .*?\n", re.M | re.S)


@dataclass(frozen=True)
class Merged:
    """A tree, with conflict markers in `files`."""

    tree: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Repository:
    """Where merges are made; each argument names a tree: a commit or a tree."""

    path: Path

    @classmethod
    def borrowing(cls, path: Path, *sources: Path) -> Repository:
        """A new one at `path`, with the objects of work trees."""
        path.mkdir(parents=True)
        git(path, "init", "-q", "--bare")
        objects = [git(s, "rev-parse", "--git-path", "objects") for s in sources]
        lines = [
            str((source / name.strip()).resolve())
            for source, name in zip(sources, objects, strict=True)
        ]
        (path / "objects/info/alternates").write_text("".join(f"{x}\n" for x in lines))
        return cls(path)

    @cached_property
    def _merged(self) -> dict[tuple[str, str, str], Merged]:
        return {}

    def tree(self, name: str) -> str:
        return git(self.path, "rev-parse", f"{name}^{{tree}}").strip()

    def merge(self, base: str, ours: str, theirs: str) -> Merged:
        """`ours` with the changes from `base` to `theirs`.

        Raises:
            Problem: git is too old, or failed.
        """
        key = base, ours, theirs
        if key not in self._merged:
            self._merged[key] = self._merge(*key)
        return self._merged[key]

    def _merge(self, base: str, ours: str, theirs: str) -> Merged:
        root = self.commit(base)
        done = run_git(
            self.path, "merge-tree", "--write-tree", "--no-messages", "--name-only",
            "-z", self.commit(ours, root), self.commit(theirs, root),
        )  # fmt: skip
        if done.returncode not in (0, 1):
            raise Problem(
                f"git could not merge (2.38 or newer is needed): {done.stderr.strip()}"
            )
        tree, *files = done.stdout.rstrip("\0").split("\0")
        return Merged(tree, tuple(files))

    def pick(self, commit: str, onto: str) -> Merged:
        return self.merge(f"{commit}^", onto, commit)

    def commit(self, name: str, *parents: str, message: str = "") -> str:
        """A commit of that tree with these parents."""
        options = [part for parent in parents for part in ("-p", parent)]
        made = ("commit-tree", f"{name}^{{tree}}", *options, "-m", message)
        return git(self.path, *made).strip()

    def copy(self, commit: str, tree: str, parent: str) -> str:
        """A commit with another's message and author, of `tree` on `parent`."""
        message = git(self.path, "show", "-s", "--format=%B", commit)
        return self.commit(tree, parent, message=message)

    def hunks(self, merged: Merged) -> Counter[str]:
        """The number of conflicts by file; one for a file that only one side has."""
        return Counter(
            {
                name: len(HUNK.findall(self.content(merged.tree, name))) or 1
                for name in merged.files
            }
        )

    def changed(self, before: str, after: str) -> set[str]:
        """The files in which two trees differ."""
        diff = ("diff", "--name-only", "--no-renames", "-z", before, after)
        return set(git(self.path, *diff).split("\0")[:-1])

    def content(self, tree: str, name: str) -> str:
        """A file's text; empty if it is not there."""
        return run_git(self.path, "show", f"{tree}:{name}").stdout

    def settled(self, merged: Merged, theirs: str) -> str:
        """The tree with each conflict resolved as in `theirs`."""
        if not merged.files:
            return merged.tree
        index = self.path / "settled.index"
        git(self.path, "read-tree", merged.tree, index=index)
        for name in merged.files:
            text = self.content(merged.tree, name)
            found = git(self.path, "ls-tree", theirs, "--", name).split()
            if not found:
                remove = ("--work-tree=.", "update-index", "--force-remove", name)
                git(self.path, *remove, index=index)
                continue
            mode, _, blob, *_ = found
            if HUNK.search(text):
                (self.path / "settled").write_text(
                    HUNK.sub(r"\1", text), errors="surrogateescape"
                )
                blob = git(self.path, "hash-object", "-w", "settled").strip()
            entry = f"{mode},{blob},{name}"
            git(self.path, "update-index", "--add", "--cacheinfo", entry, index=index)
        return git(self.path, "write-tree", index=index).strip()

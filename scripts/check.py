"""Check each patch in order, as a maintainer would.

It applies; upstream's ruff and clang-format pass on the lines it touches, and its own
hooks on the files; its Python compiles; methods that it calls on self are defined; and
of the tests it touches at least one fails without it and all pass with it, on the
virtual device. Tests that need kernels to compute are left out (expected.toml). On the
whole series all those tests run again, and upstream's mypy once.

With --alone, a patch is checked on the release with only its needs by topics.toml,
merged three-way in the order of the series; no name that it uses may be missing, and
none that it defines may be of another patch as well.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import deque
from itertools import takewhile
from pathlib import Path

from scripts import upstream_hooks
from scripts.commands import Problem, command, locked, scratch
from scripts.merging import Repository
from scripts.names import names, words
from scripts.patch_tests import (
    JOBS,
    Finish,
    no_tests,
    own_tests,
    series_tests,
    testers,
)
from scripts.release import Base
from scripts.series import BASE_REF, apply, commits, git, run_git, touched_lines
from scripts.topics import also_needed, stack, with_needs

# Patches whose tests wait behind those of one that takes long: each has a tree.
AHEAD = 8


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-tests", action="store_true", help="lint only")
    parser.add_argument("--alone", action="store_true", help="with its needs only")
    parser.add_argument(
        "--first-failure",
        action="store_true",
        help="without a patch, its tests only until one fails; with it, only on the "
        "whole series",
    )
    parser.add_argument("patches", nargs="*", help="only these (default: all)")


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    patches = base.patches()
    unknown = set(args.patches) - {patch.name for patch in patches}
    if unknown:
        raise Problem(f"not in the series: {', '.join(sorted(unknown))}")
    chosen = [p for p in patches if not args.patches or p.name in args.patches]
    failed: list[str] = []
    hooks = base.root / "build/hooks"
    with (
        locked(base.root),
        scratch(base.root / "build", "check") as folder,
        testers(base, 0 if args.no_tests else JOBS) as pool,
    ):
        waiting: deque[tuple[str, list[str], Finish]] = deque()

        def tell_first() -> None:
            name, faults, finish = waiting.popleft()
            faults += finish()
            print(f"{name}: {'ok' if not faults else ''}", flush=True)
            for fault in faults:
                print(f"  {fault}")
            failed.extend([name] if faults else [])

        tree = folder / "vllm"
        git(folder, "clone", "-q", "--shared", "--no-checkout", str(base.tree), "vllm")
        git(tree, "fetch", "-q", "origin", f"{BASE_REF}:{BASE_REF}")
        git(tree, "checkout", "-q", "-b", "check", BASE_REF)
        alone = Alone(base, tree) if args.alone else None
        merged = commits(base.tree) if base.series else {}
        for patch in patches if alone is None else chosen:
            faults, finish = [], no_tests
            if alone:
                faults = alone.place(patch.stem)
            elif base.series:
                git(tree, "checkout", "-q", "-B", "check", merged[patch.stem])
            else:
                apply(base, tree, [patch])
            if patch not in chosen:
                continue
            if not faults:
                touched = touched_lines(tree)
                faults = lint(tree, touched) + syntax(tree, touched)
                faults += undefined(tree, touched)
                faults += upstream_hooks.run(tree, sorted(touched), hooks)
                if alone:
                    faults += alone.missing(patch.stem, touched)
                    faults += alone.astray(patch.stem)
                if not args.no_tests:
                    place = folder / patch.stem
                    quick = args.first_failure and not args.patches
                    finish = own_tests(base, tree, touched, place, pool, quick)
            waiting.append((patch.name, faults, finish))
            while len(waiting) > AHEAD:
                tell_first()
        whole = not args.patches and not alone
        finish = no_tests
        if whole and not args.no_tests:
            finish = series_tests(base, tree, folder / "series", pool)
        while waiting:
            tell_first()
        if whole:
            files = sorted(touched_lines(tree, BASE_REF))
            faults = upstream_hooks.run(tree, files, hooks, slow=True) + finish()
            print(*(["the series:", *faults] if faults else []), sep="\n  ")
            failed += ["the series"] if faults else []
    if failed:
        raise Problem(f"{len(failed)} of {len(chosen)} patches: {', '.join(failed)}")


class Alone:
    """Places each topic on the release with its needs, in the clone `tree`."""

    def __init__(self, base: Base, tree: Path) -> None:
        self.base, self.tree = base, tree
        self.series = commits(base.tree)
        self.release = git(tree, "rev-parse", BASE_REF).strip()
        self.repository = Repository(tree)
        self.words = words(tree, self.release)
        self.defined: dict[str, set[str]] = {}
        # The same, as (file, name).
        self.places: dict[str, set[tuple[str, str]]] = {}
        for name, commit in self.series.items():
            git(tree, "checkout", "-q", "--detach", commit)
            places = self.places[name] = {
                (file, word)
                for file, lines in touched_lines(tree).items()
                for word in names(tree, {file: lines}).defined - self.words
            }
            self.defined[name] = {word for _, word in places}

    def place(self, name: str) -> list[str]:
        """Check out a branch "check" with the topic on top; returns why it cannot."""
        root, series = self.base.root, list(self.series)
        wanted = with_needs(root, series, [name])
        done = stack(self.repository, self.release, self.series, wanted)
        if not done.conflicts:
            git(self.tree, "checkout", "-q", "-B", "check", done.head)
            return []
        more = also_needed(self.repository, self.release, root, self.series, name)
        return [
            f"{done.stopped_at} conflicts in {', '.join(done.conflicts)}; it applies "
            f"with {', '.join(more) or 'nothing more'}, too (topics.toml)"
        ]

    def missing(self, name: str, touched: dict[str, set[int]]) -> list[str]:
        """Names that the topic uses, only others define, and the tree lacks."""
        there = with_needs(self.base.root, list(self.series), [name])
        known = set[str]().union(*(self.defined[topic] for topic in there))
        others = {
            word: topic
            for topic in reversed(self.series)
            for word in self.defined[topic]
        }
        return [
            f"{where}: {word} is of {others[word]}, not among its needs (topics.toml)"
            for word, where in names(self.tree, touched).used.items()
            if word in others and word not in known
        ]

    def astray(self, name: str) -> list[str]:
        """Names that an earlier topic, not among its needs, defines in the same file:
        a line of one is likely to be in the other."""
        there = with_needs(self.base.root, list(self.series), [name])
        earlier = takewhile(lambda topic: topic != name, self.series)
        return [
            f"{file}: {word} is also of {topic}, not among its needs (topics.toml)"
            for topic in earlier
            if topic not in there
            for file, word in sorted(self.places[topic] & self.places[name])
            if word != Path(file).stem
        ]


def lint(tree: Path, touched: dict[str, set[int]]) -> list[str]:
    """What upstream's ruff and clang-format say about the touched lines."""
    python = [name for name in touched if name.endswith(".py")]
    faults = []
    if python:
        done = run(tree, "ruff", "check", "-q", "--output-format=json", *python)
        for fault in json.loads(done.stdout or "[]"):
            name = str(Path(fault["filename"]).relative_to(tree))
            span = range(fault["location"]["row"], fault["end_location"]["row"] + 1)
            if touched[name] & set(span):
                faults.append(f"{name}:{span[0]}: {fault['code']} {fault['message']}")
        diff = run(tree, "ruff", "format", "-q", "--diff", *python).stdout
        faults += [f"{n}:{r}: ruff format" for n, r in hunks(diff, touched)]
    for name in touched:
        if name.endswith((".cpp", ".h", ".cu", ".cuh")):
            ranges = [f"--lines={n}:{n}" for n in sorted(touched[name])]
            done = run(tree, "clang-format", "--dry-run", "-Werror", *ranges, name)
            faults += [s for s in done.stderr.splitlines() if ": error:" in s]
    return faults


def hunks(diff: str, touched: dict[str, set[int]]) -> list[tuple[str, int]]:
    """The hunks of a formatter's diff that change touched lines."""
    found, name = [], ""
    for line in diff.splitlines():
        if line.startswith("--- "):
            name = line.removeprefix("--- ").split("\t")[0]
        elif match := re.match(r"@@ -(\d+)(?:,(\d+))? ", line):
            start, count = int(match[1]), int(match[2] or 1)
            if touched.get(name, set()) & set(range(start, start + count)):
                found.append((name, start))
    return found


def syntax(tree: Path, touched: dict[str, set[int]]) -> list[str]:
    faults = []
    for name in touched:
        if name.endswith(".py"):
            try:
                compile((tree / name).read_bytes(), name, "exec")
            except SyntaxError as error:
                faults.append(f"{name}:{error.lineno}: {error.msg}")
    return faults


def undefined(tree: Path, touched: dict[str, set[int]]) -> list[str]:
    """New calls on self in touched files of what no file defines.

    No linter says so, nor mypy where a base class comes from torch."""
    faults = []
    for name in touched:
        if not name.startswith("vllm/") or not name.endswith(".py"):
            continue
        before = run_git(tree, "show", f"{BASE_REF}:{name}").stdout
        source = git(tree, "show", f"HEAD:{name}")
        called = called_on_self(source)
        for method in sorted(called - called_on_self(before)):
            defined = rf"\b(def|class) +{method}\b|\b{method}(:[^=]*)? = "
            grep = ("grep", "-qP", defined, "HEAD", "--", "vllm")
            if not re.search(defined, source) and run_git(tree, *grep).returncode:
                faults.append(f"{name}: self.{method}() is not defined")
    return faults


def called_on_self(source: str) -> set[str]:
    return {
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("self", "cls")
    }


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tools = Path(sys.executable).parent
    return subprocess.run(
        arguments,
        cwd=folder,
        env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


if __name__ == "__main__":
    command(main)

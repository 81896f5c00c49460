"""Check each patch in order, as a maintainer would.

It applies; upstream's ruff and clang-format pass on the lines it touches, and its
own hooks on the files; its Python compiles; what it calls on self is defined; and of
the tests it touches at least one fails without it and all pass with it, on the virtual
device. Tests that need kernels to compute are left out (expected.toml). On the whole
series all those tests run again, and upstream's mypy once.

With --alone, a patch is checked on the release with only what it needs by topics.toml,
merged three-way in the order of the series; no name that it uses may be missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from scripts import caches, upstream_hooks
from scripts.build_wheel import changed_members
from scripts.commands import Problem, command, locked, scratch
from scripts.merging import Repository
from scripts.names import names, words
from scripts.outcomes import chosen as tests_by_name
from scripts.outcomes import outcomes
from scripts.preloaded import Preloaded
from scripts.release import Base
from scripts.series import BASE_REF, apply, commits, git, run_git
from scripts.topics import also_needed, stack, with_needs

MEMORY = "16GiB"  # of the device
JOBS = 2
TEST_LIMIT = 1500
EXPECTED = "tests/vgpu/upstream/expected.toml"
Outcomes = Future[dict[str, str]]
# Waits for a patch's tests; returns what is wrong.
Finish = Callable[[], list[str]]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-tests", action="store_true", help="lint only")
    parser.add_argument("--alone", action="store_true", help="with what it needs only")
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
        for patch in patches if alone is None else chosen:
            faults, finish = [], no_tests
            if alone:
                faults = alone.place(patch.stem)
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
                if not args.no_tests:
                    place = folder / patch.stem
                    quick = args.first_failure and not args.patches
                    finish = own_tests(base, tree, touched, place, pool, quick)
            waiting.append((patch.name, faults, finish))
            while len(waiting) > JOBS:
                tell_first()
        while waiting:
            tell_first()
        if not args.patches and not alone:
            files = sorted(touched_lines(tree, BASE_REF))
            faults = upstream_hooks.run(tree, files, hooks, slow=True)
            if not args.no_tests:
                faults += series_tests(base, tree, folder / "series", pool)
            print(*(["the series:", *faults] if faults else []), sep="\n  ")
            failed += ["the series"] if faults else []
    if failed:
        raise Problem(f"{len(failed)} of {len(chosen)} patches: {', '.join(failed)}")


class Alone:
    """Places each topic on the release with what it needs, in the clone `tree`."""

    def __init__(self, base: Base, tree: Path) -> None:
        self.base, self.tree = base, tree
        self.series = commits(base.tree)
        self.release = git(tree, "rev-parse", BASE_REF).strip()
        self.repository = Repository(tree)
        self.words = words(tree, self.release)
        self.defined: dict[str, set[str]] = {}
        for name, commit in self.series.items():
            git(tree, "checkout", "-q", "--detach", commit)
            self.defined[name] = names(tree, touched_lines(tree)).defined - self.words

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


def touched_lines(tree: Path, since: str = "HEAD~") -> dict[str, set[int]]:
    """The lines of each file added or changed by HEAD's commit, or since another."""
    touched: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in git(tree, "diff", "-U0", "--no-renames", since, "HEAD").splitlines():
        if line.startswith("+++ "):
            lines = set()
            if line != "+++ /dev/null":
                touched[line.removeprefix("+++ b/")] = lines
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(match[1]), int(match[2] or 1)
            lines.update(range(start, start + count))
    return touched


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


def tests_of_series(base: Base) -> list[str]:
    """The tests that the whole series touches."""
    return tests_in(base.tree, touched_lines(base.tree, BASE_REF))


def tests_in(tree: Path, touched: dict[str, set[int]]) -> list[str]:
    return [
        f"{name}::{function}"
        for name, lines in touched.items()
        if name.startswith("tests/") and Path(name).name.startswith("test_")
        for function in touched_tests((tree / name).read_text(), lines)
    ]


class Testers:
    """Processes that run tests, and threads that wait for them."""

    def __init__(self, base: Base, count: int) -> None:
        self.base = base
        self.threads = ThreadPoolExecutor(max(count, 1))
        self.processes = queue.Queue[Preloaded]()
        for _ in range(count):
            python = interpreter(base)
            self.processes.put(Preloaded(python, base.root, MEMORY))

    def run(
        self, site: Path, tests: list[str], folder: Path, place: Path, *options: str
    ) -> Outcomes:
        """Begin to run tests of ``folder`` with the vLLM of ``site``.

        The result: outcome (passed, failed or skipped) by test name; caches and the
        report lie in ``place``. ``options`` are pytest's.
        """
        return self.threads.submit(self._run, site, tests, folder, place, options)

    def _run(
        self,
        site: Path,
        tests: list[str],
        folder: Path,
        place: Path,
        options: tuple[str, ...],
    ) -> dict[str, str]:
        place.mkdir(exist_ok=True)
        report, log = place / "report.xml", place / "log"
        paths = (site, self.base.root, folder / "tests/vllm_test_utils")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "VLLM_NO_USAGE_STATS": "1",
        }
        shelf = self.base.root / "build/kernels"
        environment = caches.environment(environment, place / "caches", shelf)
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        command += [f"--junitxml={report}", *tests_by_name(tests)]
        process = self.processes.get()
        try:
            process.run(command, folder, environment, log, TEST_LIMIT)
        finally:
            self.processes.put(process)
        if not report.is_file():
            raise Problem(f"pytest did not run:\n{log.read_text()[-4000:]}")
        functions = {test.partition("::")[2] for test in tests}
        return {
            name: "failed" if outcome == "error" else outcome
            for name, outcome in outcomes(report)
            if outcome == "error" or name.partition("[")[0] in functions
        }

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        while not self.processes.empty():
            self.processes.get().close()


@contextmanager
def testers(base: Base, count: int) -> Iterator[Testers]:
    """So many processes, in the environment of the release.

    Raises:
        Problem: it is missing.
    """
    if count:
        python = interpreter(base)
        # Each tree links to the bytecode of the files that it does not change.
        subprocess.run(
            [python, "-m", "compileall", "-q", f"-j{count}", f"{purelib(python)}/vllm"]
        )
    pool = Testers(base, count)
    try:
        yield pool
    finally:
        pool.close()


def no_tests() -> list[str]:
    return []


def own_tests(
    base: Base,
    tree: Path,
    touched: dict[str, set[int]],
    folder: Path,
    pool: Testers,
    quick: bool = False,
) -> Finish:
    """Begin to run the tests whose lines the patch touches, without it and with it;
    ``quick``: only without it, until one fails.

    Returns a function that waits for them, prints the outcomes and returns what is
    wrong.
    """
    tests = tests_in(tree, touched)
    if not tests:
        return lambda: ["it touches no test"]
    prepare(tree, folder / "run")
    known = listed(base)
    telling = [test for test in tests if test.rpartition("::")[2] not in known]
    ran = {}
    for when in ("HEAD~",) if quick else ("HEAD~", "HEAD"):
        git(tree, "checkout", "-q", "check" + when.removeprefix("HEAD"))
        site = overlay(base, tree, folder / f"site {when}")
        chosen, until = tests, []
        if quick and telling:
            chosen, until = telling, ["-x"]
        ran[when] = pool.run(site, chosen, folder / "run", site, *until)
    git(tree, "checkout", "-q", "check")

    def finish() -> list[str]:
        results = {when: future.result() for when, future in ran.items()}
        shutil.rmtree(folder)
        failed = failing(base, results["HEAD~"])
        missing = [] if failed else ["none of its tests fails without it"]
        if "HEAD" not in results:
            print(*(f"  {test}: failed without the patch" for test in failed), sep="\n")
            return missing
        for test, outcome in sorted(results["HEAD"].items()):
            before = results["HEAD~"].get(test, "not run")
            print(f"  {test}: {before} without the patch, {outcome} with it")
        if not results["HEAD"]:
            return ["none of its tests ran"]
        return unexpected(base, results["HEAD"]) + missing

    return finish


def series_tests(base: Base, tree: Path, folder: Path, pool: Testers) -> list[str]:
    """Run all tests that the series touches, with all of it: no topic breaks those of
    another."""
    prepare(tree, folder / "run")
    site = overlay(base, tree, folder / "site")
    parts: dict[tuple[Path, int], list[str]] = {}
    for number, test in enumerate(tests_in(tree, touched_lines(tree, BASE_REF))):
        folder_of = Path(test.partition("::")[0]).parent
        parts.setdefault((folder_of, number % 2), []).append(test)
    # Processes for each directory, as upstream's jobs have, of every other test: the
    # largest would take longer than all the others. It comes first.
    ran = [
        pool.run(site, part, folder / "run", folder / f"part {number}")
        for number, part in enumerate(sorted(parts.values(), key=len, reverse=True))
    ]
    results = {test: outcome for r in ran for test, outcome in r.result().items()}
    return [f"with the whole series, {fault}" for fault in unexpected(base, results)]


def prepare(tree: Path, folder: Path) -> None:
    """Put the tests of ``tree`` into ``folder``."""
    shutil.copytree(tree / "tests", folder / "tests")
    shutil.copy2(tree / "pyproject.toml", folder)


def interpreter(base: Base) -> Path:
    """That of the environment of the release.

    Raises:
        Problem: it is missing.
    """
    python = base.root / f".venv-vllm-{base.version}/bin/python"
    if not python.exists():
        raise Problem(f"{python.parent.parent.name} is missing: 'make vgpu' first.")
    return python


def purelib(python: Path) -> str:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([python, "-c", script], text=True).strip()


def unexpected(base: Base, results: dict[str, str]) -> list[str]:
    """Tests that do not pass, or pass although they need kernels to compute."""
    known = listed(base)
    return [
        f"{test}: {outcome}"
        for test, outcome in sorted(results.items())
        if (outcome == "passed") == (test.partition("[")[0] in known)
    ]


def failing(base: Base, results: dict[str, str]) -> list[str]:
    """Tests that fail, without those that always do."""
    known = listed(base)
    return [
        test
        for test, outcome in results.items()
        if outcome == "failed" and test.partition("[")[0] not in known
    ]


def listed(base: Base) -> set[str]:
    """Tests that need kernels to compute."""
    return set(tomllib.loads((base.root / EXPECTED).read_text())["needs_arithmetic"])


def overlay(base: Base, tree: Path, site: Path) -> Path:
    """The installed official vLLM with what ``tree`` changes, for PYTHONPATH."""
    installed = f"{purelib(interpreter(base))}/vllm"
    shutil.copytree(installed, site / "vllm", copy_function=os.link)
    members = changed_members(base, tree, os.uname().machine, site.parent)
    for name, content in members.items():
        (site / name).unlink(missing_ok=True)
        if content is not None:
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_bytes(content)
    return site


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tools = Path(sys.executable).parent
    return subprocess.run(
        arguments,
        cwd=folder,
        env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


def touched_tests(source: str, lines: set[int]) -> list[str]:
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        and lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    ]  # fmt: skip


if __name__ == "__main__":
    command(main)

"""Run the tests that a patch touches, without it and with it, on the virtual device.

Tests that need kernels to compute are left out (expected.toml).
"""

from __future__ import annotations

import ast
import os
import queue
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from scripts import caches
from scripts.build_wheel import changed_members
from scripts.commands import Problem
from scripts.junit import chosen as tests_by_name
from scripts.junit import outcomes
from scripts.preloaded import Preloaded
from scripts.release import Base
from scripts.series import BASE_REF, git, touched_lines

MEMORY = "16GiB"  # of the device
JOBS = 2
TEST_LIMIT = 1500
EXPECTED = "tests/vgpu/upstream/expected.toml"
Outcomes = Future[dict[str, str]]
# Waits for a patch's tests; returns the faults.
Finish = Callable[[], list[str]]


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
        kernels = self.base.root / "build/kernels"
        environment = caches.environment(environment, place / "caches", kernels)
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "scripts.forked_tests", *options]
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

    Returns a function that waits for them, prints the outcomes and returns the faults.
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


def series_tests(base: Base, tree: Path, folder: Path, pool: Testers) -> Finish:
    """Begin to run all tests that the series touches, with all of it: no topic breaks
    those of another.

    Returns a function that waits for them and returns the faults.
    """
    prepare(tree, folder / "run")
    site = overlay(base, tree, folder / "site")
    parts: dict[Path, list[str]] = {}
    for test in tests_in(tree, touched_lines(tree, BASE_REF)):
        parts.setdefault(Path(test.partition("::")[0]).parent, []).append(test)
    # A process for each directory, as upstream's jobs have, two for the largest. First
    # those of kernels, which Triton's interpreter computes: one test takes minutes.
    largest, *others = sorted(parts.values(), key=len, reverse=True) or [[]]
    each = [part for part in (largest[::2], largest[1::2], *others) if part]
    each.sort(key=lambda part: "/kernels/" not in part[0])
    ran = [
        pool.run(site, part, folder / "run", folder / f"part {number}")
        for number, part in enumerate(each)
    ]

    def finish() -> list[str]:
        results = {test: outcome for r in ran for test, outcome in r.result().items()}
        faults = unexpected(base, results)
        return [f"with the whole series, {fault}" for fault in faults]

    return finish


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


def touched_tests(source: str, lines: set[int]) -> list[str]:
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        and lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    ]  # fmt: skip

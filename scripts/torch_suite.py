"""Run PyTorch's own tests of memory on the virtual device; compare with a list.

TESTS is the folder test/ of PyTorch's sources at the tag of the installed torch (see
vgpu/README.md); the interpreter is that of torch. Each test runs in a process of its
own, with a device of its own. tests/vgpu/torch_suite.toml lists the expected failures,
and why. The status is 1 if another test fails, or one passes that is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.commands import REPOSITORY, Problem, command, write_whole
from vgpu import config
from vgpu.server import Server

LIST = REPOSITORY / "tests/vgpu/torch_suite.toml"
# "PyTorch": it fails on a card, too. "version" counts only where the files are of
# another release than torch.
CATEGORIES = ("arithmetic", "cuDNN", "absent", "fault", "PyTorch", "version")
# What tests download would come from elsewhere: nothing listens there.
NO_NETWORK = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
HOW = "vgpu/README.md says how to bring the files."


@dataclass(frozen=True)
class Run:
    """Tests of one file with one allocator.

    `settings` are the allocator's, given to the process when PyTorch's test modules are
    imported; with `environment` they stay set for what tests start.
    """

    name: str
    file: str
    tests: tuple[str, ...]
    settings: str = ""
    environment: bool = False
    devices: int = 1


@dataclass(frozen=True)
class Outcome:
    """Of a test, run/Class.method: passed, failed or skipped, and its output."""

    test: str
    outcome: str
    said: str = ""


@dataclass(frozen=True)
class Expected:
    """Tests that fail, and why: patterns of run/Class.method; without a run, of all."""

    tests: tuple[str, ...]
    category: str
    reason: str

    def covers(self, test: str) -> bool:
        return any(_matches(pattern, test) for pattern in self.tests)


@dataclass(frozen=True)
class Listed:
    """The list: the release of the files that it was made with, runs, and failures."""

    files: str
    torch: str
    runs: tuple[Run, ...]
    expected: tuple[Expected, ...]


def _matches(pattern: str, test: str) -> bool:
    return fnmatchcase(test, pattern if "/" in pattern else f"*/{pattern}")


def read_list(text: str) -> Listed:
    """Read the list.

    Raises:
        Problem: a category that does not exist, no reason, or a test in two entries.
    """
    data = tomllib.loads(text)
    expected = tuple(
        Expected(tuple(entry["tests"]), entry["category"], entry["reason"])
        for entry in data.get("expected", [])
    )
    seen = set[str]()
    for entry in expected:
        if entry.category not in CATEGORIES:
            raise Problem(
                f"there is no category {entry.category}: {', '.join(CATEGORIES)}."
            )
        if not entry.reason.strip():
            raise Problem(f"{', '.join(entry.tests)}: a reason is needed.")
        for pattern in entry.tests:
            if pattern in seen:
                raise Problem(f"{pattern} is listed twice.")
            seen.add(pattern)
    runs = tuple(
        Run(name, **{**table, "tests": tuple(table["tests"])})
        for name, table in data.get("runs", {}).items()
    )
    return Listed(data["files"], data["torch"], runs, expected)


def compare(
    outcomes: Iterable[Outcome],
    expected: Iterable[Expected],
    *,
    whole: bool = True,
    same_version: bool = True,
) -> tuple[Counter[str], list[str]]:
    """Counts by outcome, with failures by category, and what differs from the list.

    Args:
        whole: all tests that the list was made with were run: each entry has one.
        same_version: the files are of torch's release, which is no reason then.
    """
    entries = [e for e in expected if e.category != "version" or not same_version]
    counts, differences = Counter[str](), []
    matched = set[str]()
    for one in outcomes:
        covering = [e for e in entries if e.covers(one.test)]
        for entry in covering:
            matched.update(p for p in entry.tests if _matches(p, one.test))
        if one.outcome != "failed":
            counts[one.outcome] += 1
            if covering and one.outcome == "passed":
                differences.append(
                    f"{one.test} passes; expected to fail: {covering[0].reason}"
                )
        elif covering:
            counts[covering[0].category] += 1
        else:
            counts["unexpected"] += 1
            differences.append(f"{one.test} fails: {_last_line(one.said)}")
    if whole:
        listed = (p for e in entries for p in e.tests)
        differences += [
            f"{p} is listed; no such test ran" for p in listed if p not in matched
        ]
    return counts, differences


def _last_line(text: str) -> str:
    """The error of a traceback, without PyTorch's hint how to run the test."""
    text = text.partition("\nTo execute this test, run")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [
        i for i, line in enumerate(lines) if not line.startswith((" ", "Traceback"))
    ]
    return " ".join(lines[starts[0] :])[:300] if starts else text.strip()[-300:]


def checked(folder: Path, torch: str, other_version: bool) -> str:
    """The release of the test files.

    Raises:
        Problem: there are none, or they are of another release than torch.
    """
    if not (folder / "test_cuda.py").is_file():
        raise Problem(f"{folder} has no test_cuda.py: TESTS=<pytorch/test>. {HOW}")
    file = folder.parent / "version.txt"
    if not file.is_file():
        raise Problem(f"{file} is missing, which says the files' release. {HOW}")
    release = file.read_text().strip().partition("a")[0]
    if release != torch and not other_version:
        raise Problem(
            f"the tests are of PyTorch {release}, torch is {torch}. {HOW} "
            "OTHER_VERSION=1 runs them all the same."
        )
    return release


def run_all(folder: Path, run: Run, only: str, timeout: float) -> Iterable[Outcome]:
    """Each test of a run, in a process and on a device of its own."""
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as name:
        scratch = Path(name)
        base = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
        base |= NO_NETWORK
        base["PYTHONPATH"] = os.pathsep.join(
            (str(REPOSITORY), str(REPOSITORY / "build/torch-tests"))
        )
        given = {"PYTORCH_CUDA_ALLOC_CONF": run.settings} if run.settings else {}
        later = [] if run.environment or not run.settings else [run.settings]
        # Numba asks for a device when PyTorch's test modules look for it.
        server = Server(
            sys.executable,
            ["-numba", "scripts.torch_suite_imports"],
            base | given,
            _device(run),
        )

        def ask(what: str, *more: str) -> Any:
            answer, out, error = (scratch / n for n in ("answer", "out", "error"))
            answer.unlink(missing_ok=True)
            try:
                status = server.run(
                    _device(run),
                    [
                        str(REPOSITORY / "scripts/torch_suite_process.py"),
                        *(what, str(folder), run.file, str(answer), *more),
                    ],
                    folder=scratch,
                    environment=base | (given if run.environment else {}),
                    out=out,
                    error=error,
                    timeout=timeout,
                )
            except TimeoutError as late:
                return {"outcome": "failed", "said": str(late)}
            if answer.is_file():
                return json.loads(answer.read_text())
            said = error.read_text(errors="replace")[-2000:]
            said += f"\nthe process ended with {status}"
            return {"outcome": "failed", "said": said}

        try:
            tests = ask("list")
            if isinstance(tests, dict):
                raise Problem(f"{run.file}.py cannot be imported: {tests['said']}")
            for test in tests:
                whole = f"{run.name}/{test}"
                if only in whole and any(fnmatchcase(test, p) for p in run.tests):
                    yield Outcome(whole, **ask("run", test, *later))
        finally:
            server.close()


def _device(run: Run) -> config.Configuration:
    """A context that takes memory, as on a card, and streams that take time."""
    return config.load(
        memory="16GiB", context="400MiB", devices=run.devices, streams_behind=True
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tests", type=Path, required=True, help="PyTorch's folder test/"
    )
    parser.add_argument(
        "--only", default="", help="tests whose run/Class.method has this"
    )
    parser.add_argument("--other-version", action="store_true")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a test")


def main(args: argparse.Namespace) -> None:
    torch = version("torch").partition("+")[0]
    folder = args.tests.resolve()
    release = checked(folder, torch, args.other_version)
    listed = read_list(LIST.read_text())
    print(f"PyTorch {torch} with its tests of {release}")
    if (release, torch) != (listed.files, listed.torch):
        print(
            f"The list was made with tests of {listed.files} and PyTorch "
            f"{listed.torch}: a difference may be theirs."
        )
    report = args.root / "build/tests/torch-tests.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    began, outcomes = time.monotonic(), list[Outcome]()
    for run in listed.runs:
        if "/" in args.only and not args.only.startswith(f"{run.name}/"):
            continue
        for one in run_all(folder, run, args.only, args.timeout):
            outcomes.append(one)
            print(f"{len(outcomes):4} {one.test}: {one.outcome}", flush=True)
            write_whole(report, json.dumps([vars(o) for o in outcomes], indent=1))
    counts, differences = compare(
        outcomes,
        listed.expected,
        whole=not args.only and release == listed.files,
        same_version=release == torch,
    )
    print(table(counts), f"{time.monotonic() - began:.0f} s", *differences, sep="\n")
    if differences:
        raise Problem(f"{len(differences)} differences; what was said is in {report}.")


def table(counts: Mapping[str, int]) -> str:
    kinds = ("passed", "skipped", *CATEGORIES, "unexpected")
    return "\n".join(f"{kind:12} {counts[kind]:4}" for kind in kinds if counts[kind])


if __name__ == "__main__":
    command(main)

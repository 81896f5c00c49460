"""Run suites of tests one after the other, and say at the end what passed.

Each test is a line with its number and the number of all; the last lines are a table of
the suites and "total: N passed, N failed, N skipped".
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from scripts.commands import Problem, command
from scripts.junit import outcomes
from scripts.release import Base


@dataclass(frozen=True)
class Suite:
    """Tests of a folder, in the environment of the tools or of vLLM."""

    folder: str
    marked: str = ""
    tools: bool = False


SUITES = {
    "tools": Suite("tests/tools", tools=True),
    "gpu": Suite("tests/gpu", tools=True),
    "vgpu": Suite("tests/vgpu", "not full and not long"),
    "vgpu-all": Suite("tests/vgpu", "not long"),
    "vgpu-long": Suite("tests/vgpu", "long"),
    "topics": Suite("tests/vgpu/engine", "topic"),
    "sets": Suite("tests/vgpu/engine/test_sets.py", "not full and not long"),
    "device": Suite("tests/vgpu/device"),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "suites",
        nargs="+",
        metavar="SUITE[@RELEASE]",
        help=f"{' '.join(SUITES)}; RELEASE: of vLLM, or torch-VERSION",
    )


def main(args: argparse.Namespace) -> None:
    began = time.monotonic()
    rows, total = [], Counter[str]()
    for asked in args.suites:
        name, _, release = asked.partition("@")
        if name not in SUITES:
            raise Problem(f"there is no suite {name}: {', '.join(SUITES)}.")
        if SUITES[name].tools:
            environment = ".venv"
        elif release.startswith("torch-"):
            environment = f".venv-{release}"
        else:
            version = Base.load(args.root, release or args.base).version
            environment = f".venv-vllm-{version}"
        print(f"\n== {asked}: {SUITES[name].folder}", flush=True)
        start = time.monotonic()
        report = args.root / f"build/tests/{asked}.xml"
        counts = run(args.root, environment, SUITES[name], report)
        total += counts
        rows.append(f"{asked:16} {said(counts)}, {minutes(time.monotonic() - start)}")
    print(f"\n== {minutes(time.monotonic() - began)}", *rows, sep="\n")
    print(f"total: {said(total)}", flush=True)
    if total["failed"]:
        raise SystemExit(1)


def run(root: Path, environment: str, suite: Suite, report: Path) -> Counter[str]:
    """The number of tests by outcome; a run that ends early is a failure too."""
    report.unlink(missing_ok=True)
    done = subprocess.run(
        [root / environment / "bin/python", "-m", "pytest", "-v", "-n", "2",
         "--dist", "worksteal", "-o", "console_output_style=count", "--durations=25",
         "-m", suite.marked, f"--junitxml={report}", suite.folder],
        cwd=root,
    )  # fmt: skip
    counts = Counter[str]()
    if report.is_file():
        for _, outcome in outcomes(report):
            counts["failed" if outcome == "error" else outcome] += 1
    if done.returncode and not counts["failed"]:
        print(f"pytest ended with status {done.returncode}", file=sys.stderr)
        counts["failed"] += 1
    return counts


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "skipped"))


def minutes(seconds: float) -> str:
    return "{} min {} s".format(*divmod(round(seconds), 60))


if __name__ == "__main__":
    command(main)

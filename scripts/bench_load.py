"""Loads in the sleep-mode pool, official and ours in turn, on the virtual device.

For each case of sleep_load.py: what the device lends at most, as a multiple of what
tensors hold at most, on a device of 1.05 times that, and the time of the load as a
multiple of the official one's, on a device where nothing is short.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from series import Base, Problem, command

CASES = ("churn", "growing", "experts", "nvfp4", "dense")
SEGMENT = 2 << 20


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("cases", nargs="*", default=CASES)


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    python = base.root / f".venv-vllm-{base.version}/bin/python"
    ours = base.root / f"build/envelope-{base.version}"
    if not python.exists() or not ours.is_dir():
        raise Problem("'make vgpu envelope' first.")
    sites = {"official": "", "ours": str(ours)}

    def load(case: str, site: str, memory: int) -> dict[str, Any]:
        paths = [p for p in (sites[site], str(base.root)) if p]
        done = subprocess.run(
            [str(python), "-m", "vgpu", "--memory", str(memory), "--", str(python),
             str(Path(__file__).with_name("sleep_load.py")), case],
            cwd=base.root / "build",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True, text=True,
        )  # fmt: skip
        lines = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
        if not lines:
            raise Problem(f"{case}, {site}: no result.\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        return result

    print("| case | needed, MiB | official | peak/needed | ours | peak/needed | time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in args.cases:
        seconds: dict[str, list[float]] = {site: [] for site in sites}
        for _ in range(args.rounds):
            for site, times in seconds.items():
                ample = load(case, site, 80 << 30)
                times.append(ample["seconds"])
        needed = ample["needed"]  # of ours: the last
        row = [case, str(needed >> 20)]
        for site in sites:
            result = load(case, site, needed * 105 // 100 // SEGMENT * SEGMENT)
            row += [result["outcome"], f"{result['peak'] / needed:.3f}"]
        medians = [statistics.median(times) for times in seconds.values()]
        print("| " + " | ".join([*row, f"{medians[1] / medians[0]:.3f}"]) + " |")
        sys.stdout.flush()


if __name__ == "__main__":
    command(main)

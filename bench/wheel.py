"""Measure the time and memory of 'make wheel' with cached downloads."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import time

from scripts.commands import command, scratch
from scripts.release import Base, fetch

LIMITS = {"from a clean tree": 30.0, "unchanged": 2.0}


def main(args: argparse.Namespace) -> None:
    base = Base.load(args.root, args.base)
    arch = os.uname().machine
    official = fetch(base.wheel(arch), base.version)
    fetch(base.sdist, base.version)
    make = ["make", "-s", "-C", str(base.root), "wheel", f"BASE={base.version}"]
    print(f"stock wheel: {official.stat().st_size / 2**20:.1f} MiB")
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    with scratch(base.root / "build", "bench") as aside:
        base.tree.rename(aside / "vllm")
        for wheel in (base.root / "dist").glob(f"*{base.local_version}*{arch}.whl"):
            wheel.rename(aside / wheel.name)
        for name, limit in LIMITS.items():
            start = time.perf_counter()
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - start
            print(f"{name}: {seconds:.1f} s (goal {limit:.0f} s)")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    print(f"largest process: {peak:.0f} MiB (goal 1024 MiB)")


if __name__ == "__main__":
    command(main)

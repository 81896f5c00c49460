"""Measure the device: absolute times, and ratios that should stay near 1.

python -m vgpu bench [--pairs N] [--live N]

Runs itself on a device, with and without a timeline, and prints a table. Calls are
made through ctypes, whose own cost is measured and shown as well.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

KIB, MIB = 2**10, 2**20


class Calls:
    """malloc and free as bare functions."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.lib.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.lib.cudaFree.argtypes = [ctypes.c_void_p]
        self.slot = ctypes.c_void_p()
        self.where = ctypes.addressof(self.slot)

    def malloc(self, size: int) -> int:
        if self.lib.cudaMalloc(self.where, size):
            raise MemoryError(size)
        return self.slot.value or 0

    def free(self, address: int) -> None:
        if self.lib.cudaFree(address):
            raise ValueError(hex(address))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def pairs(calls: Calls, n: int, size: int) -> float:
    """Seconds for n pairs of malloc and free."""

    def work() -> None:
        for _ in range(n):
            calls.free(calls.malloc(size))

    return seconds(work)


def live(calls: Calls, n: int, size: int) -> tuple[float, float]:
    """Seconds to make n blocks that all live, and to free them in another order."""
    blocks: list[int] = []

    def fill() -> None:
        blocks.extend(calls.malloc(size) for _ in range(n))

    def drain() -> None:
        for address in [*blocks[::2], *blocks[1::2]]:
            calls.free(address)

    return seconds(fill), seconds(drain)


def measure(pair_count: int, live_count: int) -> None:
    calls = Calls()
    calls.free(calls.malloc(1))
    error = calls.lib.cudaGetErrorString

    def nothing() -> None:
        for _ in range(pair_count):
            error(0)
            error(0)

    overhead = seconds(nothing)
    print(f"  {pair_count} pairs of empty ctypes calls: {overhead:.2f} s")
    for name, size in (("2 MiB", 2 * MIB), ("4 KiB", 4 * KIB)):
        tenth = pairs(calls, pair_count // 10, size)
        whole = pairs(calls, pair_count, size)
        print(
            f"  {pair_count} pairs of {name}: {whole:.2f} s, "
            f"{1e6 * whole / pair_count:.2f} us each; per pair against a tenth "
            f"as many: {whole / tenth / 10:.2f}"
        )
    for name, size in (("2 MiB", 2 * MIB), ("4 KiB", 4 * KIB)):
        tenth_fill, tenth_drain = live(calls, live_count // 10, size)
        fill, drain = live(calls, live_count, size)
        print(
            f"  {live_count} live blocks of {name}: fill {fill:.2f} s, free "
            f"{drain:.2f} s; per block against a tenth as many: "
            f"{fill / tenth_fill / 10:.2f}, {drain / tenth_drain / 10:.2f}"
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m vgpu bench")
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=100_000)
    parser.add_argument("--on-device", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.on_device:
        measure(given.pairs, given.live)
        return 0
    counts = ["--pairs", str(given.pairs), "--live", str(given.live)]
    for timeline in (False, True):
        print(f"timeline {'on' if timeline else 'off'}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timeline.jsonl"
            options = ["--timeline", str(path)] if timeline else []
            command = [sys.executable, "-m", "vgpu", "--memory", "256GiB", *options]
            command += ["--", sys.executable, "-m", "vgpu", "bench", "--on-device"]
            if status := subprocess.run([*command, *counts]).returncode:
                return status
            if timeline:
                print(f"  the timeline is {path.stat().st_size / MIB:.0f} MiB")
    return 0

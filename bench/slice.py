"""Test a library that slices a GPU, as HAMi-core does: it is preloaded, and programs,
PyTorch's allocators and engines take as much of a virtual device as they can get.

Prints the figure of each source, and a row per program: the process's peak, and
whether that stayed within the slice and was refused as memory is (CUDA's error 2).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.scenarios.result import read_result
from bench.scenarios.slice_allocates import ALLOCATORS, OUT_OF_MEMORY, WAYS
from bench.virtual import HOOKS, SITES, environment_of
from scripts import caches
from scripts.commands import Problem, command
from scripts.release import Base
from vgpu.config import parse_size

MIB, GIB = 2**20, 2**30
DEVICE = {"memory": "8GiB", "context": "400MiB"}
NEIGHBOUR = GIB
ENGINES: dict[str, dict[str, Any]] = {
    "engine": {"graphs": True},
    "engine, sleep mode": {"sleep": 1},
    "engine beside a neighbour": {"neighbour": NEIGHBOUR},
}
# Of the series alone.
OURS: dict[str, dict[str, Any]] = {
    "engine, extensible KV cache": {
        "graphs": True,
        "llm": {"enable_extensible_kv_cache": True},
    },
    "engine, a limit in bytes": {
        "llm": {"gpu_memory_limit_bytes": 3 * GIB, "gpu_memory_utilization": 1.0}
    },
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--library", type=Path, required=True, help="to be preloaded")
    parser.add_argument("--size", default="4GiB", help="of the slice")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--device", action="append", default=[], metavar="KEY=VALUE")


def main(args: argparse.Namespace) -> None:
    base, size = Base.load(args.root, args.base), parse_size(args.size)
    library = args.library.resolve()
    if not library.is_file():
        raise Problem(f"there is no library {library}: HAMI=<path to libvgpu.so>.")
    device = DEVICE | dict(each.split("=", 1) for each in args.device)
    rows, broken = [], 0
    for name, site, scenario, case in programs():
        if args.only not in name:
            continue
        result = below(base, library, size, device, site, scenario, case)
        if scenario == "slice_allocates":
            says(name, result)
        held, what = judged(result, size, case)
        broken += what != "holds"
        rows.append(f"| {name} | {site} | {mib(held)} | {what} |")
        print(f"{len(rows)}: {name} {site}: {what}", file=sys.stderr, flush=True)
    print("\n| program | vLLM | held at most, MiB | |\n| --- | --- | --- | --- |")
    print(*rows, sep="\n")
    print(f"\n{len(rows) - broken} of {len(rows)} hold within {mib(size)} MiB.")


def programs() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Name, site, scenario and case of each row."""
    for how in (*WAYS, *ALLOCATORS):
        yield how, "", "slice_allocates", {"how": how}
    beside = {"how": "cudaMalloc", "neighbour": NEIGHBOUR}
    yield "cudaMalloc beside a neighbour", "", "slice_allocates", beside
    # Nothing is left, and a second process makes its context.
    late = {"how": "cudaMalloc", "late": 2 * MIB}
    yield "a second process that starts late", "", "slice_allocates", late
    for name, case in ENGINES.items():
        for site in SITES:
            yield name, site, "start", case
    for name, case in OURS.items():
        yield name, "envelope", "start", case


def below(
    base: Base,
    library: Path,
    size: int,
    device: Mapping[str, str],
    site: str,
    scenario: str,
    case: dict[str, Any],
) -> dict[str, Any]:
    """The result of the scenario; "ended" says how it ended if it printed none."""
    python, ours = environment_of(base)
    if scenario == "start":
        # Without FlashInfer; the request is all that the slice has.
        llm = {"gpu_memory_utilization": 0.6} | case.get("llm", {})
        case = {"generate": 2} | case | {"llm": llm}
    paths = [*([ours] if site == "envelope" else []), base.root]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kernels = base.root / "build/kernels"
        environment = caches.environment(
            {"PYTHONPATH": ":".join(map(str, paths))}, Path(folder), kernels
        )
        environment |= slice_of(library, size, Path(folder))
        if allocator := ALLOCATORS.get(case.get("how", "")):
            environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
        # Behind the launcher, whose own process needs no slice.
        preload = 'export LD_PRELOAD="$0:$LD_PRELOAD"; exec "$@"'
        done = subprocess.run(
            [python, "-m", "vgpu", f"--config={HOOKS}",
             *(f"--set={key}={value}" for key, value in device.items()), "--",
             "sh", "-c", preload, library,
             python, "-m", f"bench.scenarios.{scenario}", json.dumps(case)],
            cwd=folder, env=os.environ | environment, capture_output=True, text=True,
            errors="replace", timeout=600,
        )  # fmt: skip
    for line in reversed(done.stdout.splitlines()):
        if (result := read_result(line)) is not None:
            return result
    print(done.stderr[-1500:], file=sys.stderr)
    return {"ended": f"no result, status {done.returncode}"}


def slice_of(library: Path, size: int, folder: Path) -> dict[str, str]:
    """Variables that tell HAMi-core and tests/vgpu/device/slice.c of a slice."""
    return {
        "CUDA_DEVICE_MEMORY_LIMIT": f"{size // MIB}m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(folder / "cache"),
        "CUDA_REDIRECT": str(library),
        "LIBCUDA_LOG_LEVEL": "0",
        "SLICE_BYTES": str(size),
        "SLICE_FILE": str(folder / "slice"),
    }


def judged(result: dict[str, Any], size: int, case: dict[str, Any]) -> tuple[int, str]:
    """The peak, and whether the slice held."""
    if "ended" in result:
        return 0, str(result["ended"])
    if "outcome" in result:
        held = int(result.get("process_peak", 0)) + int(result.get("before", 0))
        if result["outcome"] != "started":
            return held, f"{result['outcome']}: {result['error'][:160]}"
        limit = min(case.get("llm", {}).get("gpu_memory_limit_bytes", size), size)
        limit -= case.get("neighbour", 0)
        return held, "holds" if held <= limit else f"takes {mib(held - limit)} MiB more"
    held = result["held"]
    if result["refused"] != OUT_OF_MEMORY:
        return held, f"ends with {result['refused']}"
    seen = max(result[when]["run"] for when in ("full", "beside") if when in result)
    if seen > size:
        return held, f"all its processes take {mib(seen - size)} MiB more"
    return held, "holds"


def says(name: str, result: dict[str, Any]) -> None:
    """A table of the sources' figures, where they could be asked."""
    if "first" not in result:
        return
    print(f"\n{name}, in MiB:\n\n| | truth | mem_get_info | properties | NVML |")
    print("| --- | --- | --- | --- | --- |")
    for when in "first", "full", "beside":
        if when not in result:
            continue
        said = result[when]
        cells = [f"{mib(said['held'])} of {mib(said['run'])} held"]
        for source in "mem_get_info", "properties", "NVML":
            cells.append(
                ", ".join(
                    f"{key} {value if key == 'error' else mib(value)}"
                    for key, value in said[source].items()
                )
            )
        print(f"| {when} | " + " | ".join(cells) + " |")


def mib(size: int | list[int]) -> str:
    if isinstance(size, list):
        return " + ".join(map(mib, size)) or "none"
    return f"{size / MIB:.0f}"


if __name__ == "__main__":
    command(main)

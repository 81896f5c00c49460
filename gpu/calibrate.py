"""Measure a GPU for the virtual device, and compare the predictions.

    make calibrate                                     # this checkout, this machine
    python3 -m gpu.calibrate --bundle FILE.tar.xz  # elsewhere: docs/on-a-gpu.md
    python3 -m gpu.calibrate --starts FILE.json    # its starts again, on such a GPU
    python3 -m gpu.calibrate --predict FILE.json   # the prediction alone, anywhere

Measures the driver's memory (probe.py), writes it as a profile for vgpu/, starts
engines on the GPU, starts them again on the virtual device with that profile, and
writes both as results/calibration-GPU-DATE-VLLM.json. A whole GPU, otherwise idle,
is needed; the prediction needs a C compiler and no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from gpu.builds import Builds
from gpu.card import Card, CardError
from gpu.probe import STACK
from gpu.suite import command_line, file_name, prepare, survey, write
from scripts.commands import REPOSITORY, Problem, command

LIMIT = 400.0
# The measured figures that the profile can hold, and their meaning.
PARAMETERS = {
    "context": "a context, when a process first uses the device",
    "cublas_handle": "a cuBLAS handle and its first products, less PyTorch's workspace",
    "module": "a module of one small Triton kernel",
    "graph": "an instantiated and launched graph",
    "graph_node": "each kernel node of it",
    "malloc_block": "the unit of cudaMalloc",
    "vmm_granularity": "the unit of the virtual memory calls",
}
PROPERTIES = (
    "sm_count",
    "clock_khz",
    "memory_clock_khz",
    "bus_bits",
    "l2_bytes",
    "shared_optin",
    "shared_per_sm",
)
STARTS: dict[str, dict[str, Any]] = {
    name: {"model": name, "graphs": True, "llm": {"gpu_memory_utilization": 0.5}}
    for name in ("large dense", "large moe")
}
SMALL = {"dense": STARTS["large dense"] | {"model": "dense"}}
# Of the GPU's total memory; the KV cache's is of its own size.
GOAL, KV_CACHE_GOAL = 0.01, 0.02


def profile(
    gpu: dict[str, Any], properties: dict[str, Any], measured: dict[str, Any], head: str
) -> str:
    """The text of vgpu/profiles/NAME.toml: measured figures, and those that were
    not."""
    lines = [
        f"# {gpu['name']}, measured by gpu/calibrate.py: {head}.",
        f"name = {json.dumps(gpu['name'])}",
        f"memory = {properties['memory']}",
        f"nvml_total = {properties['nvml_total']}",
        f"compute_capability = {json.dumps(gpu['compute_capability'])}",
        *(["integrated = true"] if properties["integrated"] else []),
        *(f"{key} = {properties[key]}" for key in PROPERTIES),
    ]
    for key, meaning in PARAMETERS.items():
        if key in measured:
            lines += [f"# measured: {meaning}", f"{key} = {measured[key]}"]
        else:
            lines.append(f"# not measured: {key}, {meaning}")
    if (taken := measured.get("stack")) is not None:
        lines += [
            f"# measured: {taken} bytes for a kernel with a stack of {STACK} bytes",
            f"local_memory = {json.dumps(taken > 0)}",
        ]
    if "kernels" in measured:
        lines.append(
            f"# measured, {measured['kernels']} bytes, not charged: first kernels of a "
            "start, after its request"
        )
    nccl = measured.get("nccl")
    known = "not measured" if nccl is None else f"measured, {nccl} bytes"
    lines += [
        f"# {known}: NCCL's buffers for one rank; nccl_communicator is of several",
        "# not measured: vmm_handle_offset",
    ]
    return "\n".join(lines) + "\n"


def measure(builds: Builds, folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Bytes by what takes them, and why others could not be measured."""
    measured: dict[str, int] = {}
    failed: dict[str, str] = {}
    for what in ("driver", "kernels", "nccl"):
        found = builds.run("gpu.probe", [what], "unpatched", folder, LIMIT)
        if "outcome" in found:
            failed[what] = found["error"]
        else:
            measured |= found
    return measured, failed


def start(builds: Builds, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    return builds.run(
        "bench.scenarios.start", [json.dumps(case)], "patched", folder, LIMIT
    )


def start_again(content: dict[str, Any], builds: Builds, folder: Path) -> None:
    """Start the engines of an earlier result on this machine's GPU.

    Raises:
        Problem: it is another GPU, or a slice.
    """
    gpu = survey()[1]["gpu"]
    for key in ("name", "memory", "driver", "share"):
        if gpu[key] != content["gpu"][key]:
            raise Problem(
                f"a GPU whose {key} is {content['gpu'][key]} is needed, "
                f"as in the result; found {gpu[key]}."
            )
    for entry in content["starts"].values():
        entry["card"] = start(builds, entry["case"], folder)
    content["started again"] = command_line()
    content["versions"] = builds.installed() | {"vllm": builds.versions["patched"]}


def predict(builds: Builds, content: dict[str, Any], folder: Path) -> None:
    """Start the same engines on the virtual device of that profile."""
    device = folder / "device.toml"
    other = f"other = {content['other']}\n"
    device.write_text(content["profile"] + other)
    virtual = builds.on_device(device)
    for entry in content["starts"].values():
        entry["predicted"] = start(virtual, entry["case"], folder)
    content["predicted with"] = builds.installed() | {
        "vllm": builds.versions["patched"]
    }


def compare(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The virtual device's figures next to the GPU's, and whether the goal is met."""
    total = content["gpu"]["memory"]
    rows = []
    for name, entry in content["starts"].items():
        card, predicted = (
            figures(entry.get(side, {})) for side in ("card", "predicted")
        )
        for figure, found in card.items():
            goal = KV_CACHE_GOAL * found if figure == "kv_cache" else GOAL * total
            row = {"model": name, "figure": figure, "card": found, "goal": int(goal)}
            if figure in predicted:
                row["predicted"] = predicted[figure]
                row["met"] = abs(predicted[figure] - found) <= goal
            rows.append(row)
    return rows


def figures(start: dict[str, Any]) -> dict[str, Any]:
    """With memory that the driver took after the request: its use minus PyTorch's."""
    found = dict(start.get("memory", {}))
    if found and "before_request" in start:
        outside = start["used"] - start["reserved"]
        found["driver_after_request"] = outside - start["before_request"]
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", type=Path, help="what 'make bundle' wrote")
    parser.add_argument("--out", type=Path, help="folder (default: results/)")
    parser.add_argument("--predict", type=Path, help="an earlier result to complete")
    parser.add_argument(
        "--starts", type=Path, help="an earlier result whose starts are done again"
    )
    parser.add_argument(
        "--no-predict", action="store_true", help="only measure and start on the GPU"
    )
    parser.add_argument("--small", action="store_true", help="a small model only")


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if earlier := args.starts or args.predict:
            try:
                content = json.loads(earlier.read_text())
            except (OSError, ValueError) as error:
                raise Problem(f"{earlier} is no result: {error}") from None
            target = (args.out or earlier.parent) / earlier.name
            builds = prepare(args, folder / "builds")
            if args.starts:
                start_again(content, builds, folder)
                write(target, content)
        else:
            content, target, builds = on_card(args, folder)
        if not args.no_predict:
            predict(builds, content, folder)
            write(target, content)
    for row in compare(content):
        print(row)
    print(target)


def on_card(
    args: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], Path, Builds]:
    """Measure and start engines on this machine's GPU; keep it as a result.

    Raises:
        Problem: there is no GPU, or only a slice of one.
    """
    try:
        machine, described = survey()
        card = Card()
    except CardError as error:
        raise Problem(f"{error}. Run this on a machine with an NVIDIA GPU.") from None
    if machine.share:
        raise Problem(f"a whole GPU is needed, not a slice: found {machine.share}.")
    if machine.virtual and not args.out:
        raise Problem("this is the virtual device: --out FOLDER is needed.")
    builds = prepare(args, folder / "builds")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured, failed = measure(builds, folder)
    if "context" not in measured:
        raise Problem(f"the driver could not be measured: {failed['driver']}")
    versions = builds.installed()
    gpu = described["gpu"]
    head = f"{date}, driver {gpu['driver']}, torch {versions['torch']}"
    properties = card.driver.properties()
    properties |= {"memory": machine.total, "nvml_total": card.nvml_total()}
    content = {
        "kind": "calibration",
        "date": date,
        **described,
        "versions": versions | {"vllm": builds.versions["patched"]},
        "command": command_line(),
        "measured": measured,
        "not measured": failed,
        # Memory of the driver, or a desktop, before.
        "other": max(0, machine.total - machine.free - measured["context"]),
        "profile": profile(gpu, properties, measured, head),
        "starts": {
            name: {"case": case, "card": start(builds, case, folder)}
            for name, case in (SMALL if args.small else STARTS).items()
        },
    }
    out = args.out or args.root / "results"
    name = file_name(gpu["name"], date, builds.versions["unpatched"])
    target = out / f"calibration-{name}"
    write(target, content)
    profiles = args.out or args.root / "vgpu/profiles"
    (profiles / f"{profile_name(gpu['name'])}.toml").write_text(content["profile"])
    return content, target, builds


def profile_name(gpu: str) -> str:
    """That of the profile which has this GPU's name, else a new one."""
    for path in sorted((REPOSITORY / "vgpu/profiles").glob("*.toml")):
        if tomllib.loads(path.read_text()).get("name") == gpu:
            return path.stem
    return file_name(gpu, "", "").removesuffix("--.json")


if __name__ == "__main__":
    command(main)

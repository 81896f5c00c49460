"""Write docs/data/gpu.md from results/*.json; --check says if it is up to date."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.builds import VLLMS
from gpu.calibrate import GOAL, KV_CACHE_GOAL, compare
from scripts.commands import Problem, command, write_whole

PAGE = "docs/data/gpu.md"
HEAD = """\
# On a GPU

Generated from `results/` by `make results-page`; [on-a-gpu.md](../on-a-gpu.md) says how
a result is made. Sizes are bytes unless a unit is given.
"""
NONE = "\nNo results yet: nothing here has run on a GPU.\n"
# Figures worth a line of their own, by where a result has them.
FIGURES = {
    "outcome": "outcome",
    "peak": "peak",
    "needed": "the most that tensors hold",
    "ms_per_step": "time per step, ms",
    "tokens_per_second": "tokens per second",
}


def page(folder: Path) -> str:
    """The page of the results in a folder, the newest first: by date, then by name.
    A case that ran again is shown once.

    Raises:
        Problem: a file there is no result.
    """
    text = HEAD
    results = sorted(folder.glob("*.json"), key=lambda p: p.name)
    contents = [(path, read(path)) for path in results]
    contents.sort(key=lambda entry: (entry[1]["date"], entry[0].name), reverse=True)
    shown: dict[tuple[str, ...], str] = {}
    for path, content in contents:
        lines = heading(path, content)
        if content.get("kind") == "calibration":
            described = calibration(content)
        else:
            described = suite(content, path.name, shown)
        text += "\n" + "\n".join([*lines, *described]) + "\n"
    # Results name the builds unpatched and patched.
    return text.replace("unpatched", "stock") if contents else text + NONE


def read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        virtual = content["gpu"]["virtual"]
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(
            f"{path} is no result of gpu/suite.py or calibrate.py: {error!r}"
        ) from (None)
    if virtual:
        raise Problem(f"{path} was made on the virtual device: results/ is for GPUs.")
    return content


def heading(path: Path, content: dict[str, Any]) -> Iterator[str]:
    gpu, host = content["gpu"], content["host"]
    what = "Calibration" if content.get("kind") == "calibration" else "Suite"
    yield f"## {what}: {gpu['name']}, {content['date']}"
    yield ""
    share = f" A slice, by {gpu['share']}." if gpu["share"] else ""
    versions = ", ".join(f"{k} {v}" for k, v in content["versions"].items())
    yield (
        f"{gpu['memory']} bytes, compute capability {gpu['compute_capability']}, "
        f"driver {gpu['driver']}; {host['cpus']} CPUs.{share} {versions}. "
        f"[{path.name}](../../results/{path.name})"
    )
    yield ""
    yield f"    {content['command']}"
    yield ""


def suite(
    content: dict[str, Any], name: str, shown: dict[tuple[str, ...], str]
) -> Iterator[str]:
    """`shown` has, by GPU, release and case, the newer result with it."""
    cases = content["cases"]
    of = content["gpu"]["name"], content["versions"].get("unpatched vllm", "")
    yield f"{len(cases)} cases in {content['seconds']} s."
    for case, entry in cases.items():
        yield ""
        yield f"### {case}"
        yield ""
        if newer := shown.get((*of, case)):
            yield f"Ran again: {newer}."
            continue
        # A scenario that asked for the virtual device's counters did not run.
        faults = (entry.get(vllm, {}).get("outcome") == "VgpuError" for vllm in VLLMS)
        why = "its scenario failed, see the file" if any(faults) else ""
        if why := entry.get("not run", why):
            yield f"Not run: {why}."
            continue
        shown[*of, case] = name
        yield "| wanted | found | holds |"
        yield "| --- | --- | --- |"
        for check in entry["checks"]:
            holds = "yes" if check["holds"] else "**no**"
            yield f"| {check['wanted']} | {cell(check['found'])} | {holds} |"
        yield ""
        yield from side_by_side(*(figures(entry[vllm]) for vllm in VLLMS))


def figures(result: dict[str, Any]) -> dict[str, Any]:
    found = {label: result[key] for key, label in FIGURES.items() if key in result}
    if "results" in result:
        found |= result["results"][0]
    for group, label in (
        ("memory", "memory: "),
        ("sleep", "sleep: "),
        ("seconds", "seconds: "),
    ):
        if isinstance(result.get(group), dict):
            found |= {label + key: value for key, value in result[group].items()}
    if "report" in result:
        outside = result["report"]["in_use"]["outside_torch"]
        found["memory outside of PyTorch, graphs' aside"] = outside
    for key in ("passed", "failed", "skipped"):
        if key in result:
            found[key] = len(result[key])
    return found


def side_by_side(unpatched: dict[str, Any], patched: dict[str, Any]) -> Iterator[str]:
    yield "| figure | unpatched | patched |"
    yield "| --- | --- | --- |"
    for key in dict.fromkeys([*unpatched, *patched]):
        yield f"| {key} | {cell(unpatched.get(key))} | {cell(patched.get(key))} |"


def calibration(content: dict[str, Any]) -> Iterator[str]:
    yield "| what the driver takes | bytes |"
    yield "| --- | --- |"
    for what, size in content["measured"].items():
        yield f"| {what} | {size} |"
    for what, why in content["not measured"].items():
        yield f"| {what} | not measured: {cell(why.splitlines()[-1])} |"
    yield ""
    with_ = content.get("predicted with")
    if with_:
        versions = ", ".join(f"{k} {v}" for k, v in with_.items())
        yield f"Predicted by the virtual device with this profile, {versions}."
    else:
        yield "Not predicted yet."
    yield (
        f"The goal: within {GOAL:.0%} of the GPU's memory, the KV cache within "
        f"{KV_CACHE_GOAL:.0%} of its own size."
    )
    yield ""
    yield "| model | figure | GPU | virtual device | difference | goal | met |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in compare(content):
        start = f"| {row['model']} | {row['figure']} | {row['card']} "
        if "predicted" not in row:
            yield start + f"| - | - | {row['goal']} | - |"
            continue
        difference = row["predicted"] - row["card"]
        met = "yes" if row["met"] else "**no**"
        yield start + f"| {row['predicted']} | {difference} | {row['goal']} | {met} |"


def cell(value: Any) -> str:
    """One cell of a table."""
    if value is None:
        return "-"
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")[:300]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing")


def main(args: argparse.Namespace) -> None:
    path = args.root / PAGE
    text = page(args.root / "results")
    if path.is_file() and path.read_text() == text:
        return
    if args.check:
        raise Problem(f"{PAGE} is not what results/ gives: 'make results-page'.")
    write_whole(path, text)
    print(path)


if __name__ == "__main__":
    command(main)

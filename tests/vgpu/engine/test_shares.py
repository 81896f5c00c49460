"""The matrix of devices in shares.toml, to the byte, official and ours."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.engine.harness import run
from vgpu.config import signed_size

CASES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("shares.toml").read_text()
)
DEVICES_OF_A_RUN = 16
RUNS: dict[str, dict[str, Any]] = {
    "": {},
    "reversed": {"visible": "MIG-a0000000-0000-0000-0000-000000000003,1,0"},
    "no NVML": {"nvml": "absent", "platform": "NonNvmlCudaPlatform"},
}
COMMON = {
    "total": "24576MiB",
    "free": "24512MiB",
    "consumed": "1GiB",
    "total_before_cuda": "24576MiB",
}


def batches(vllm: str) -> Iterator[tuple[str, list[str]]]:
    """The names of the cases of each process."""
    for process in RUNS:
        names = [
            name
            for name, case in CASES.items()
            if case.get("run", "") == process
            and (vllm == "envelope" or "limit" not in case)
        ]
        for i in range(0, len(names), DEVICES_OF_A_RUN):
            yield process, names[i : i + DEVICES_OF_A_RUN]


def size(value: object) -> int:
    return signed_size(value, "shares.toml")


def expected(name: str, vllm: str) -> dict[str, Any]:
    case = CASES[name]
    wanted = COMMON | case.get("both", {})
    if vllm == "official":
        wanted |= case.get("official", {})
    else:
        wanted |= case.get("ours", {})
    for key, value in wanted.items():
        if key != "error" and value != "host" and "Error" not in str(value):
            wanted[key] = size(value)
    if "error" not in wanted and "requested" not in wanted:
        wanted["requested"] = math.ceil(wanted["total"] * case.get("utilization", 0.9))
    return wanted


def observe(
    process: str, names: list[str], vllm: str, folder: Path
) -> list[dict[str, Any]]:
    settings = RUNS[process]
    tables = ""
    for i, name in enumerate(names):
        device = {"memory": "24GiB"} | CASES[name].get("device", {})
        if "profile" in device:
            del device["memory"]
        lines = [f"{k} = {json.dumps(v)}" for k, v in device.items()]
        tables += "\n".join([f"[device.{i}]", *lines, ""])
        for call in CASES[name].get("refused", []):
            tables += (
                f'[[inject]]\ncall = "{call}"\ndevice = {i}\n'
                'error = "NoPermission"\ntimes = 1000\n'
            )
    cases = []
    for name in names:
        case = {"utilization": 0.9} | CASES[name]
        asked = {k: case[k] for k in ("utilization", "moved") if k in case}
        if "limit" in case:
            asked["limit"] = size(case["limit"])
        cases.append(asked)
    if process == "reversed":
        cases.reverse()
    top: dict[str, object] = {"devices": len(names)}
    if "nvml" in settings:
        top["nvml"] = settings["nvml"]
    found = run(
        "shares",
        {"cases": cases, "platform": settings.get("platform")},
        vllm=vllm,
        device=top,
        hooks=tables,
        folder=folder,
        visible=settings.get("visible"),
    )
    results: list[dict[str, Any]] = found["results"]
    return results[::-1] if process == "reversed" else results


@pytest.mark.topic
@pytest.mark.parametrize(
    ("vllm", "process", "names"),
    [
        pytest.param(vllm, process, names, id=f"{vllm}-{names[0]}")
        for vllm in ("official", "envelope")
        for process, names in batches(vllm)
    ],
)
def test_share_of_a_device(
    vllm: str, process: str, names: list[str], tmp_path: Path
) -> None:
    found = observe(process, names, vllm, tmp_path)
    differences = {}
    for name, result in zip(names, found, strict=True):
        wanted = expected(name, vllm)
        if "error" in wanted and wanted["error"] in result.get("error", ""):
            wanted["error"] = result["error"]
        host = {key for key, value in wanted.items() if value == "host"}
        differs = {
            key: (wanted.get(key), result.get(key))
            for key in (wanted.keys() | result.keys()) - host
            if wanted.get(key) != result.get(key)
        }
        if differs:
            differences[name] = differs
    assert not differences, json.dumps(differences, indent=1)

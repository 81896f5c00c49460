"""A worker's memory report as a bar: the drawn sizes are the reported ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.project import module

MIB = 1 << 20
REPORT = {
    "device": "cuda:0",
    "total": 1000 * MIB,
    "free_before": 800 * MIB,
    "held_before": 150 * MIB,
    "requested": 600 * MIB,
    "in_use": {"weights": 100 * MIB, "kv_cache": 300 * MIB, "other_torch": 0},
    "set_aside": {"peak_activations": 80 * MIB, "multimodal_reserve": None},
}


def draw(folder: Path, content: str) -> subprocess.CompletedProcess[str]:
    path = folder / "report.json"
    path.write_text(content)
    return module("bench.memory_picture", path)


@pytest.mark.parametrize("left", [120 * MIB, -20 * MIB])
def test_bar_is_the_device(left: int, tmp_path: Path) -> None:
    report = json.loads(json.dumps(REPORT))
    report["in_use"]["other_torch"] = 120 * MIB - left
    done = draw(tmp_path, json.dumps(report | {"left": left}))
    assert done.returncode == 0, done.stderr
    svg = ElementTree.parse(tmp_path / "report.svg").getroot()
    bar = [e for e in svg if e.get("stroke") == "white" and e.get("height") == "70"]
    sizes = [50, 150, 100, 300, (120 * MIB - left) / MIB, 80, max(left, 0) / MIB]
    sizes.append(1000 - sum(sizes))
    per_mib = 860 / 1000
    widths = [float(e.attrib["width"]) for e in bar]
    assert widths == pytest.approx([s * per_mib for s in sizes if s], abs=0.06)
    texts = [e.text for e in svg if e.tag.endswith("text")]
    assert "requested: 600.0 MiB" in texts and f"{left / MIB:,.1f} MiB" in texts


@pytest.mark.parametrize("content", ["{}", "no JSON"])
def test_anything_else_is_refused(content: str, tmp_path: Path) -> None:
    done = draw(tmp_path, content)
    assert done.returncode == 1
    assert "as VLLM_STARTUP_MEMORY_REPORT writes it is wanted" in done.stderr
    assert not (tmp_path / "report.svg").exists()

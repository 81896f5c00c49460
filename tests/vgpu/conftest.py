"""Tests on the virtual CUDA device; with .venv-vllm-<release>."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tests/vgpu/engine"
for folder in (ENGINE / "scenarios", ENGINE, ROOT / "scripts", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("vgpu.pytest_plugin")

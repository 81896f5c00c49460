"""Tests on the virtual CUDA device; with .venv-vllm-<release>."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("vgpu.pytest_plugin")

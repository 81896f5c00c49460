"""Tests on the virtual CUDA device; with .venv-vllm-<release>."""

from pathlib import Path

import pytest

from tests.vgpu.device import slicing


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("vgpu.pytest_plugin")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that a user preloads on a slice."""
    return slicing.compiled(tmp_path_factory.mktemp("slicing"))

"""Tests on the virtual CUDA device; with .venv-vllm-<release>."""

import inspect
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.vgpu.device import slicing
from tests.vgpu.stock import FIXED, is_about_stock


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("vgpu.pytest_plugin")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that a user preloads on a slice."""
    return slicing.compiled(tmp_path_factory.mktemp("slicing"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo
    if call.when == "call" and error and error.errisinstance(AssertionError):
        assert isinstance(item, pytest.Function)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        source = inspect.getsource(item.function)
        if is_about_stock(source, parameters, str(error.traceback[-1].statement)):
            report.sections.append(("stock vLLM", FIXED))
    return report

"""@pytest.mark.vgpu(memory="8GiB", ...): a test's body runs on a virtual device.

The marked test runs in a process of its own, forked from one that has imported pytest
and torch: `python -m pytest` on that one test, on the device that the marker describes,
without the plugins that happen to be installed. Its outcome, output and traceback are
reported as the test's own. The marker's arguments are the configuration's
keys; `config` names a TOML file below them and `set` is a list of KEY=VALUE above
them; `timeout` (seconds, 300) ends a test that hangs; `env` adds to its
environment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .config import load
from .errors import VgpuError
from .server import Server

_RESULT = "VGPU_TEST_RESULT"
_SERVERS = pytest.StashKey[dict[bool, Server]]()
DEFAULT_TIMEOUT = 300


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "vgpu(memory, ...): run the test in a fresh process on a virtual CUDA device",
    )
    if path := os.environ.pop(_RESULT, None):
        config.pluginmanager.register(_Recorder(Path(path)))


class Failed(Exception):
    """The fresh process gave no outcome; the text says why."""


class _Recorder:
    """In the fresh process: keeps the reports for the one that asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: list[dict[str, Any]] = []
        self.config: pytest.Config | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.config = session.config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self.config is not None
        data = self.config.hook.pytest_report_to_serializable(
            config=self.config, report=report
        )
        self.reports.append(data)
        self.path.write_text(json.dumps(self.reports))


def _server(config: pytest.Config, nvml_absent: bool) -> Server:
    """Forks the tests of this session, from pytest and torch imported once."""
    servers = config.stash.setdefault(_SERVERS, {})
    if nvml_absent not in servers:  # a process looks for a library only once
        device = load(nvml="absent") if nvml_absent else load()
        imports = ["pytest", "vgpu.pytest_plugin", "torch"]
        servers[nvml_absent] = Server(sys.executable, imports, os.environ, device)
        config.add_cleanup(servers[nvml_absent].close)
    return servers[nvml_absent]


def _end(file: Path) -> str:
    return file.read_text(errors="replace")[-6000:] if file.exists() else ""


def _fresh_process(item: pytest.Item, marker: pytest.Mark) -> list[pytest.TestReport]:
    """Runs the item on its device; raises VgpuError or Failed."""
    options = dict(marker.kwargs)
    if marker.args:
        raise VgpuError(f"the marker vgpu takes keywords only, not {marker.args!r}")
    timeout = float(options.pop("timeout", DEFAULT_TIMEOUT))
    extra = {k: str(v) for k, v in options.pop("env", {}).items()}
    settings = options.pop("set", [])
    file = options.pop("config", None)
    configuration = load(Path(file) if file else None, settings, **options)
    with tempfile.TemporaryDirectory(prefix="vgpu-test-") as folder:
        result, out, error = (Path(folder, name) for name in ("result", "out", "error"))
        command = [
            *("-m", "pytest", item.nodeid, "-q", "--no-header"),
            *(f"--rootdir={item.config.rootpath}", "-p", "vgpu.pytest_plugin"),
            *("-p", "no:cacheprovider", "-o", "addopts="),
            "--import-mode=" + item.config.getoption("importmode"),
        ]
        # The plugins of an environment with vLLM take seconds to load.
        extra |= {_RESULT: str(result), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            status = _server(item.config, configuration.nvml_absent).run(
                configuration,
                command,
                folder=item.config.rootpath,
                environment={**os.environ, **extra},
                out=out,
                error=error,
                timeout=timeout,
            )
        except TimeoutError as late:
            raise Failed(f"{late}\n{_end(out)}{_end(error)}") from None
        if not result.exists():
            raise Failed(
                f"the fresh process ended ({status}) without a result\n"
                f"{_end(out)}{_end(error)}"
            )
        data = json.loads(result.read_text())
        written = _end(out), _end(error)
    reports = [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=d)
        for d in data
    ]
    for report in reports:
        if isinstance(report.longrepr, list):  # JSON knows no tuples
            report.longrepr = tuple(report.longrepr)
    if reports[-1].when != "teardown":
        raise Failed(
            f"the process ended ({status}) after {reports[-1].when}\n"
            + "".join(written)
        )
    if written[1].strip():
        reports[-1].sections.append(("stderr of the fresh process", written[1]))
    return reports


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> bool | None:
    marker = item.get_closest_marker("vgpu")
    if marker is None or "VGPU_RUN" in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, marker):
        item.ihook.pytest_runtest_logreport(report=report)
    # Fixtures that the previous item left set up for the module and package.
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(
    item: pytest.Item, marker: pytest.Mark
) -> Generator[pytest.TestReport, None, None]:
    found: list[pytest.TestReport] = []

    def call() -> None:
        failure = ""
        try:
            found.extend(_fresh_process(item, marker))
        except Failed as error:
            failure = str(error)
        except VgpuError as error:
            failure = f"vgpu: {error}"
        if failure:
            pytest.fail(failure, pytrace=False)

    info = pytest.CallInfo.from_call(call, "call", reraise=(KeyboardInterrupt,))
    if info.excinfo is not None:
        yield pytest.TestReport.from_item_and_call(item, info)
    else:
        yield from found

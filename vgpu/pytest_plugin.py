"""@pytest.mark.vgpu(memory="8GiB", ...): a test's body runs on a virtual device.

The marked test runs in a fresh process of its own: `python -m pytest` on that one
test, on the device that the marker describes. Its outcome, output and traceback
are reported as the test's own. The marker's arguments are the configuration's
keys; `config` names a TOML file below them and `set` is a list of KEY=VALUE above
them; `timeout` (seconds, 300) ends a test that hangs; `env` adds to its
environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from . import config, launch
from .errors import VgpuError

_RESULT = "VGPU_TEST_RESULT"
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


def _fresh_process(item: pytest.Item, marker: pytest.Mark) -> list[pytest.TestReport]:
    """Runs the item on its device; raises VgpuError or Failed."""
    options = dict(marker.kwargs)
    if marker.args:
        raise VgpuError(f"the marker vgpu takes keywords only, not {marker.args!r}")
    timeout = float(options.pop("timeout", DEFAULT_TIMEOUT))
    extra = {k: str(v) for k, v in options.pop("env", {}).items()}
    settings = options.pop("set", [])
    file = options.pop("config", None)
    configuration = config.load(Path(file) if file else None, settings, **options)
    with tempfile.TemporaryDirectory(prefix="vgpu-test-") as folder:
        run = launch.run_folder(configuration, Path(folder) / "run")
        result = Path(folder) / "result"
        env = launch.environment(configuration, run, {**os.environ, **extra})
        env[_RESULT] = str(result)
        command = [
            *(sys.executable, "-m", "pytest", item.nodeid, "-q", "--no-header"),
            *(f"--rootdir={item.config.rootpath}", "-p", "vgpu.pytest_plugin"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="),
            "--import-mode=" + item.config.getoption("importmode"),
        ]
        child = subprocess.Popen(
            command,
            env=env,
            cwd=item.config.rootpath,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        late = False
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            # What the test left running ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if late:
            out, err = child.communicate()
            raise Failed(f"no end after {timeout:g} s\n{out[-6000:]}{err[-6000:]}")
        if not result.exists():
            raise Failed(
                f"the fresh process ended ({child.returncode}) without a result\n"
                f"{out[-6000:]}{err[-6000:]}"
            )
        data = json.loads(result.read_text())
    reports = [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=d)
        for d in data
    ]
    for report in reports:
        if isinstance(report.longrepr, list):  # JSON knows no tuples
            report.longrepr = tuple(report.longrepr)
    if reports[-1].when != "teardown":
        raise Failed(
            f"the process ended ({child.returncode}) after {reports[-1].when}\n"
            f"{out[-6000:]}{err[-6000:]}"
        )
    if err.strip():
        reports[-1].sections.append(("stderr of the fresh process", err[-6000:]))
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
    # What the item before this one left set up for this one's module and package.
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

"""@pytest.mark.vgpu(memory="8GiB", ...): a test's body runs on a virtual device.

The marked test runs in a fresh process of its own: `python -m pytest` on that one
test, on the device that the marker describes. Its outcome, output and traceback
are reported as the test's own. The marker's arguments are the configuration's
keys; `timeout` (seconds, 300) ends a test that hangs; `env` adds to its
environment.
"""

from __future__ import annotations

import json
import os
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
    """Runs the item on its device; raises VgpuError or pytest.fail."""
    options = dict(marker.kwargs)
    if marker.args:
        raise VgpuError(f"the marker vgpu takes keywords only, not {marker.args!r}")
    timeout = float(options.pop("timeout", DEFAULT_TIMEOUT))
    extra = {k: str(v) for k, v in options.pop("env", {}).items()}
    settings = options.pop("set", [])
    configuration = config.load(None, settings, **options)
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
        try:
            done = subprocess.run(
                command,
                env=env,
                cwd=item.config.rootpath,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode(errors="replace")[-4000:]
            text += (late.stderr or b"").decode(errors="replace")[-4000:]
            pytest.fail(f"no end after {timeout:g} s\n{text}", pytrace=False)
        if not result.exists():
            pytest.fail(
                f"the fresh process ended ({done.returncode}) without a result\n"
                f"{done.stdout[-6000:]}{done.stderr[-6000:]}",
                pytrace=False,
            )
        data = json.loads(result.read_text())
    reports = [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=d)
        for d in data
    ]
    last = {r.when for r in reports}
    if "teardown" not in last:
        stage = reports[-1].when if reports else "start"
        pytest.fail(
            f"the process ended ({done.returncode}) after {stage}\n"
            f"{done.stdout[-6000:]}{done.stderr[-6000:]}",
            pytrace=False,
        )
    if done.stderr.strip():
        reports[-1].sections.append(("stderr of the fresh process", done.stderr[-6000:]))
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
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(
    item: pytest.Item, marker: pytest.Mark
) -> Generator[pytest.TestReport, None, None]:
    found: list[pytest.TestReport] = []

    def call() -> None:
        try:
            found.extend(_fresh_process(item, marker))
        except VgpuError as error:
            pytest.fail(f"vgpu: {error}", pytrace=False)

    info = pytest.CallInfo.from_call(call, "call", reraise=(KeyboardInterrupt,))
    if info.excinfo is not None:
        yield pytest.TestReport.from_item_and_call(item, info)
    else:
        yield from found

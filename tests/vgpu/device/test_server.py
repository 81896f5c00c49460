"""Processes forked from one that has imported: each finds a device of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vgpu import config
from vgpu.errors import VgpuError
from vgpu.server import Server

ROOT = Path(__file__).resolve().parents[3]
# Asks NVML, as platforms do when they are imported, and marks the environment.
IMPORTED = """\
import os, pynvml
pynvml.nvmlInit()
assert pynvml.nvmlDeviceGetCount() == 1
os.environ["CHANGED"] = "by the import"
os.environ.setdefault("KEPT", "by the import")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "imported.py").write_text(IMPORTED)
    path = os.pathsep.join((str(ROOT), str(folder)))
    environment = os.environ | {"PYTHONPATH": path, "CHANGED": "before"}
    started = Server(
        sys.executable, ["imported", "-json5", "absent"], environment, config.load()
    )
    yield started
    started.close()


def run(
    server: Server, script: str, folder: Path, timeout: float = 60, **device: object
) -> tuple[int, str, str]:
    (folder / "script.py").write_text(script)
    out, error = folder / "out", folder / "error"
    status = server.run(
        config.load(**device),
        [str(folder / "script.py"), "argument"],
        folder=folder,
        environment=os.environ | {"PYTHONPATH": str(ROOT), "KEPT": "by the caller"},
        out=out,
        error=error,
        timeout=timeout,
    )
    return status, out.read_text(), error.read_text()


def test_each_has_its_own_path(server: Server, tmp_path: Path) -> None:
    """What its PYTHONPATH names next to the server's is there, in front."""
    for content in ("1", "2"):
        folder = tmp_path / content
        folder.mkdir()
        (folder / "of_the_command.py").write_text(f"print({content})")
        (tmp_path / "script.py").write_text("import of_the_command")
        status = server.run(
            config.load(),
            [str(tmp_path / "script.py")],
            folder=tmp_path,
            environment=os.environ | {"PYTHONPATH": str(folder)},
            out=tmp_path / "out",
            error=tmp_path / "error",
            timeout=60,
        )
        assert (status, (tmp_path / "out").read_text()) == (0, content + "\n")


def test_each_has_the_device_it_asks_for(server: Server, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom vgpu import control\n"
        "assert 'imported' in sys.modules\n"
        "print(control.memory(), control.devices(), sys.argv[1])\n"
    )
    for memory, devices in ((2**30, 1), (3 * 2**30, 4), (2**30, 2)):
        found = run(server, script, tmp_path, memory=memory, devices=devices)
        assert found == (0, f"{memory} {devices} argument\n", "")


def test_environment_is_the_callers_and_what_imports_changed(
    server: Server, tmp_path: Path
) -> None:
    script = "import os; print(os.environ['CHANGED'], os.environ['KEPT'], sep=', ')\n"
    _, out, _ = run(server, script, tmp_path)
    assert out == "by the import, by the caller\n"


def test_imported_objects_stay_frozen(server: Server, tmp_path: Path) -> None:
    """Otherwise each garbage collection of an engine's start visits all of it."""
    script = "import gc\ngc.unfreeze()\nprint(gc.get_freeze_count() > 1000)\n"
    assert run(server, script, tmp_path) == (0, "True\n", "")


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ("", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('what is wrong')", 1, "what is wrong\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import json5", 1, "import of json5 halted; None in sys.modules"),
    ],
)
def test_status_is_that_of_the_command(
    server: Server, script: str, status: int, error: str, tmp_path: Path
) -> None:
    found, _, said = run(server, script, tmp_path)
    assert (found, error in said) == (status, True)


def state_of(pid: int) -> str:
    """As /proc tells it; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_late_command_ends_with_what_it_started(server: Server, tmp_path: Path) -> None:
    script = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
    with pytest.raises(TimeoutError, match="no end after 4 s"):
        run(server, script, tmp_path, timeout=4)
    pid = int((tmp_path / "out").read_text())
    for _ in range(100):  # a busy machine takes a moment to end a killed process
        if (state := state_of(pid)) in ("", "Z"):
            break
        time.sleep(0.1)
    assert state in ("", "Z")
    assert run(server, "print('next')", tmp_path)[1] == "next\n"


def test_command_that_has_ended_before_it_is_looked_at(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process and its status are answered at once."""
    read = server._read

    def late(timeout: float | None) -> str:
        time.sleep(0.5)
        return read(timeout)

    monkeypatch.setattr(server, "_read", late)
    assert run(server, "print('done')", tmp_path, timeout=5)[:2] == (0, "done\n")


def test_import_that_fails_is_shown(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("1 / 0\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with pytest.raises(VgpuError, match="the server ended:\n(.|\n)*ZeroDivisionError"):
        Server(sys.executable, ["failing"], environment, config.load())

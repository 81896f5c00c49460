"""An overlay that is killed or fails, at any step, is installed whole or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.installed import ARCH, Installed, install_wheel
from tests.tools.project import write_wheel

# Ends the process by SIGKILL before its nth change of a file or folder.
KILLER = """\
import os, sys
left = int(os.environ["KILL_BEFORE"])
def count(event, arguments):
    global left
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
    if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(count)
"""


def killer(folder: Path) -> dict[str, str]:
    """The environment of a command that is to be killed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(KILLER)
    return {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def test_second_overlay_at_once_is_refused(official: Installed) -> None:
    before = official.tree()
    folder = os.open(official.site / "vllm", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    for command in ("install", "status", "revert"):
        assert "another overlay is at work" in official.fails(command)
    os.close(folder)
    assert official.tree() == before


def bound_by_permissions() -> None:
    """Root, too, writes only what its owner may write."""
    if os.geteuid() == 0:
        drop, dac_override = 24, 1  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
        if ctypes.CDLL(None).prctl(drop, dac_override, 0, 0, 0):
            raise PermissionError("root must be able to drop a capability")


def test_read_only_environment_is_not_changed(official: Installed) -> None:
    before = official.tree()
    folders = [official.site, *(p for p in official.site.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    command = [str(official.python), str(official.overlay)]
    for what, message in (("install", "cannot be written"), ("status", "")):
        done = subprocess.run(
            [*command, what], capture_output=True, text=True,
            preexec_fn=bound_by_permissions,
        )  # fmt: skip
        assert done.returncode == bool(message), done.stderr
        assert message in done.stderr
    for folder in folders:
        folder.chmod(0o755)
    assert official.tree() == before


def test_full_disk_changes_nothing(official: Installed) -> None:
    """Writing fails from the first byte over 256, as on a full disk."""
    before = official.tree()
    done = subprocess.run(
        [str(official.python), str(official.overlay), "install"],
        capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256)),
    )  # fmt: skip
    assert done.returncode == 1 and "Nothing was changed" in done.stderr
    assert official.tree() == before


@pytest.mark.parametrize("command", ["install", "revert"])
def test_killed_at_any_step(official: Installed, command: str, tmp_path: Path) -> None:
    """If killed, run it again: it rolls back, and never leaves a part."""
    environment = killer(tmp_path / "killer")
    released = official.tree()
    official.ok("install")
    patched = official.sources()
    if command == "install":
        official.ok("revert")
    opposite = "revert" if command == "install" else "install"
    interrupted = 0
    for step in range(1, 500):
        code, _, error = official.run(command, **environment, KILL_BEFORE=str(step))
        if code == 0:
            break
        assert code == -signal.SIGKILL, error
        # The same command, or its opposite, rolls back to the start.
        shown = official.run(*([command] if step % 2 else [opposite]))[1]
        interrupted += "was undone first" in shown
        if step % 2:
            official.ok(opposite)
        if command == "install":
            assert official.tree() == released
        else:
            assert official.sources() == patched
    assert code == 0 and step > 40 and interrupted > 20


@pytest.mark.parametrize("command", ["install", "revert"])
def test_reinstalled_after_a_kill(
    make: Callable[..., Installed],
    index: tuple[str, Path],
    tmp_path: Path,
    command: str,
) -> None:
    """The reinstalled files stay; if files are mixed, the error says what to do."""
    (wheel,) = index[1].glob(f"*_{ARCH}.whl")
    other = tmp_path / "other" / wheel.name
    other.parent.mkdir()
    write_wheel(other, native=b"reinstalled native code")
    environment = killer(tmp_path / "killer")
    refused = 0
    for step in range(10, 200, 12):
        env = make("--compile-bytecode", name=f"env{step}")
        if command == "revert":
            env.ok("install")
        code, _, error = env.run(command, **environment, KILL_BEFORE=str(step))
        assert code in (0, -signal.SIGKILL), error
        if code == 0:
            break
        interrupted = (env.site / ".vllm-envelope/journal.json").exists()
        install_wheel(env.python, other, "--reinstall")
        before = env.tree()
        if interrupted:
            assert "Remove .vllm-envelope, vllm and vllm-*" in env.fails("install")
            assert env.tree() == before
            refused += 1
            infos = [path.name for path in env.site.glob("vllm-*.dist-info")]
            for name in (".vllm-envelope", "vllm", *infos):
                shutil.rmtree(env.site / name)
            install_wheel(env.python, other)
        assert "native.abi3.so is not the official file" in env.fails("install")
        env.ok("install", "--other-build")
        env.ok("revert")
        native = (env.site / "vllm/native.abi3.so").read_bytes()
        assert native == b"reinstalled native code"
    assert code == 0 and refused > 2


def test_error_at_any_step_is_undone(official: Installed, tmp_path: Path) -> None:
    (tmp_path / "error").mkdir()
    failing = KILLER.replace(
        "os.kill(os.getpid(), 9)",
        "print('injected', file=sys.stderr); raise OSError(5, 'I/O error')",
    )
    (tmp_path / "error/sitecustomize.py").write_text(failing)
    path = {"PYTHONPATH": str(tmp_path / "error"), "PYTHONDONTWRITEBYTECODE": "1"}
    before = official.tree()
    undone = 0
    for step in range(1, 500):
        code, _, error = official.run("install", **path, KILL_BEFORE=str(step))
        if "injected" not in error:
            break
        if code == 0:  # it did not matter
            official.ok("status")
            official.ok("revert")
        else:
            assert "I/O error" in error
            if "Run it again" in error:
                official.run("revert")
            else:
                assert "Nothing was changed" in error or "'status' says" in error
            undone += 1
        assert official.tree() == before
    assert code == 0 and undone > 30

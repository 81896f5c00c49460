"""Starts a command on the virtual device and cleans up after it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import build
from .config import Configuration
from .errors import VgpuError


def run_folder(configuration: Configuration, folder: Path | None = None) -> Path:
    """Makes the folder that the processes of a run share."""
    if folder is None:
        memory = Path("/dev/shm")
        root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        _sweep(root)
        folder = Path(tempfile.mkdtemp(prefix=f"vgpu-{os.getpid()}-", dir=root))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state").unlink(missing_ok=True)
    (folder / "config").write_text(configuration.lines())
    for key in ("timeline", "report"):  # processes append to them
        if path := configuration.run.get(key):
            _start_afresh(Path(path), key)
    return folder


def _sweep(root: Path) -> None:
    """Removes leftovers of killed launchers, unless their command is still alive."""
    for old in root.glob("vgpu-[0-9]*-*"):
        pid = old.name.split("-")[1]
        alive = Path(f"/proc/{pid}").exists() or _in_use(old / "state")
        with contextlib.suppress(FileNotFoundError):  # another launcher sweeps too
            if not alive and old.stat().st_uid == os.getuid():
                shutil.rmtree(old, ignore_errors=True)


def _in_use(state: Path) -> bool:
    """Whether the run has a live process: each holds a lock."""
    try:
        with state.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _start_afresh(path: Path, key: str) -> None:
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise VgpuError(f"{key}: cannot write {path}: {error.strerror}") from None


def environment(
    configuration: Configuration, run: Path, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a process on the device."""
    library = build.ensure()
    result = dict(os.environ if base is None else base)
    nvml = library / ("nvml-absent" if configuration.nvml_absent else "nvml")
    search = [str(library), str(nvml), result.get("LD_LIBRARY_PATH", "")]
    # Libraries that override the driver's calls come before the driver, as usual.
    preload = [
        result.get("LD_PRELOAD", ""),
        *(str(p) for p in sorted(library.glob("lib*.so.*"))),
    ]
    result["LD_LIBRARY_PATH"] = ":".join(p for p in search if p)
    result["LD_PRELOAD"] = ":".join(p for p in preload if p)
    if (runtime := library / build.CUTE_DSL).exists():
        result.setdefault("CUTE_DSL_LIBS", str(runtime))
    result["VGPU_RUN"] = str(run)
    result["VGPU_UNIFIED"] = str(
        int(any(d["integrated"] for d in configuration.devices))
    )
    package = Path(__file__).resolve().parent
    paths = [p for p in result.get("PYTHONPATH", "").split(":") if p]
    if str(package.parent) not in paths:
        paths.append(str(package.parent))
    if configuration.run["interpret"]:
        paths.insert(0, str(package / "startup"))
    result["PYTHONPATH"] = ":".join(paths)
    return result


def _reap(environment: Mapping[str, str], run: Path) -> None:
    """Writes the timeline and report of processes that were killed."""
    if not (run / "state").exists():
        return
    library = Path(environment["LD_LIBRARY_PATH"].split(":")[0]) / "libcuda.so.1"
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).vgpu_reap()"
    subprocess.run(
        [sys.executable, "-S", "-E", "-c", script, str(library)],
        env={"VGPU_RUN": str(run), "VGPU_OBSERVER": "1"},
        check=False,
    )


@contextlib.contextmanager
def device(
    configuration: Configuration,
    base: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
) -> Iterator[dict[str, str]]:
    """A device while it lasts: the environment of its processes."""
    shared = run_folder(configuration, folder)
    try:
        env = environment(configuration, shared, base)
        try:
            yield env
        finally:
            _reap(env, shared)
    finally:
        if folder is None:
            shutil.rmtree(shared, ignore_errors=True)


def run(
    configuration: Configuration,
    command: Sequence[str],
    *,
    folder: Path | None = None,
) -> int:
    """Runs the command; returns its exit status, 128 + n for signal n."""
    with device(configuration, folder=folder) as env:
        try:
            child = subprocess.Popen(command, env=env)
        except OSError as error:
            raise VgpuError(f"cannot run {command[0]}: {error.strerror}") from None

        def forward(number: int, _: object) -> None:
            child.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, forward)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the child
        status = child.wait()
    return status if status >= 0 else 128 - status


def library() -> ctypes.CDLL:
    """The library as loaded in this process; raises VgpuError off the device."""
    if "VGPU_RUN" not in os.environ:
        raise VgpuError(
            "this process is not on a virtual device: start it with "
            "python -m vgpu -- COMMAND"
        )
    return ctypes.CDLL(os.environ.get("VGPU_LIBRARY", "libcuda.so.1"))

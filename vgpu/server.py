"""A process on the device that imports once, and forks a process for each command.

Importing torch takes seconds, and vLLM many; a fork takes almost no time. The server
imports the given modules and never calls CUDA itself. So each fork finds its own
device, like a process that has just started: the one that its run folder describes.

Limits of a fork: modules that ask the device when they are imported cannot be imported
in the server, and vLLM's platform is chosen in the server. A command that depends on
either needs its own process (`launch.run`), as does a library to preload: LD_PRELOAD is
read when a process starts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from . import frozen, launch, triton_launches
from .config import Configuration
from .errors import VgpuError


class Server:
    """Forks commands for one environment, one at a time.

    Args:
        python: the interpreter.
        imports: modules to import if they are installed; one after a "-" is hidden, as
            if it were not.
        environment: of the server; a command's own comes with it.
        configuration: the device that the server's imports may ask (by NVML alone).

    Raises:
        VgpuError: it ended before it was ready; shows its output.
    """

    def __init__(
        self,
        python: str | Path,
        imports: Sequence[str],
        environment: Mapping[str, str],
        configuration: Configuration,
    ) -> None:
        self._resources = ExitStack()
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._log = self._resources.enter_context(log)
        # torch.cuda.is_available() may be asked by an import, and must not initialize
        # the driver, which a forked process cannot use then.
        settings = {**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [str(python), "-P", "-m", "vgpu.server", *imports],
            env=self._resources.enter_context(launch.device(configuration, settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,  # what select() waits for must not wait in a buffer
        )
        try:
            self._read(None)
        except VgpuError:
            self.close()
            raise

    def run(
        self,
        configuration: Configuration,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        out: Path,
        error: Path,
        timeout: float,
    ) -> int:
        """Runs a script (or, after "-m", a module) with its arguments on a device.

        Returns its exit status, -n for signal n. Its process group ends with it.

        Raises:
            TimeoutError: it was killed after `timeout` seconds.
            VgpuError: the server ended.
        """
        with launch.device(configuration, environment) as env:
            order = {
                "command": list(command),
                "environment": env,
                "folder": str(folder),
                "out": str(out),
                "error": str(error),
            }
            assert self._process.stdin
            try:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # reading says why
            group = int(self._read(None))
            try:
                return int(self._read(timeout))
            except TimeoutError:
                _kill(group)
                self._read(None)
                raise
            finally:
                _kill(group)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._resources.close()

    def _read(self, timeout: float | None) -> str:
        pipe = self._process.stdout
        assert pipe
        if not select.select([pipe], [], [], timeout)[0]:
            raise TimeoutError(f"no end after {timeout:g} s")
        line = pipe.readline().decode().strip()
        if not line:
            self._log.seek(0)
            raise VgpuError(f"the server ended:\n{self._log.read()[-3000:]}")
        return line


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def end_with(body: Callable[[], object]) -> NoReturn:
    """Run `body` as the rest of a forked process, which ends as an interpreter does."""
    status = 1
    try:
        body()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                status = status or 1
        os._exit(status)


def _become(
    order: dict[str, Any], added: dict[str, str], changed: dict[str, str]
) -> None:
    """The forked process: runs a command line like an interpreter.

    `added` and `changed` are the imports' changes to the environment.
    """
    os.setsid()
    files = {0: os.devnull, 1: order["out"], 2: order["error"]}
    for number, path in files.items():
        mode = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, mode, 0o644), number)
    os.environ.clear()
    os.environ.update(added | order["environment"] | changed)
    os.chdir(order["folder"])
    triton_launches.install()
    frozen.keep()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    command = order["command"]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, order["folder"])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def main(imports: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of imports is no answer
    before = dict(os.environ)
    for name in imports:
        if name.startswith("-"):
            sys.modules[name[1:]] = None  # type: ignore[assignment]
        elif importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    now = dict(os.environ)
    added = {key: now[key] for key in now.keys() - before.keys()}
    changed = {key: now[key] for key in now.keys() & before if now[key] != before[key]}
    frozen.freeze()
    print("ready", file=answers)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            end_with(partial(_become, json.loads(line), added, changed))
        print(child, file=answers)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
